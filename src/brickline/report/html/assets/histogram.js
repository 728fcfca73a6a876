"use strict";
// Durations in the run's own buckets: small in a table, large with an axis and percentiles.
// Bucket i holds (2^(i/16), 2^((i+1)/16)] ns.
(() => {
  const { el, svg, time, count, hover, percent, scale } = brickline;
  const BUCKETS = 16;
  const MARKS = [["p50", "p50_us"], ["p90", "p90_us"], ["p99", "p99_us"], ["p99.9", "p999_us"]];
  const lower = (index) => 2 ** (index / BUCKETS);

  /** [[index, count], …] of a row's histogram; each is as wide as 2^doubled buckets of the run. */
  function buckets(histogram) {
    let index = histogram.first;
    return histogram.counts.map((many, at) => {
      if (at) index += histogram.steps[at - 1];
      return [index, many];
    });
  }

  /** Sum neighbours until no more than `most` bars are left: [[first, last, count], …] in buckets of the run. */
  function bars(histogram, most) {
    const found = buckets(histogram), wide = 2 ** histogram.doubled;
    if (!found.length) return [];
    const low = found[0][0], high = found[found.length - 1][0];
    const size = Math.max(1, Math.ceil((high - low + 1) / most));
    const sums = new Map();
    for (const [index, many] of found) {
      const bar = Math.floor((index - low) / size);
      sums.set(bar, (sums.get(bar) || 0) + many);
    }
    return [...sums].map(([bar, many]) => [(low + bar * size) * wide, (low + (bar + 1) * size) * wide, many]);
  }

  /** A histogram as wide as a cell, with the median and the 99th percentile marked. */
  brickline.smallHistogram = (row, colour) => {
    const wide = 132, high = 24, found = bars(row.histogram, 44);
    if (!found.length) return el("span", { class: "muted" }, row.timed ? "all 0 ns" : "not timed");
    const first = found[0][0], last = Math.max(found[found.length - 1][1], first + 8);
    const x = (index) => 1 + (wide - 2) * (index - first) / (last - first);
    const most = Math.max(...found.map((bar) => bar[2]));
    const d = found.map(([from, to, many]) => {
      const tall = Math.max(1, (high - 3) * Math.sqrt(many / most));
      return `M${x(from).toFixed(1)} ${high}h${Math.max(0.9, x(to) - x(from) - 0.4).toFixed(1)}v${(-tall).toFixed(1)}h${(-Math.max(0.9, x(to) - x(from) - 0.4)).toFixed(1)}z`;
    }).join("");
    const at = (us) => x(BUCKETS * Math.log2(Math.max(us * 1e3, 1)));
    return svg("svg", { class: "spark", viewBox: `0 0 ${wide} ${high}`, role: "img",
      "aria-label": `p50 ${time(row.p50_us * 1e3)}, p90 ${time(row.p90_us * 1e3)}, p99 ${time(row.p99_us * 1e3)}` },
    svg("path", { d, fill: colour }),
    svg("line", { class: "median", x1: at(row.p50_us), x2: at(row.p50_us), y1: 0, y2: high }),
    svg("line", { class: "tail", x1: at(row.p99_us), x2: at(row.p99_us), y1: 0, y2: high }));
  };

  /** The same large, on a logarithmic axis of time. */
  brickline.largeHistogram = (row, label, shade = "c7") => {
    const found = bars(row.histogram, 160);
    const zero = row.histogram.zero;
    if (!found.length) return el("p", { class: "muted" }, zero ? `All ${count(zero)} timed entries took 0 ns.` : "No entry was timed.");
    const total = row.histogram.counts.reduce((sum, many) => sum + many, zero);
    const most = Math.max(...found.map((bar) => bar[2]));
    const ends = [lower(found[0][0]), lower(found[found.length - 1][1])];
    const drawn = brickline.canvas({ label: `Histogram of ${label}: ${count(total)} durations from ${time(row.min_us * 1e3)} to ${time(row.max_us * 1e3)}`, height: 170, draw });
    let x = null;
    function draw(context, width, height) {
      const low = Math.min(ends[0], row.min_us * 1e3 || ends[0]) / 1.04, high = Math.max(ends[1], row.max_us * 1e3) * 1.04;
      const top = 30, bottom = height - 22;
      x = scale(low, high, 6, width - 6, true);
      context.font = "11.5px " + brickline.colour("sans");
      context.fillStyle = brickline.colour(shade);
      for (const [from, to, many] of found) {
        const left = x(lower(from)), right = x(lower(to)), tall = Math.max(1, (bottom - top) * many / most);
        context.fillRect(left, bottom - tall, Math.max(1, right - left - (right - left > 3 ? 1 : 0)), tall);
      }
      context.fillStyle = brickline.colour("line-strong");
      context.fillRect(6, bottom, width - 12, 1);
      context.fillStyle = brickline.colour("soft");
      context.textAlign = "center";
      let free = -Infinity;
      for (const at of timeTicks(low, high, Math.max(3, width / 90))) {
        if (x(at) < 18 || x(at) > width - 18 || x(at) - free < 52) continue;
        free = x(at);
        context.fillText(time(at), x(at), height - 6);
      }
      free = -Infinity;
      for (const [name, key] of MARKS) {
        const at = x(Math.max(row[key] * 1e3, low));
        context.fillStyle = brickline.colour("ink");
        context.fillRect(at, top - 8, 1, bottom - top + 8);
        const wide = context.measureText(name).width / 2 + 3;
        if (at - wide < free) continue;
        free = at + wide;
        context.fillStyle = brickline.colour("ink");
        context.fillText(name, Math.max(14, Math.min(width - 16, at)), 14);
      }
    }
    drawn.canvas.addEventListener("pointermove", (event) => {
      if (!x) return;
      const index = Math.log2(x.back(event.offsetX)) * BUCKETS;
      const bar = found.find(([from, to]) => index >= from && index < to);
      hover(event.clientX, event.clientY, bar ? [`${count(bar[2])} of ${count(total)}`, `${time(lower(bar[0]))} to ${time(lower(bar[1]))}`, percent(bar[2] / total)] : null);
    });
    drawn.canvas.addEventListener("pointerleave", () => hover());
    return el("figure", null, drawn.node, zero ? el("figcaption", { class: "muted" }, `${count(zero)} more took 0 ns.`) : null);
  };

  /** Round times on a logarithmic axis. */
  function timeTicks(low, high, many) {
    for (const steps of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const step of steps) { const at = step * 10 ** power; if (at >= low && at <= high) found.push(at); }
      if (found.length <= many || steps.length === 1) return found.length > 1 ? found : brickline.ticks(low, high, Math.min(many, 5));
    }
    return [];
  }
})();
