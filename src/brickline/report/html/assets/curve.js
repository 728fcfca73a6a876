"use strict";
// brickline.curve: local and propagated error over depth, on a logarithmic scale, against the bound.
// Hover, touch and arrow keys choose a brick; what is known of it stands below the drawing.
brickline.curve = (() => {
  const { el, svg, clear, plain, count, decades, scale, onRedraw } = brickline;
  const { error, ratio, about, name, call, chip, number } = brickline.verdicts;
  const GUILTY = new Set(["culprit", "suspect", "non-finite origin"]);
  const MOST_DECADES = 12;
  const positive = (value) => typeof value === "number" && Number.isFinite(value) && value > 0;
  const broken = (value) => typeof value === "number" && !Number.isFinite(value);
  /** The local error at which z would be 1: the most that rounding makes of this brick. */
  const bound = (row) => positive(row.z) && positive(row.local_error) ? row.local_error / row.z : null;
  const power = (value) => "10" + String(Math.round(Math.log10(value))).replace(/[-\d]/g, (each) => each === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(each)]);

  function limits(rows, floor) {
    const found = [floor, ...rows.flatMap((row) => [row.local_error, row.propagated_error, bound(row)])].filter(positive);
    if (!found.length) return [1e-8, 1];
    const top = Math.ceil(Math.log10(Math.max(...found)) + 0.05), low = Math.floor(Math.log10(Math.min(...found)) - 0.05);
    return [10 ** Math.max(Math.min(low, top - 2), top - MOST_DECADES), 10 ** top];
  }

  /** Runs of neighbours of one layer: [{layer, from, to}]. */
  function layers(rows) {
    const found = [];
    rows.forEach((row, at) => {
      const last = found[found.length - 1];
      if (last && last.layer === row.layer_idx) last.to = at;
      else found.push({ layer: row.layer_idx, from: at, to: at });
    });
    return found;
  }

  /** A path through the places that are known; a gap where one is not. */
  function path(places) {
    let text = "", pen = false;
    for (const place of places) {
      if (!place) { pen = false; continue; }
      text += `${pen ? "L" : "M"}${place[0].toFixed(1)} ${place[1].toFixed(1)}`;
      pen = true;
    }
    return text;
  }

  function chart(rows, data, chosen) {
    const floor = number(data.noise_floor);
    const bounds = rows.map(bound);
    const hasBounds = bounds.some((each) => each !== null);
    const [low, high] = limits(rows, hasBounds ? null : floor);
    const node = el("div", { class: "curve", tabindex: "0", role: "slider", "aria-label": "Error over depth: arrow keys choose a brick",
      "aria-valuemin": "1", "aria-valuemax": rows.length });
    let width = 0, x = null, y = null, cursor = null, frame = {};

    function draw() {
      const wide = node.clientWidth;
      if (!wide) return;
      width = wide;
      const high_px = wide < 560 ? 250 : 330;
      frame = { left: 46, right: wide - 12, top: 34, bottom: high_px - 30 };
      const step = (frame.right - frame.left) / Math.max(1, rows.length);
      x = (at) => frame.left + step * (at + 0.5);
      y = scale(low, high, frame.bottom, frame.top, true);
      const place = (value) => Math.max(frame.top, Math.min(frame.bottom, y(value)));
      const shown = (value) => value === null || value === undefined ? null : broken(value) ? frame.top - 8 : value > 0 ? place(value) : frame.bottom;
      const root = svg("svg", { width: wide, height: high_px, viewBox: `0 0 ${wide} ${high_px}`, "aria-hidden": "true" });
      root.append(bands(step), grid(place), boundary(place, shown, step));
      // A local error is one brick's own and stands alone; the output's goes on from brick to brick.
      root.append(svg("path", { class: "local", "stroke-width": Math.max(0.6, Math.min(2, step * 0.4)).toFixed(2),
        d: rows.map((row, at) => positive(row.local_error) ? `M${x(at).toFixed(1)} ${frame.bottom}V${shown(row.local_error).toFixed(1)}` : "").join("") }));
      root.append(dots(shown, step));
      root.append(svg("path", { class: "propagated", d: path(rows.map((row, at) => row.propagated_error ? [x(at), shown(row.propagated_error)] : null)) }), marks(shown));
      cursor = svg("g", { class: "cursor" });
      root.append(cursor);
      clear(node).append(root);
      choose(chosen.at, false);
    }

    function bands(step) {
      const group = svg("g", { class: "bands" });
      const found = layers(rows), room = 14 + 7 * String(Math.max(...found.map((each) => each.layer ?? 0))).length;
      const stride = [1, 2, 4, 5, 10, 20, 50, 100, 200, 500, 1000].find((each) => each * (frame.right - frame.left) / found.length >= room) || 1e9;
      let lastText = -Infinity;
      for (const [order, each] of found.entries()) {
        const from = x(each.from) - step / 2, wide = step * (each.to - each.from + 1);
        if (each.layer === null) continue;
        if (order % 2 === 0) group.append(svg("rect", { x: from, y: frame.top, width: wide, height: frame.bottom - frame.top }));
        const middle = from + wide / 2;
        if (each.layer % stride || middle - lastText < room) continue;
        group.append(svg("text", { x: middle, y: frame.bottom + 18, "text-anchor": "middle" }, String(each.layer)));
        lastText = middle;
      }
      group.append(svg("text", { x: frame.left - 8, y: frame.bottom + 18, "text-anchor": "end" }, "layer"));
      return group;
    }

    function grid(place) {
      const group = svg("g", { class: "grid" });
      const all = decades(low, high), every = Math.ceil(all.length / 7);
      all.forEach((value, at) => {
        const to = place(value);
        group.append(svg("line", { x1: frame.left, x2: frame.right, y1: to, y2: to }));
        if (at % every === 0) group.append(svg("text", { x: frame.left - 8, y: to + 4, "text-anchor": "end" }, power(value)));
      });
      return group;
    }

    /** What rounding explains: below each brick's bound, or the noise floor where there is none. */
    function boundary(place, shown, step) {
      const group = svg("g", { class: "bound" });
      if (hasBounds) {
        let line = "", area = "", pen = false;
        bounds.forEach((value, at) => {
          const from = (x(at) - step / 2).toFixed(1), to = (x(at) + step / 2).toFixed(1);
          if (value === null) { if (pen) area += `V${frame.bottom}Z`; pen = false; return; }
          const top = place(value).toFixed(1);
          line += `${pen ? "V" : `M${from} `}${top}H${to}`;
          area += `${pen ? "V" : `M${from} ${frame.bottom}V`}${top}H${to}`;
          pen = true;
        });
        group.append(svg("path", { class: "area", d: pen ? `${area}V${frame.bottom}Z` : area }), svg("path", { class: "edge", d: line }));
      } else if (positive(floor)) {
        const to = place(floor);
        group.append(svg("rect", { class: "area", x: frame.left, y: to, width: frame.right - frame.left, height: frame.bottom - to }));
        group.append(svg("line", { class: "edge dashed", x1: frame.left, x2: frame.right, y1: to, y2: to }));
      }
      return group;
    }

    function dots(shown, step) {
      const group = svg("g", { class: "dots" });
      rows.forEach((row, at) => {
        const isBroken = broken(row.local_error) || broken(row.propagated_error);
        if (isBroken) group.append(svg("path", { class: "broken", d: `M${x(at) - 4} ${frame.top - 12}l8 8m-8 0l8-8` }));
        else if (step >= 3 && positive(row.local_error)) group.append(svg("circle", { class: "local", cx: x(at), cy: shown(row.local_error), r: Math.min(2.4, step * 0.45) }));
      });
      return group;
    }

    function marks(shown) {
      const group = svg("g", { class: "marks" });
      const guilty = rows.map((row, at) => [row, at]).filter(([row]) => GUILTY.has(row.verdict));
      let named = false;
      for (const [row, at] of guilty.slice(0, 60)) {
        const to = shown(row.local_error ?? row.propagated_error) ?? frame.top;
        group.append(svg("line", { x1: x(at), x2: x(at), y1: frame.top - 4, y2: frame.bottom }), svg("circle", { cx: x(at), cy: to, r: 5 }));
        if (named) continue;
        named = true;
        const toLeft = x(at) > (frame.left + frame.right) / 2, most = Math.max(8, Math.floor((toLeft ? x(at) - frame.left : frame.right - x(at)) / 7.4));
        group.append(svg("text", { x: x(at) + (toLeft ? -8 : 8), y: frame.top - 14, "text-anchor": toLeft ? "end" : "start" }, name(row.name ?? "", Math.min(most, 46))));
      }
      return group;
    }

    function choose(at, told = true) {
      if (!x) return;
      chosen.at = Math.max(0, Math.min(rows.length - 1, at));
      const row = rows[chosen.at], to = x(chosen.at);
      clear(cursor).append(svg("line", { x1: to, x2: to, y1: frame.top, y2: frame.bottom }));
      for (const [kind, value] of [["local", row.local_error], ["propagated", row.propagated_error]]) {
        if (positive(value)) cursor.append(svg("circle", { class: kind, cx: to, cy: Math.max(frame.top, Math.min(frame.bottom, y(value))), r: 4 }));
      }
      node.setAttribute("aria-valuenow", chosen.at + 1);
      node.setAttribute("aria-valuetext", `${plain(row.name ?? "")}, ${row.verdict}, local error ${error(row.local_error)}, output error ${error(row.propagated_error)}`);
      if (told || !chosen.told) chosen.tell(row, bounds[chosen.at]);
      chosen.told = true;
    }

    const under = (event) => Math.floor((event.clientX - node.getBoundingClientRect().left - frame.left) / ((frame.right - frame.left) / rows.length));
    node.addEventListener("pointermove", (event) => { if (x) choose(under(event)); });
    node.addEventListener("pointerdown", (event) => { if (x) choose(under(event)); });
    node.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.round(rows.length / 12));
      const to = { ArrowRight: chosen.at + 1, ArrowLeft: chosen.at - 1, ArrowUp: chosen.at + 1, ArrowDown: chosen.at - 1, PageDown: chosen.at + page, PageUp: chosen.at - page, Home: 0, End: rows.length - 1 }[event.key];
      if (to === undefined && event.key === "Enter" && brickline.verdicts.find) brickline.verdicts.find(rows[chosen.at].name ?? "");
      else if (to === undefined) return;
      else choose(to);
      event.preventDefault();
    });
    onRedraw(() => { if (node.isConnected) draw(); });
    new ResizeObserver(() => { if (node.clientWidth !== width) draw(); }).observe(node);
    return { node, draw, hasBounds };
  }

  function legend(data, hasBounds, rows) {
    const sign = data.estimated ? "≈ " : "", some = (key) => rows.some((row) => row[key]);
    return el("p", { class: "legend" },
      some("local_error") ? el("span", null, el("i", { class: "k-local" }), `${sign}local: what the brick adds to its inputs' error`) : null,
      some("propagated_error") ? el("span", null, el("i", { class: "k-propagated" }), `${sign}output: its output against the other side's`) : null,
      hasBounds ? el("span", null, el("i", { class: "k-bound" }), "what rounding explains, z at most 1")
        : positive(number(data.noise_floor)) ? el("span", null, el("i", { class: "k-bound" }), `what rounding may grow to at the end, ${error(number(data.noise_floor))}`) : null,
      rows.some((row) => GUILTY.has(row.verdict)) ? el("span", null, el("i", { class: "k-mark" }), "named guilty") : null);
  }

  const label = (curve) => [curve.position === null ? "every call" : `call ${curve.position}`, curve.direction === "forward" ? "" : curve.direction].filter(Boolean).join(", ");

  function build(body, data) {
    const { curves, first, calls } = data.depth;
    const card = el("div", { class: "card" }), readout = el("div", { class: "readout" }), said = el("p", { class: "muted small" });
    function show(at) {
      const curve = curves[at], rows = brickline.verdicts.rowsOf(curve.rows, data.texts, data.verdicts.order);
      const worst = rows.findIndex((row) => GUILTY.has(row.verdict));
      const chosen = { at: worst >= 0 ? worst : loudest(rows), tell: (row, limit) => tell(readout, row, limit, data) };
      const made = chart(rows, data, chosen);
      clear(card).append(made.node, legend(data, made.hasBounds, rows), readout);
      made.draw();
      said.textContent = curve.of > rows.length
        ? `A sample: ${count(rows.length)} of ${count(curve.of)} bricks are drawn, of each group of neighbours the one with the largest local error.`
        : `Every one of the ${count(rows.length)} bricks of ${label(curve)} is drawn.`;
    }
    const pick = curves.length > 1 ? el("select", { "aria-label": "Which call", onchange: () => show(Number(pick.value)) },
      curves.map((curve, at) => el("option", { value: at, selected: at === first }, label(curve)))) : null;
    const rest = calls - curves.length;
    body.append(el("div", { class: "bar" }, pick, rest > 0 ? el("small", null, `${count(rest)} more ${rest === 1 ? "call is" : "calls are"} not drawn: those of the findings come first`) : null), card, said);
    show(first);
  }

  function loudest(rows) {
    let best = 0;
    rows.forEach((row, at) => { if ((row.z ?? row.local_error ?? 0) > (rows[best].z ?? rows[best].local_error ?? 0)) best = at; });
    return best;
  }

  function tell(readout, row, limit, data) {
    const facts = [["local", about(row.local_error, data.estimated)], ["output", about(row.propagated_error, data.estimated)],
      limit === null ? null : ["rounding explains", error(limit)], row.z === null ? null : ["z", ratio(row.z)],
      row.layer_idx === null ? null : ["layer", row.layer_idx], ["call", call(row)], row.op ? ["op", name(row.op, 30)] : null]
      .filter((each) => each && each[1] !== "" && !String(each[1]).endsWith("–"));
    clear(readout).append(el("p", { class: "who" }, el("span", { class: "mono", title: plain(row.name ?? "") }, name(row.name ?? "", 70)), " ", chip(row.verdict)),
      el("p", { class: "what" }, facts.map(([key, value]) => el("span", null, el("small", null, key), " ", String(value)))));
  }

  return { build };
})();
