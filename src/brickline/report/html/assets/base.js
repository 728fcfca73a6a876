"use strict";
// The base of every page: DOM helpers, figures, theme, sections and keys, as `window.brickline`.
// It knows nothing of profiles or divergences. Text is only ever put into text nodes: no helper
// takes markup, sets a style or handler from a string, or makes a link that leaves the page.
window.brickline = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
  const ATTRIBUTES = /^(?:class|id|role|title|tabindex|type|for|value|placeholder|name|scope|colspan|rowspan|open|disabled|hidden|checked|selected|autocomplete|spellcheck|min|max|step|rows|readonly|datetime|aria-[a-z]+|data-[a-z-]+)$/;
  const SHAPES = /^(?:class|id|role|x|y|x1|x2|y1|y2|cx|cy|r|rx|ry|d|points|width|height|viewBox|preserveAspectRatio|transform|text-anchor|dominant-baseline|tabindex|stroke-dasharray|stroke-width|opacity|fill|stroke|fill-opacity|vector-effect|aria-[a-z]+|data-[a-z-]+)$/;

  // --- text ---------------------------------------------------------------------------------
  /** Text in which control and direction characters are shown, not obeyed. */
  function plain(text) {
    return String(text).replace(UNSEEN, (each) => each === "\n" ? "↵" : `\\u{${each.codePointAt(0).toString(16)}}`);
  }

  function shorten(text, most = 64) {
    const shown = Array.from(plain(text));
    return shown.length <= most ? shown.join("") : shown.slice(0, most - 1).join("") + "…";
  }

  // --- elements -----------------------------------------------------------------------------
  function append(node, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }

  function set(node, attributes, allowed) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) {
        if (typeof value !== "function") throw new TypeError(`${name}: expected a function`);
        node.addEventListener(name.slice(2), value);
      } else if (name === "style") {
        for (const [property, worth] of Object.entries(value)) node.style.setProperty(property, String(worth));
      } else if (name === "href") {
        if (!String(value).startsWith("#")) throw new TypeError(`href: expected a place on this page, got ${value}`);
        node.setAttribute("href", value);
      } else if (allowed.test(name)) {
        node.setAttribute(name, value === true ? "" : String(value));
      } else throw new TypeError(`attribute ${name} is not known`);
    }
    return node;
  }

  const TAGS = /^(?:a|abbr|article|aside|b|button|canvas|caption|code|dd|details|dialog|div|dl|dt|em|fieldset|figcaption|figure|footer|h1|h2|h3|h4|header|hr|i|input|kbd|label|legend|li|mark|ol|optgroup|option|output|p|pre|s|section|select|small|span|strong|sub|summary|sup|table|tbody|td|textarea|tfoot|th|thead|time|tr|ul|var)$/;
  /** An HTML element; strings among the children become text. */
  function el(tag, attributes, ...children) {
    if (!TAGS.test(tag)) throw new TypeError(`<${tag}> is not made here`);
    return append(set(document.createElement(tag), attributes, ATTRIBUTES), children);
  }

  /** An SVG element. */
  function svg(tag, attributes, ...children) {
    if (!/^(?:svg|g|rect|circle|ellipse|line|path|polyline|polygon|text|tspan|title|desc)$/.test(tag)) throw new TypeError(`<${tag}> is not made here`);
    return append(set(document.createElementNS(SVG, tag), attributes, SHAPES), children);
  }

  function clear(node) {
    node.replaceChildren();
    return node;
  }

  // --- figures ------------------------------------------------------------------------------
  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const digits = (value) => { const size = Math.abs(value); return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2); };
  function time(ns) {
    if (!known(ns)) return ns === null || ns === undefined ? "–" : String(ns);
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) if (Math.abs(ns) >= 0.9995 * size) return `${digits(ns / size)} ${unit}`;
    return `${ns >= 10 || Number.isInteger(ns) ? ns.toFixed(0) : ns.toFixed(1)} ns`;
  }
  function count(value) {
    return known(value) ? Math.round(value).toLocaleString("en-US") : value === null || value === undefined ? "–" : String(value);
  }
  function percent(share, places = 1) {
    return known(share) ? `${(100 * share).toFixed(places)} %` : share === null || share === undefined ? "–" : String(share);
  }
  function bytes(value) {
    if (!known(value)) return "–";
    for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${digits(value / size)} ${unit}`;
    return `${value} B`;
  }
  /** A figure with three significant digits and k, M, G, T. */
  function rate(value) {
    if (!known(value)) return value === null || value === undefined ? "–" : String(value);
    for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) if (Math.abs(value) >= size) return digits(value / size) + unit;
    return digits(value);
  }
  /** A figure of any size: plain from 0.001 to 9999, else with an exponent. */
  function figure(value, places = 3) {
    if (!known(value)) return value === null || value === undefined ? "–" : String(value);
    const size = Math.abs(value);
    if (value === 0) return "0";
    return size >= 1e-3 && size < 1e4 ? String(Number(value.toPrecision(places))) : value.toExponential(places - 1).replace("e+", "e");
  }

  // --- data ---------------------------------------------------------------------------------
  const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
  /** The typed array of a column that Python packed. */
  function unpack(column) {
    if (Array.isArray(column)) return column;
    const text = atob(column.data);
    const raw = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) raw[at] = text.charCodeAt(at);
    return new KINDS[column.kind](raw.buffer);
  }
  const data = () => JSON.parse(document.getElementById("data").textContent);

  // --- theme --------------------------------------------------------------------------------
  const redraws = new Set();
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  function dark() {
    const asked = document.documentElement.dataset.theme;
    return asked ? asked === "dark" : system.matches;
  }
  /** A colour of the theme by its name in base.css, as it is now. */
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("brickline-theme", theme); } catch { /* a file may have no storage */ }
    redraws.forEach((redraw) => redraw());
  }
  const switchTheme = () => setTheme(dark() ? "light" : "dark");
  /** Call again whenever colours or the width change. */
  function onRedraw(redraw) { redraws.add(redraw); }

  // --- sections -----------------------------------------------------------------------------
  const sections = [];
  /** Add a section, called `label` in the navigation; `build(body)` fills it when its turn comes. */
  function section({ id, title, label, lead, build, badge }) {
    const heading = el("h2", { id: `${id}-title` }, title);
    const body = el("div", { class: "body" });
    const node = el("section", { id, "aria-labelledby": `${id}-title`, tabindex: "-1" },
      el("div", { class: "heading" }, heading, lead ? el("p", { class: "lead" }, lead) : null), body);
    document.getElementById("main").append(node);
    const link = el("a", { href: `#${id}` }, el("span", null, label || title), badge ? el("small", null, badge) : null);
    document.getElementById("nav").append(link);
    sections.push({ id, node, body, build, link });
    return node;
  }

  function built(each) {
    if (!each.build) return;
    const build = each.build;
    each.build = null;
    try { build(each.body); } catch (error) {
      console.error(error);
      each.body.append(notice("bad", `This section could not be drawn: ${error.message}`));
    }
  }

  /** Build the first sections at once and the others one after the other, then say so. */
  function start({ first = 2 } = {}) {
    sections.slice(0, first).forEach(built);
    follow();
    const rest = sections.slice(first);
    const next = () => {
      const each = rest.shift();
      if (!each) {
        document.documentElement.dataset.ready = "yes";
        performance.mark("brickline-ready");
        return;
      }
      built(each);
      setTimeout(next);
    };
    setTimeout(next);
    window.addEventListener("beforeprint", () => sections.forEach(built));
  }

  /** Mark in the navigation where the reader is. */
  function follow() {
    const seen = new Map();
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting ? entry.intersectionRatio + 1e-6 : 0);
      const here = sections.find((each) => seen.get(each.id));
      for (const each of sections) {
        if (each === here) {
          each.link.setAttribute("aria-current", "true");
          // In a narrow window the navigation is a row that scrolls by itself.
          const row = each.link.parentElement;
          row.scrollLeft = each.link.offsetLeft - row.offsetLeft - row.clientWidth / 2 + each.link.offsetWidth / 2;
        }
        else each.link.removeAttribute("aria-current");
      }
    }, { rootMargin: "-12% 0px -60% 0px", threshold: [0, 0.25, 0.5] });
    for (const each of sections) watch.observe(each.node);
  }

  let aimed = { at: -1, when: -Infinity };
  function go(by) {
    // While the page still scrolls to a section, the next key counts from there.
    const now = performance.now(), scrolling = now - aimed.when < 900;
    const here = scrolling ? aimed.at : sections.findIndex((each) => each.link.hasAttribute("aria-current"));
    aimed = { at: Math.max(0, Math.min(sections.length - 1, here + by)), when: now };
    const to = sections[aimed.at];
    if (!to) return;
    to.node.scrollIntoView();
    to.node.focus({ preventScroll: true });
  }

  // --- small parts --------------------------------------------------------------------------
  /** A line that says something about the report: "info", "warn" or "bad". */
  function notice(kind, ...children) {
    return el("p", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "note" }, ...children);
  }
  /** The title of the page and what stands below it. */
  function masthead({ title, kicker, line, chips = [] }) {
    const node = el("div", { class: "masthead" },
      kicker ? el("p", { class: "kicker" }, kicker) : null,
      el("h1", { title: title.length > 80 ? plain(title) : null }, shorten(title, 120)),
      line ? el("p", { class: "line" }, line) : null,
      chips.length ? el("p", { class: "chips" }, chips.map((each) => each instanceof Node ? each : el("span", { class: "chip" }, plain(each)))) : null);
    document.getElementById("main").append(node);
    return node;
  }
  /** Big figures in a row: [{value, label, note}]. */
  function figures(list) {
    return el("dl", { class: "figures" }, list.map((each) => el("div", { class: each.kind || null },
      el("dt", null, each.label), el("dd", null, each.value, each.note ? el("small", null, each.note) : null))));
  }
  /** A button that copies a text, and says that it did. */
  function copyButton(text, label = "Copy") {
    const button = el("button", { type: "button", class: "copy", onclick: async () => {
      try { await navigator.clipboard.writeText(text); } catch {
        const area = el("textarea", { class: "offscreen" });
        area.value = text;
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = label; }, 1500);
    } }, label);
    return button;
  }
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  /** Show lines beside the pointer; no lines hide them. */
  function hover(x, y, lines) {
    if (!lines) { tip.hidden = true; return; }
    clear(tip);
    lines.forEach((line, at) => tip.append(el("div", { class: at ? null : "first" }, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18)}px`;
  }

  // --- keys ---------------------------------------------------------------------------------
  const keys = [["j / k", "next and previous section"], ["/", "filter the nearest table"], ["t", "light or dark"], ["?", "this list"],
    ["Enter", "sort by a column, open a row"], ["↑ ↓", "move between rows"]];
  /** Add a line to the list of keys. */
  const addKey = (key, does) => keys.push([key, does]);
  function showKeys() {
    const dialog = el("dialog", { class: "keys", "aria-label": "Keys" }, el("h2", null, "Keys"),
      el("dl", null, keys.map(([key, does]) => [el("dt", null, el("kbd", null, key)), el("dd", null, does)])),
      el("button", { type: "button", onclick: () => dialog.close() }, "Close"));
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    document.body.append(dialog);
    dialog.showModal();
  }
  function nearestFilter() {
    const all = [...document.querySelectorAll("input[type=search]")];
    const below = all.find((each) => each.getBoundingClientRect().bottom > 60);
    (below || all[all.length - 1])?.focus();
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, textarea, select, dialog")) return;
    const does = { j: () => go(1), k: () => go(-1), t: switchTheme, "?": showKeys, "/": nearestFilter }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });

  try {
    const kept = localStorage.getItem("brickline-theme");
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch { /* a file may have no storage */ }
  document.body.append(tip);
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  system.addEventListener("change", () => redraws.forEach((redraw) => redraw()));
  let width = innerWidth;
  window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraws.forEach((redraw) => redraw()); } });
  window.addEventListener("scroll", () => hover(), { passive: true });

  return { el, svg, clear, plain, shorten, time, count, percent, bytes, rate, figure, known, unpack, data, dark, colour, onRedraw,
    section, start, notice, masthead, figures, copyButton, hover, addKey };
})();
