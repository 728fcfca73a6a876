"use strict";
// The roofline: what each brick reaches against what the machine allows at its intensity.
(() => {
  const { el, svg, percent, figure, shorten, plain, section, scale, decades, hover, table, count } = brickline;

  function why(data) {
    const { roofline } = data;
    if (!roofline.peaks) return "The peaks of the machine were not measured when this run was recorded, so there is no roof to draw. Measure them once with “brickline doctor --peaks”; every run after that carries them.";
    if (!roofline.declared) return "No brick declares both FLOPs and bytes, so there is no point to draw. Give flops= and bytes= to profiler.brick.";
    return null;
  }
  const below = (point) => 1 - point.gflops / point.attainable_gflops;

  function chart(data, points) {
    const { peaks } = data.roofline;
    const wide = 860, high = 400, edge = { left: 62, right: 18, top: 18, bottom: 46 };
    const ridge = peaks.gflops / peaks.gbps;
    const low = Math.min(ridge / 8, ...points.map((each) => each.intensity / 1.8)), far = Math.max(ridge * 8, ...points.map((each) => each.intensity * 1.8));
    const bottom = Math.min(peaks.gflops / 300, ...points.map((each) => each.gflops / 2)), top = Math.max(peaks.gflops * 2, ...points.map((each) => each.gflops * 1.5));
    const x = scale(low, far, edge.left, wide - edge.right, true), y = scale(bottom, top, high - edge.bottom, edge.top, true);
    const roof = `M${x(low)} ${y(Math.max(bottom, low * peaks.gbps))}L${x(ridge)} ${y(peaks.gflops)}L${x(far)} ${y(peaks.gflops)}`;
    const most = Math.max(...points.map((each) => data.bricks[each.brick].share)) || 1;
    const root = svg("svg", { class: "roofline", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `Roofline: ${points.length} bricks below ${figure(peaks.gflops)} GFLOP/s and ${figure(peaks.gbps)} GB/s` });
    for (const at of decades(low, far)) root.append(svg("line", { class: "grid", x1: x(at), x2: x(at), y1: edge.top, y2: high - edge.bottom }), svg("text", { x: x(at), y: high - edge.bottom + 18, "text-anchor": "middle" }, power(at)));
    for (const at of decades(bottom, top)) root.append(svg("line", { class: "grid", x1: edge.left, x2: wide - edge.right, y1: y(at), y2: y(at) }), svg("text", { x: edge.left - 8, y: y(at) + 4, "text-anchor": "end" }, power(at)));
    root.append(svg("text", { class: "axis", x: (wide + edge.left) / 2, y: high - 8, "text-anchor": "middle" }, "FLOP per byte"),
      svg("text", { class: "axis", transform: `translate(14 ${high / 2 - 10}) rotate(-90)`, "text-anchor": "middle" }, "GFLOP/s"),
      svg("path", { class: "under", d: `${roof}L${x(far)} ${high - edge.bottom}L${x(low)} ${high - edge.bottom}z` }), svg("path", { class: "roof", d: roof }),
      svg("text", { class: "peak", x: wide - edge.right - 4, y: y(peaks.gflops) - 8, "text-anchor": "end" }, `${figure(peaks.gflops)} GFLOP/s`));
    const along = Math.sqrt(low * ridge), tilt = Math.atan2(y(along * 2 * peaks.gbps) - y(along * peaks.gbps), x(along * 2) - x(along)) * 180 / Math.PI;
    if (along * peaks.gbps > bottom) root.append(svg("text", { class: "peak", transform: `translate(${x(along)} ${y(along * peaks.gbps) - 9}) rotate(${tilt.toFixed(1)})`, "text-anchor": "middle" }, `${figure(peaks.gbps)} GB/s`));
    const ordered = [...points].sort((a, b) => data.bricks[b.brick].share - data.bricks[a.brick].share);
    const circle = (point) => ({ px: x(point.intensity), py: y(point.gflops), r: 4 + 9 * Math.sqrt(data.bricks[point.brick].share / most) });
    for (const point of ordered) {
      const row = data.bricks[point.brick], { px, py, r } = circle(point);
      const colour = `var(--${brickline.categoryColour(row.category)})`;
      const lines = [shorten(row.name, 60), `${figure(point.gflops)} of ${figure(point.attainable_gflops)} GFLOP/s`, distance(point), `${figure(point.intensity)} FLOP per byte · ${percent(row.share)} of the time`];
      const node = svg("g", { class: "point", tabindex: "0", role: "img", "aria-label": lines.join(", ") },
        svg("line", { class: "gap", x1: px, x2: px, y1: py - r, y2: Math.min(py - r, y(point.attainable_gflops)) }),
        svg("circle", { cx: px, cy: py, r, fill: colour, "fill-opacity": "0.8" }));
      const show = () => { const box = node.querySelector("circle").getBoundingClientRect(); hover(box.right, box.top, lines); };
      node.addEventListener("pointerenter", show);
      node.addEventListener("focus", show);
      node.addEventListener("pointerleave", () => hover());
      node.addEventListener("blur", () => hover());
      root.append(node);
    }
    nameThem(root, ordered.map((point) => ({ ...circle(point), text: shorten(data.bricks[point.brick].name, 20) })), edge.left, wide - edge.right);
    return el("div", { class: "card roofline-card", tabindex: "0", role: "region", "aria-label": "Roofline, scrolls" }, root);
  }

  /** Write the names of points where they cover neither a point nor another name. */
  function nameThem(root, circles, left, right) {
    const taken = circles.map(({ px, py, r }) => ({ x: px - r, y: py - r, w: 2 * r, h: 2 * r }));
    const free = (box) => box.x > left && box.x + box.w < right && !taken.some((each) => box.x < each.x + each.w && each.x < box.x + box.w && box.y < each.y + each.h && each.y < box.y + box.h);
    for (const { px, py, r, text } of circles) {
      const w = text.length * 6.8, places = [[px + r + 4, py - 8], [px - r - 4 - w, py - 8], [px + r, py - r - 14], [px + r, py + r], [px - r - w, py - r - 14], [px - r - w, py + r]];
      const box = places.map(([at, up]) => ({ x: at, y: up, w, h: 16 })).find(free);
      if (!box) continue;
      taken.push(box);
      root.append(svg("text", { class: "name", x: box.x, y: box.y + 12 }, text));
    }
  }
  const power = (at) => at >= 1e-3 && at < 1e4 ? figure(at) : `1e${Math.round(Math.log10(at))}`;

  function distance(point) {
    const part = below(point);
    return part >= 0 ? `${percent(part)} below its roof` : `${figure(point.gflops / point.attainable_gflops)} × its roof`;
  }

  brickline.rooflineView = (data) => {
    if (!data.bricks.length) return;
    const { roofline } = data, { points } = roofline;
    const reason = why(data);
    section({ id: "roofline", title: "Roofline", badge: points.length ? count(points.length) : null,
      lead: reason ? null : "What each brick reaches against what the machine allows at its FLOPs per byte; the larger the point, the more of the time. Peaks are measured, FLOPs and bytes are declared by the bricks.", build(body) {
        if (reason) { body.append(el("p", { class: "muted" }, reason)); return; }
        body.append(chart(data, points));
        const above = points.filter((each) => below(each) < 0).length;
        if (above) body.append(el("p", { class: "muted" }, `${count(above)} ${above === 1 ? "brick lies" : "bricks lie"} above the roof: its memory slope is that of main memory, and data in a cache comes faster; or the declared work is too high.`));
        if (roofline.left_out.length) body.append(el("p", { class: "muted" }, `Not drawn: ${roofline.left_out.map(([words, many]) => `${count(many)} ${many === 1 ? "brick that" : "bricks that"} ${many === 1 ? words.replace("declare", "declares") : words}`).join("; ")}.`));
        body.append(table({ label: "Distance from the roof", noun: "bricks", rows: points, sort: { at: 4 }, text: (point) => data.bricks[point.brick].name, columns: [
          { title: "Brick", left: true, value: (point) => data.bricks[point.brick].name.toLowerCase(), show: (point) => el("span", { title: plain(data.bricks[point.brick].name) }, shorten(data.bricks[point.brick].name, 40)) },
          { title: "FLOP/byte", narrow: false, value: (point) => point.intensity, show: (point) => figure(point.intensity) },
          { title: "GFLOP/s", value: (point) => point.gflops, show: (point) => figure(point.gflops) },
          { title: "Roof", narrow: false, value: (point) => point.attainable_gflops, show: (point) => figure(point.attainable_gflops) },
          { title: "Below the roof", value: below, show: (point) => below(point) >= 0 ? percent(below(point)) : `above, ${figure(point.gflops / point.attainable_gflops)} ×` },
          { title: "Roof of", left: true, narrow: false, value: (point) => point.bound },
          { title: "Share", value: (point) => data.bricks[point.brick].share, show: (point) => percent(data.bricks[point.brick].share) },
        ] }).node);
      } });
  };
})();
