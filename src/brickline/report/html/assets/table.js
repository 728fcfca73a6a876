"use strict";
// brickline.table: rows that sort, filter and open. Only the rows in view are in the document, so
// that tens of thousands of them cost as much as twenty.
(() => {
  const { el, clear, count, plain } = brickline;
  const VIRTUAL = 150;
  const ROW = 34;

  /**
   * Make a table.
   *   label    what the table holds, for those who do not see it
   *   columns  [{title, value(row) -> number|string|null, show(row) -> Node|string, left, hint, first: "up"|"down", narrow: false to hide on a narrow window}]
   *   rows     any values
   *   text     row -> the text that the filter looks in; without it there is no filter
   *   sort     {at, down}: the column to begin with
   *   open     row -> Node shown below the row when it is opened
   *   choices  [{label, test(row)}]: one of them narrows the rows further, "all" first by itself
   *   noun     what rows are called; one: what a single row is, the noun without its "s" by default
   * Returns {node, show(rows), filter(text), shown() -> rows}.
   */
  brickline.table = ({ label, columns, rows, text, sort, open, choices, noun = "rows", one = noun.replace(/s$/, "") }) => {
    const order = { at: sort ? sort.at : -1, down: sort ? sort.down !== false : true };
    let words = "", chosen = -1, shown = [], opened = null, active = 0;
    const said = el("output", { class: "said", "aria-live": "polite" });
    const body = el("tbody");
    const heads = columns.map((column, at) => el("th", { scope: "col", class: kind(column), title: column.hint || null },
      el("button", { type: "button", onclick: () => sortBy(at) }, column.title, el("span", { class: "arrow", "aria-hidden": "true" }))));
    const table = el("table", { "aria-label": label, role: open ? "treegrid" : null }, el("thead", null, el("tr", null, heads)), body);
    const scroller = el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": `${label}, scrolls` }, table);
    const lines = haystacks(rows, text);

    function kind(column) {
      return [column.left ? "left" : "", column.narrow === false ? "wide-only" : "", column.className || ""].filter(Boolean).join(" ") || null;
    }
    function haystacks(list, of) { return of ? new Map(list.map((row) => [row, String(of(row)).toLowerCase()])) : null; }

    function sortBy(at) {
      const column = columns[at];
      if (order.at === at) order.down = !order.down;
      else { order.at = at; order.down = column.first ? column.first === "down" : !column.left; }
      arrange();
    }

    function compare(column, down) {
      const sign = down ? -1 : 1;
      return (a, b) => {
        const x = column.value(a), y = column.value(b);
        const noX = x === null || x === undefined || x === "", noY = y === null || y === undefined || y === "";
        if (noX || noY) return noX - noY;
        if (typeof x === "number" && typeof y === "number") return sign * (x - y);
        const s = String(x), t = String(y);
        return sign * (s < t ? -1 : s > t ? 1 : 0);
      };
    }

    function arrange() {
      const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
      shown = rows.filter((row) => (chosen < 0 || choices[chosen].test(row)) && parts.every((part) => lines.get(row).includes(part)));
      if (order.at >= 0) shown.sort(compare(columns[order.at], order.down));
      heads.forEach((head, at) => {
        if (at === order.at) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      const called = rows.length === 1 ? one : noun;
      said.textContent = shown.length === rows.length ? `${count(rows.length)} ${called}` : `${count(shown.length)} of ${count(rows.length)} ${called}`;
      active = 0;
      scroller.scrollTop = 0;
      drawn = [-1, -1];
      draw();
    }

    // What is in the document: rows from `from` to `to`, with empty rows that keep their space.
    let drawn = [-1, -1];
    const isVirtual = () => shown.length > VIRTUAL;
    function draw() {
      let from = 0, to = shown.length;
      scroller.classList.toggle("tall", isVirtual());
      if (isVirtual()) {
        const inView = Math.ceil((scroller.clientHeight || 600) / ROW);
        from = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 10);
        to = Math.min(shown.length, from + inView + 24);
      }
      if (from === drawn[0] && to === drawn[1]) return;
      drawn = [from, to];
      clear(body);
      if (!shown.length) {
        body.append(el("tr", { class: "none" }, el("td", { colspan: columns.length, class: "left" }, rows.length ? `No ${noun} match.` : `No ${noun}.`)));
        return;
      }
      if (from) body.append(space(from));
      for (let at = from; at < to; at++) body.append(...line(shown[at], at));
      if (to < shown.length) body.append(space(shown.length - to));
      table.setAttribute("aria-rowcount", shown.length + 1);
    }

    function space(size) {
      return el("tr", { class: "space", "aria-hidden": "true", style: { height: `${size * ROW}px` } }, el("td", { colspan: columns.length }));
    }

    function line(row, at) {
      const cells = columns.map((column, place) => {
        const inside = column.show ? column.show(row) : plain(column.value(row) ?? "");
        return el(place ? "td" : "th", { class: kind(column), scope: place ? null : "row" }, inside);
      });
      const node = el("tr", { "aria-rowindex": at + 2, tabindex: open ? (at === active ? "0" : "-1") : null,
        class: open ? "opens" : null, "aria-expanded": open ? String(opened === row) : null, "data-at": at }, cells);
      if (!open) return [node];
      node.addEventListener("click", (event) => { if (!event.target.closest("button, a, input") && !String(getSelection())) toggle(row, at); });
      return opened === row ? [node, el("tr", { class: "opened" }, el("td", { colspan: columns.length, class: "left" }, open(row)))] : [node];
    }

    function toggle(row, at) {
      opened = opened === row ? null : row;
      active = at;
      drawn = [-1, -1];
      draw();
      focusRow(at);
    }

    function focusRow(at) {
      if (isVirtual()) {
        const top = at * ROW, view = scroller.clientHeight - ROW * 2;
        if (top < scroller.scrollTop || top > scroller.scrollTop + view) scroller.scrollTop = Math.max(0, top - view / 2);
        draw();
      }
      active = at;
      for (const each of body.querySelectorAll("tr[data-at]")) each.tabIndex = Number(each.dataset.at) === at ? 0 : -1;
      body.querySelector(`tr[data-at="${at}"]`)?.focus({ preventScroll: isVirtual() });
    }

    body.addEventListener("keydown", (event) => {
      const node = event.target.closest("tr[data-at]");
      if (!node || !open || event.target !== node) return;
      const at = Number(node.dataset.at);
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1, PageDown: at + 15, PageUp: at - 15 }[event.key];
      if (to !== undefined) focusRow(Math.max(0, Math.min(shown.length - 1, to)));
      else if (event.key === "Enter" || event.key === " ") toggle(shown[at], at);
      else if (event.key === "Escape" && opened) toggle(opened, at);
      else return;
      event.preventDefault();
    });
    scroller.addEventListener("scroll", () => { if (isVirtual()) draw(); }, { passive: true });

    const search = text ? el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${noun}`, autocomplete: "off", spellcheck: "false",
      oninput: () => { words = search.value; arrange(); } }) : null;
    const buttons = (choices ? [{ label: "All" }, ...choices] : []).map((choice, at) => el("button", { type: "button", "aria-pressed": String(at === 0), onclick: () => {
      chosen = at - 1;
      buttons.forEach((each, place) => each.setAttribute("aria-pressed", String(place === at)));
      arrange();
    } }, choice.label));
    const bar = el("div", { class: "bar" }, search, buttons.length ? el("div", { class: "choices", role: "group", "aria-label": `Which ${noun}` }, buttons) : null, said);
    arrange();
    return {
      node: el("div", { class: "table" }, bar, scroller),
      filter(value) { words = value; if (search) search.value = value; arrange(); },
      shown: () => shown,
    };
  };
})();
