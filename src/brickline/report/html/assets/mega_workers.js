"use strict";
// What each worker did: bars of work against waiting, and every span on a timeline.
(() => {
  const { el, svg, time, count, percent, shorten, section, unpack, hover, colour, ticks, canvas, known } = brickline;
  const KINDS = [["work", "work_ns", "Work"], ["tasks", "dependency_wait_ns", "Waiting for tasks"], ["data", "data_wait_ns", "Waiting for data"], ["other", "other_ns", "Other"]];
  const COLOURS = 10;

  const legend = (of) => el("p", { class: "legend" }, KINDS.filter(([, name]) => of(name)).map(([kind, , words]) => el("span", null, el("i", { class: `swatch ${kind}` }), words)));

  function bars(data) {
    const { workers } = data, many = workers.items.length;
    const span = (at) => KINDS.reduce((sum, [, name]) => sum + (workers[name][at] || 0), 0);
    const longest = Math.max(...Array.from({ length: many }, (_, at) => span(at)), 1);
    const row = many > 64 ? 9 : many > 24 ? 15 : 24, left = 46, right = 96, wide = 1000, high = many * row + 4;
    const scale = (ns) => (wide - left - right) * ns / longest;
    const root = svg("svg", { class: "worker-bars", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `Work against waiting of ${count(many)} workers` });
    const every = Math.max(1, Math.ceil(14 / row));
    for (let at = 0; at < many; at++) {
      const y = at * row + 2;
      let x = left;
      const group = svg("g", { "data-worker": at });
      if (at % every === 0) group.append(svg("text", { x: left - 8, y: y + row / 2 + 4, "text-anchor": "end" }, at));
      for (const [kind, name] of KINDS) {
        const ns = workers[name][at];
        if (!ns) continue;
        group.append(svg("rect", { class: kind, x, y: y + 1, width: Math.max(scale(ns), 0.4), height: Math.max(row - 3, 3), rx: Math.min(3, row / 5) }));
        x += scale(ns);
      }
      if (row > 12) group.append(svg("text", { x: x + 8, y: y + row / 2 + 4 }, `${count(workers.items[at])} items`));
      group.addEventListener("pointermove", (event) => hover(event.clientX, event.clientY, lines(data, at)));
      group.addEventListener("pointerleave", () => hover());
      root.append(group);
    }
    return root;
  }

  function lines(data, at) {
    const { workers } = data, skipped = workers.skipped[at];
    return [`Worker ${at}, ${workers.state[at]}`, `${count(workers.items[at])} items${skipped ? `, ${count(skipped)} skipped` : ""}`,
      ...KINDS.filter(([, name]) => known(workers[name][at])).map(([, name, words]) => `${words}: ${time(workers[name][at])}`)];
  }

  const shown = (data) => (name) => data.workers[name].some((each) => each);
  brickline.workerBars = (data) => {
    if (!data.workers.items.length) return;
    section({ id: "workers", title: "Workers", badge: count(data.workers_of), lead: "Work against waiting, from each worker's beginning to its end.", build(body) {
      if (!data.workers.work_ns.some(known)) { body.append(el("p", { class: "muted" }, "The workers' times were not measured.")); return; }
      if (data.workers_of > data.workers.items.length) body.append(el("p", { class: "muted" }, `The first ${count(data.workers.items.length)} of ${count(data.workers_of)} are shown.`));
      body.append(el("div", { class: "card" }, el("div", { class: "tall-bars", tabindex: "0", role: "region", "aria-label": "Workers, scrolls" }, bars(data)), legend(shown(data))));
    } });
  };

  // --- timeline -----------------------------------------------------------------------------
  /** Every span: what it waited, lighter, and what it worked, in the colour of its op. */
  brickline.spanTimeline = (data, pick) => {
    if (!data.spans) return;
    const columns = Object.fromEntries(Object.entries(data.spans).map(([name, column]) => [name, unpack(column)]));
    const size = columns.task.length, ops = unpack(data.tasks.op);
    if (!size) return;
    section({ id: "timeline", title: "Timeline", badge: count(data.spans_of), lead: "A row for each worker: solid where it worked, faint where it waited for another task.", build(body) {
      const many = data.workers.items.length, row = many > 40 ? 10 : 20, ruler = 22, left = 40;
      let end = 1;
      for (let at = 0; at < size; at++) end = Math.max(end, columns.begin_ns[at] + columns.length[at]);
      const view = { from: 0, to: end };
      const height = ruler + many * row + 4;
      const x = (ns, width) => left + (width - left - 4) * (ns - view.from) / (view.to - view.from);
      const back = (pixel, width) => view.from + (view.to - view.from) * (pixel - left) / (width - left - 4);
      let dragged = null;
      const drawing = canvas({ label: `Timeline of ${count(size)} parts of tasks on ${count(many)} workers, ${time(end)} long`, height, focusable: true, draw(context, width) {
        context.font = "11px system-ui, sans-serif";
        context.fillStyle = colour("soft");
        for (const tick of ticks(view.from, view.to, width / 130)) {
          const at = x(tick, width);
          context.fillText(time(tick), at + 3, 13);
          context.fillRect(at, ruler - 5, 1, 4);
        }
        for (let at = 0; at < many; at++) if (row > 12 || at % 4 === 0) context.fillText(at, 6, ruler + at * row + row * 0.7);
        const shades = Array.from({ length: COLOURS }, (_, at) => colour(`c${at}`)), waiting = colour("line-strong");
        for (let at = 0; at < size; at++) {
          const begin = columns.begin_ns[at], ready = begin + columns.wait[at], finish = begin + columns.length[at];
          if (finish < view.from || begin > view.to) continue;
          const y = ruler + columns.worker[at] * row + 1;
          const from = Math.max(x(begin, width), left), middle = Math.max(x(ready, width), left), to = x(finish, width);
          if (middle > from) { context.fillStyle = waiting; context.globalAlpha = 0.4; context.fillRect(from, y + row * 0.3, middle - from, row * 0.35); context.globalAlpha = 1; }
          context.fillStyle = shades[ops[columns.task[at]] % COLOURS];
          context.fillRect(middle, y, Math.max(to - middle, 0.8), row - 3);
        }
        if (dragged) { context.fillStyle = colour("accent"); context.globalAlpha = 0.18; context.fillRect(Math.min(...dragged), ruler, Math.abs(dragged[1] - dragged[0]), height); context.globalAlpha = 1; }
      } });
      const said = el("output", { class: "said", "aria-live": "polite" });
      const zoom = (from, to) => {
        if (!(to - from > 1)) return;
        view.from = Math.max(0, from);
        view.to = Math.min(end, to);
        said.textContent = `${time(view.from)} to ${time(view.to)}`;
        drawing.redraw();
      };
      const place = (event) => { const box = drawing.canvas.getBoundingClientRect(); return { at: event.clientX - box.left, y: event.clientY - box.top, width: box.width }; };
      /** The span at a place; those that are narrower than a pixel can be hit beside it. */
      const found = ({ at, y, width }) => {
        const worker = Math.floor((y - ruler) / row), ns = back(at, width), slack = (view.to - view.from) / width * 2;
        let best = -1;
        for (let each = 0; each < size; each++) {
          if (columns.worker[each] !== worker || columns.begin_ns[each] - slack > ns || columns.begin_ns[each] + columns.length[each] + slack < ns) continue;
          if (best < 0 || columns.length[each] < columns.length[best]) best = each;
        }
        return best;
      };
      drawing.canvas.addEventListener("pointerdown", (event) => { const { at } = place(event); dragged = [at, at]; drawing.canvas.setPointerCapture(event.pointerId); });
      drawing.canvas.addEventListener("pointermove", (event) => {
        const here = place(event);
        if (dragged) { dragged[1] = here.at; drawing.redraw(); hover(); return; }
        const at = found(here);
        hover(event.clientX, event.clientY, at < 0 ? undefined : [brickline.taskName(data, columns.task[at]), `worker ${columns.worker[at]}, ${count(columns.items[at])} items`, `${time(columns.length[at] - columns.wait[at])} of work after ${time(columns.wait[at])} of waiting`]);
      });
      drawing.canvas.addEventListener("pointerup", (event) => {
        const here = place(event), [from, to] = dragged || [here.at, here.at];
        dragged = null;
        if (Math.abs(to - from) > 6) zoom(back(Math.min(from, to), here.width), back(Math.max(from, to), here.width));
        else { const at = found(here); drawing.redraw(); if (at >= 0) pick(columns.task[at]); }
      });
      drawing.canvas.addEventListener("pointerleave", () => hover());
      drawing.canvas.addEventListener("keydown", (event) => {
        const span = view.to - view.from, by = span / 4;
        const does = { "+": () => zoom(view.from + by, view.to - by), "-": () => zoom(view.from - by, view.to + by), "0": () => zoom(0, end), ArrowLeft: () => zoom(Math.max(0, view.from - by), Math.max(span, view.to - by)), ArrowRight: () => zoom(Math.min(end - span, view.from + by), Math.min(end, view.to + by)) }[event.key];
        if (does) { does(); event.preventDefault(); }
      });
      const used = [...new Set(ops)].slice(0, 24);
      body.append(el("div", { class: "bar" }, el("button", { type: "button", onclick: () => zoom(0, end) }, "Whole run"), el("span", { class: "hint" }, "Drag to zoom, click a span to follow its lineage."), said),
        el("div", { class: "card" }, el("div", { class: "spans" }, drawing.node),
          el("p", { class: "legend" }, used.map((op) => el("span", null, el("i", { class: "swatch", style: { background: `var(--c${op % COLOURS})` } }), shorten(data.ops[op] ?? `op ${op}`, 40))))));
      if (size < data.spans_of) body.append(el("p", { class: "muted" }, `The ${count(size)} longest of ${count(data.spans_of)} spans are drawn.`));
    } });
  };
  brickline.addKey("+ − 0 ← →", "zoom and move the timeline");
  brickline.workerWords = (data) => data.shares.map(([word, share]) => `${word} ${percent(share)}`).join(" · ");
})();
