"use strict";
// The last steps on a canvas: a lane per thread and stream, a row per depth, zoom and pan.
// Only what is in view is drawn, and spans narrower than a pixel share it.
(() => {
  const { el, time, count, shorten, plain, section, unpack, hover, colour, ticks, addKey } = brickline;
  const OVERVIEW = 34, RULER = 24, LABEL = 19, ROW = 20, GAP = 8, MOST = 520, BINS = 600, SHADES = 6;
  const FLAGS = [[1, "left out of order"], [2, "supplied by the caller"], [8, "tile"], [32, "waited for the host"]];

  /** Spans by lane and depth, with where each row lies. */
  function layout(view) {
    const columns = Object.fromEntries(Object.entries(view.columns).map(([name, column]) => [name, unpack(column)]));
    const size = columns.start.length;
    const rows = [], lanes = [];
    let end = 0;
    for (let at = 0; at < size; at++) end = Math.max(end, columns.start[at] + columns.duration[at]);
    const byLane = view.lanes.map(() => new Map());
    for (let at = 0; at < size; at++) {
      // A tile lies below the brick that it is a part of.
      const depth = columns.depth[at] + (columns.kind[at] === view.kinds.tile ? 1000 : 0);
      const found = byLane[columns.lane[at]];
      if (!found.has(depth)) found.set(depth, []);
      found.get(depth).push(at);
    }
    let y = 0;
    byLane.forEach((found, lane) => {
      const top = y;
      y += LABEL;
      for (const depth of [...found.keys()].sort((a, b) => a - b)) {
        rows.push({ lane, y, spans: found.get(depth) });
        y += ROW;
      }
      y += GAP;
      lanes.push({ ...view.lanes[lane], top, bottom: y - GAP });
    });
    const steps = [];
    for (let at = 0; at < size; at++) if (columns.kind[at] === view.kinds.step) steps.push(at);
    steps.sort((a, b) => columns.start[a] - columns.start[b]);
    return { columns, rows, lanes, end: end || 1, height: y, steps, size };
  }

  /** How busy all lanes are, by category, from the start to the end: the outermost bricks only. */
  function density(plan, view) {
    const { columns } = plan, sums = new Float64Array(BINS);
    const bins = brickline.categoryNames.map(() => new Float64Array(BINS));
    const isStep = (row) => columns.kind[row.spans[0]] === view.kinds.step;
    const bricks = plan.rows.filter((row) => !isStep(row));
    for (const row of bricks.filter((each, at) => !at || bricks[at - 1].lane !== each.lane)) {
      for (const at of row.spans) {
        const from = columns.start[at] / plan.end * BINS, to = (columns.start[at] + columns.duration[at]) / plan.end * BINS;
        const mine = bins[view.categories[columns.name[at]]] || bins[3];
        for (let bin = Math.floor(from); bin <= Math.min(BINS - 1, Math.floor(to)); bin++) {
          const part = Math.min(bin + 1, to) - Math.max(bin, from);
          mine[bin] += part;
          sums[bin] += part;
        }
      }
    }
    return { bins, most: Math.max(...sums) || 1 };
  }

  brickline.timelineView = (data) => {
    const view = data.timeline;
    if (!data.bricks.length) return;
    if (!view || !view.shown) {
      section({ id: "timeline", title: "Timeline", build(body) {
        body.append(el("p", { class: "muted" }, "This run keeps no timeline: statistics only, whose size does not grow with time. Keep one with BrickProfiler(timeline_steps=8), or trace launches."));
      } });
      return;
    }
    const left = view.total - view.shown;
    const clocks = view.lanes.some((lane) => lane.device) && view.lanes.some((lane) => !lane.device);
    section({ id: "timeline", title: "Timeline", badge: count(view.shown),
      lead: `The last ${count(view.shown)} entries and launches${left > 0 ? `; ${count(left)} older ones are not on this page` : ""}.` + (view.lanes_left_out > 0 ? ` ${count(view.lanes_left_out)} lanes with fewer entries are left out.` : "")
        + (clocks ? " Streams run on the device's clock, which compares with the host's only roughly." : ""),
      build: (body) => build(body, data, view) });
  };

  function build(body, data, view) {
    const plan = layout(view), { columns } = plan, busy = density(plan, view);
    const names = view.names.map((name) => shorten(name, 60));
    const height = OVERVIEW + RULER + Math.min(plan.height, MOST);
    const state = { from: 0, to: plan.end, top: 0, chosen: -1, hovered: -1 };
    const said = el("output", { class: "timeline-said", "aria-live": "polite" }, "Nothing chosen.");
    const drawn = brickline.canvas({ label: `Timeline of ${count(plan.size)} entries on ${view.lanes.length} lanes`, height, draw, focusable: true, describedBy: "timeline-keys" });
    const { canvas } = drawn;
    canvas.setAttribute("role", "application");
    const least = 50;
    let palette = {};

    function show(from, to) {
      let span = Math.min(Math.max(to - from, least), plan.end * 1.02);
      const middle = (from + to) / 2;
      const low = Math.max(-0.01 * plan.end, Math.min(middle - span / 2, 1.01 * plan.end - span));
      state.from = low;
      state.to = low + span;
      drawn.redraw();
    }
    const zoom = (factor, at = (state.from + state.to) / 2) => show(at - (at - state.from) * factor, at + (state.to - at) * factor);
    const pan = (part) => { const by = (state.to - state.from) * part; show(state.from + by, state.to + by); };
    const scrollBy = (by) => { state.top = Math.max(0, Math.min(plan.height - Math.min(plan.height, MOST), state.top + by)); drawn.redraw(); };
    const fit = () => show(-0.005 * plan.end, 1.005 * plan.end);
    function lastSteps(many) {
      if (!plan.steps.length) { fit(); return; }
      const first = plan.steps[Math.max(0, plan.steps.length - many)], last = plan.steps[plan.steps.length - 1];
      const from = columns.start[first], to = columns.start[last] + columns.duration[last], edge = (to - from) * 0.02;
      show(from - edge, to + edge);
    }

    const x = (ns, width) => (ns - state.from) / (state.to - state.from) * width;
    const back = (pixel) => state.from + pixel / drawn.size().width * (state.to - state.from);

    function draw(context, width, tall) {
      const used = ["ink", "soft", "line", "line-strong", "surface", "raised", "accent"];
      palette = Object.fromEntries(used.map((name) => [name, colour(name)]));
      // Names of one category differ by how much ink is mixed in, so that text stays readable.
      const shades = brickline.categoryNames.map((name) => Array.from({ length: SHADES }, (_, at) => brickline.mix(colour(brickline.categoryColour(name)), palette.ink, 0.28 * at / SHADES)));
      context.font = "11.5px " + colour("sans");
      context.textBaseline = "middle";
      context.save();
      context.beginPath();
      context.rect(0, OVERVIEW + RULER, width, tall - OVERVIEW - RULER);
      context.clip();
      context.translate(0, OVERVIEW + RULER - state.top);
      guides(context, width);
      for (const lane of plan.lanes) {
        context.fillStyle = palette.soft;
        context.fillText(shorten(lane.name, 60), 6, lane.top + LABEL / 2);
        context.fillStyle = palette.line;
        context.fillRect(0, lane.bottom + GAP / 2, width, 1);
      }
      for (const row of plan.rows) {
        if (row.y + ROW < state.top || row.y > state.top + tall) continue;
        spansOf(context, row, width, shades);
      }
      context.restore();
      ruler(context, width, tall);
      overview(context, width, shades);
    }

    function guides(context, width) {
      context.fillStyle = palette.line;
      let last = -10;
      for (const at of plan.steps) {
        const place = Math.round(x(columns.start[at], width));
        if (place < 0 || place > width || place - last < 6) continue;
        last = place;
        context.fillRect(place, 0, 1, plan.height);
      }
    }

    /** The first span of a row that ends after a time; spans of one row do not overlap. */
    function firstFrom(spans, ns) {
      let low = 0, high = spans.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (columns.start[spans[middle]] + columns.duration[spans[middle]] < ns) low = middle + 1; else high = middle;
      }
      return low;
    }

    function spansOf(context, row, width, shades) {
      let drawnTo = -1;
      for (let place = firstFrom(row.spans, state.from); place < row.spans.length; place++) {
        const at = row.spans[place];
        if (columns.start[at] > state.to) break;
        const exactLeft = x(columns.start[at], width), exactRight = x(columns.start[at] + columns.duration[at], width);
        if (exactRight < drawnTo) continue;
        const from = Math.max(-2, exactLeft), wide = Math.max(1, Math.min(width + 2, exactRight) - from - (exactRight - exactLeft > 4 ? 1 : 0));
        drawnTo = from + wide;
        const name = columns.name[at], step = columns.kind[at] === view.kinds.step;
        context.fillStyle = step ? palette["line-strong"] : shades[view.categories[name]]?.[name * 37 % SHADES] || shades[3][0];
        if (wide > 6) { context.beginPath(); context.roundRect(from, row.y + 1, wide, ROW - 3, 2.5); context.fill(); } else context.fillRect(from, row.y + 1, wide, ROW - 3);
        if (at === state.chosen || at === state.hovered) {
          context.strokeStyle = palette.ink;
          context.lineWidth = at === state.chosen ? 2 : 1;
          context.strokeRect(from + 0.5, row.y + 1, Math.max(2, wide - 1), ROW - 3);
        }
        if (wide > 26) label(context, step ? `${view.phases[columns.phase[at]] || "step"} ${columns.step[at]}` : names[name], from, row.y, wide, step);
      }
    }

    function label(context, text, from, y, wide, step) {
      const left = Math.max(0, from), room = from + wide - left - 8;
      const most = Math.floor(room / 6.1);
      if (most < 3) return;
      context.fillStyle = step ? palette.ink : palette.surface;
      context.fillText(text.length > most ? `${text.slice(0, most - 1)}…` : text, left + 4, y + ROW / 2 - 0.5);
    }

    function ruler(context, width, tall) {
      context.fillStyle = palette.soft;
      context.textAlign = "center";
      const marks = ticks(state.from, state.to, Math.max(2, width / 110)), say = labels(marks);
      for (const at of marks) {
        const place = x(at, width);
        context.fillRect(Math.round(place), OVERVIEW + RULER - 5, 1, 5);
        if (place > 28 && place < width - 28) context.fillText(say(at), place, OVERVIEW + RULER / 2 - 2);
      }
      context.textAlign = "left";
      context.fillStyle = palette.line;
      context.fillRect(0, OVERVIEW + RULER - 1, width, 1);
      if (plan.height > MOST) {
        const part = MOST / plan.height, room = tall - OVERVIEW - RULER;
        context.fillStyle = palette["line-strong"];
        context.fillRect(width - 4, OVERVIEW + RULER + state.top / plan.height * room, 3, part * room);
      }
    }

    /** Words for ticks: all digits that tell them apart, or what comes after the first one. */
    function labels(marks) {
      const step = marks[1] - marks[0], last = Math.abs(marks[marks.length - 1]);
      const [unit, word] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([size]) => last >= size) || [1, "ns"];
      const places = Math.max(0, Math.ceil(Math.log10(unit / step) - 1e-9));
      const plainly = (at) => at === 0 ? "0" : `${(at / unit).toFixed(Math.min(places, 9))} ${word}`;
      const first = marks.find((at) => x(at, drawn.size().width) > 28);
      return (at) => !(places > 3) || at === first ? plainly(at) : at < first ? "" : `+${time(Math.round(at - first))}`;
    }

    function overview(context, width, shades) {
      context.fillStyle = palette.raised;
      context.fillRect(0, 0, width, OVERVIEW - 4);
      context.globalAlpha = 0.55;
      const tops = new Float64Array(BINS).fill(OVERVIEW - 4);
      busy.bins.forEach((mine, category) => {
        context.fillStyle = shades[category][0];
        for (let bin = 0; bin < BINS; bin++) {
          const high = mine[bin] / busy.most * (OVERVIEW - 8);
          if (!high) continue;
          tops[bin] -= high;
          context.fillRect(bin / BINS * width, tops[bin], width / BINS + 0.5, high);
        }
      });
      context.globalAlpha = 1;
      const from = Math.max(0, state.from / plan.end * width), to = Math.min(width, state.to / plan.end * width);
      context.fillStyle = palette.accent;
      context.globalAlpha = 0.16;
      context.fillRect(from, 0, Math.max(3, to - from), OVERVIEW - 4);
      context.globalAlpha = 1;
      context.fillRect(from, 0, 2, OVERVIEW - 4);
      context.fillRect(Math.max(from + 2, to - 2), 0, 2, OVERVIEW - 4);
    }

    function find(pixel, y) {
      const down = y - OVERVIEW - RULER + state.top;
      const row = y < OVERVIEW + RULER ? null : plan.rows.find((each) => down >= each.y && down < each.y + ROW);
      if (!row) return -1;
      const slip = (state.to - state.from) / drawn.size().width * 2, ns = back(pixel);
      const at = row.spans[firstFrom(row.spans, ns - slip)];
      return at !== undefined && columns.start[at] <= ns + slip ? at : -1;
    }

    function facts(at) {
      const lines = [names[columns.name[at]] || view.phases[columns.phase[at]] || "step", `${time(columns.duration[at])} from ${time(columns.start[at])}`];
      const place = [columns.layer[at] >= 0 ? `layer ${columns.layer[at]}` : "", `step ${columns.step[at]}`, view.phases[columns.phase[at]] ? plain(view.phases[columns.phase[at]]) : ""].filter(Boolean);
      lines.push(place.join(" · "), view.lanes[columns.lane[at]].name);
      const flags = FLAGS.filter(([bit]) => columns.flags[at] & bit).map(([, words]) => words);
      if (flags.length) lines.push(flags.join(", "));
      return lines.map((line) => shorten(line, 80));
    }

    function choose(at) {
      state.chosen = at;
      said.textContent = at < 0 ? "Nothing chosen." : facts(at).join(" — ");
      drawn.redraw();
    }

    /** Choose the neighbour in the same row, or the first span in view. */
    function step(by) {
      if (state.chosen < 0) {
        const row = plan.rows.find((each) => each.spans.length > 0 && columns.kind[each.spans[0]] !== view.kinds.step) || plan.rows[0];
        choose(row.spans[Math.min(row.spans.length - 1, firstFrom(row.spans, state.from))]);
        return;
      }
      const row = plan.rows.find((each) => each.spans.includes(state.chosen));
      const to = row.spans[row.spans.indexOf(state.chosen) + by];
      if (to === undefined) return;
      choose(to);
      const start = columns.start[to], end = start + columns.duration[to];
      if (start < state.from || end > state.to) { const span = state.to - state.from; show((start + end - span) / 2, (start + end + span) / 2); }
    }

    function toChosen() {
      if (state.chosen < 0) return;
      const start = columns.start[state.chosen], span = Math.max(columns.duration[state.chosen], least);
      show(start - span * 0.4, start + span * 1.4);
    }

    const KEYS = { ArrowLeft: () => pan(-0.15), a: () => pan(-0.15), ArrowRight: () => pan(0.15), d: () => pan(0.15), ArrowUp: () => scrollBy(-60), ArrowDown: () => scrollBy(60),
      "+": () => zoom(0.7), "=": () => zoom(0.7), w: () => zoom(0.7), "-": () => zoom(1.4), s: () => zoom(1.4), 0: fit, Home: fit, End: () => lastSteps(1), "[": () => step(-1), "]": () => step(1), Enter: toChosen, Escape: () => choose(-1) };
    canvas.addEventListener("keydown", (event) => {
      const does = KEYS[event.key];
      if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      does();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && document.activeElement !== canvas) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 900);
      else zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY / 400))), back(event.offsetX));
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(event.pointerId);
      held = { x: event.offsetX, y: event.offsetY, from: state.from, to: state.to, top: state.top, moved: false, far: event.offsetY < OVERVIEW };
      if (held.far) moveOverview(event);
    });
    function moveOverview(event) {
      const at = event.offsetX / drawn.size().width * plan.end, half = (state.to - state.from) / 2;
      show(at - half, at + half);
    }
    canvas.addEventListener("pointermove", (event) => {
      if (held && held.far) { moveOverview(event); return; }
      if (held) {
        const dx = event.offsetX - held.x, dy = event.offsetY - held.y;
        if (Math.abs(dx) + Math.abs(dy) > 3) held.moved = true;
        if (!held.moved) return;
        hover();
        const by = -dx / drawn.size().width * (held.to - held.from);
        show(held.from + by, held.to + by);
        if (plan.height > MOST) { state.top = held.top; scrollBy(-dy); }
        return;
      }
      const at = find(event.offsetX, event.offsetY);
      if (at !== state.hovered) { state.hovered = at; drawn.redraw(); }
      hover(event.clientX, event.clientY, at < 0 ? null : facts(at));
    });
    canvas.addEventListener("pointerup", (event) => {
      if (held && !held.moved && !held.far) choose(find(event.offsetX, event.offsetY));
      held = null;
    });
    canvas.addEventListener("pointerleave", () => { state.hovered = -1; hover(); drawn.redraw(); });
    canvas.addEventListener("dblclick", (event) => zoom(0.35, back(event.offsetX)));

    const button = (words, does, label) => el("button", { type: "button", onclick: does, "aria-label": label || null }, words);
    body.append(el("div", { class: "bar timeline-bar" }, button("−", () => zoom(1.6), "Zoom out"), button("+", () => zoom(0.6), "Zoom in"), button("◂", () => pan(-0.3), "Earlier"), button("▸", () => pan(0.3), "Later"),
      button("All", fit), button("Last step", () => lastSteps(1)),
      el("span", { class: "muted", id: "timeline-keys" }, "Drag to pan, Ctrl+wheel to zoom; keys ← → + − 0, [ ] to walk, Enter to zoom in.")),
    el("div", { class: "card timeline-card" }, drawn.node, el("p", { class: "muted" }, said)),
    el("p", { class: "legend" }, brickline.categoryNames.filter((_, at) => view.categories.includes(at)).map((name) => el("span", null, el("i", { style: { background: `var(--${brickline.categoryColour(name)})` } }), name)), el("span", null, el("i", { style: { background: "var(--line-strong)" } }), "step")));
    addKey("← → + − 0", "in the timeline: pan, zoom, all");
    addKey("[ ]", "in the timeline: previous and next entry");
    if (plan.steps.length > 3) lastSteps(2); else fit();
    brickline.timelineState = () => ({ ...state, end: plan.end, size: plan.size, facts: state.chosen < 0 ? null : facts(state.chosen) });
  }
})();
