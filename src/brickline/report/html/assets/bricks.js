"use strict";
// The brick table, with what is known of one brick below its row; and the steps by phase.
(() => {
  const { el, time, count, percent, rate, figure, plain, shorten, section, table, smallHistogram, largeHistogram } = brickline;
  const CATEGORY = { Norm: "c2", Attention: "c0", FFN: "c1", Other: "c7", Sparse: "c3", FFT: "c4", Solver: "c6" };
  brickline.categoryColour = (name) => CATEGORY[name] || "c7";
  brickline.categoryNames = ["Norm", "Attention", "FFN", "Other", "Sparse", "FFT", "Solver"];

  const swatch = (category) => el("i", { class: "swatch", style: { background: `var(--${brickline.categoryColour(category)})` }, title: category });
  const sampled = (row) => row.timed < row.count;

  function shareBar(share, most, category) {
    return el("span", { class: "share" }, el("span", { class: "track", "aria-hidden": "true" },
      el("span", { class: "fill", style: { width: `${Math.max(0.5, 100 * share / (most || 1))}%`, background: `var(--${brickline.categoryColour(category)})` } })),
    el("span", { class: "number" }, percent(share)));
  }

  function pairs(list) {
    return el("dl", { class: "pairs" }, list.filter((pair) => pair[1] !== null).map(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
  }

  function byLayer(data, at, category) {
    const heat = data.heat;
    if (!heat || at < 0 || at >= heat.bricks.rows.length) return null;
    const cells = heat.bricks.cells[at], most = Math.max(...cells);
    if (!most) return null;
    return el("div", { class: "by-layer", style: { "--shade": `var(--${brickline.categoryColour(category)})` } }, el("h4", null, "By layer"), el("div", { class: "columns", role: "img",
      "aria-label": cells.map((share, column) => `${heat.columns[column]}: ${percent(share, 2)}`).join(", ") },
    cells.map((share, column) => el("span", { title: `${heat.columns[column] === "no layer" ? "no layer" : `layer ${heat.columns[column]}`}: ${percent(share, 2)} of all brick time`,
      style: { height: `${Math.max(2, 100 * share / most)}%` } }))));
  }

  function details(data, row) {
    const heatRow = data.heat ? data.heat.bricks.rows.indexOf(row.name) : -1;
    const point = data.roofline.points.find((each) => data.bricks[each.brick] === row);
    return el("div", { class: "details" },
      el("div", { class: "full-name" }, plain(row.name)),
      largeHistogram(row, shorten(row.name, 60), brickline.categoryColour(row.category)),
      el("div", { class: "detail-columns" },
        pairs([
          ["entries", count(row.count)],
          ["timed", sampled(row) ? `${count(row.timed)} (sampled)` : count(row.timed)],
          ["mean ± std", `${time(row.avg_us * 1e3)} ± ${time(row.std_us * 1e3)}`],
          ["min – max", `${time(row.min_us * 1e3)} – ${time(row.max_us * 1e3)}`],
          ["p50 · p90", `${time(row.p50_us * 1e3)} · ${time(row.p90_us * 1e3)}`],
          ["p99 · p99.9", `${time(row.p99_us * 1e3)} · ${time(row.p999_us * 1e3)}`],
        ]),
        pairs([
          ["total", time(row.total_ns)],
          ["exclusive", time(row.exclusive_ns)],
          ["elements", count(row.total_elements)],
          ["elements/s", rate(row.throughput_elements_per_s)],
          ["GB/s in", row.throughput_gbps ? figure(row.throughput_gbps) : "no bytes declared"],
          ["GFLOP/s", row.gflops ? figure(row.gflops) : "no FLOPs declared"],
        ]),
        pairs([
          ["FLOP per byte", row.arithmetic_intensity_flop_per_byte ? figure(row.arithmetic_intensity_flop_per_byte) : null],
          ["below its roof", point ? percent(1 - point.gflops / point.attainable_gflops) : null],
          ["bound by", row.bottleneck === "unknown" ? null : row.bottleneck],
          ["cycles", row.total_cycles ? rate(row.total_cycles) : null],
          ["host time", row.host_ns ? time(row.host_ns) : null],
          ["waited for the host", row.host_bound ? count(row.host_bound) : null],
          ["left out of order", row.out_of_order ? count(row.out_of_order) : null],
          ["supplied by the caller", row.approximate ? count(row.approximate) : null],
        ])),
      byLayer(data, heatRow, row.category));
  }

  brickline.bricksView = (data) => {
    if (!data.bricks.length) return;
    const most = Math.max(...data.bricks.map((row) => row.share));
    const any = data.bricks.some(sampled);
    const has = (key) => data.bricks.some((row) => row[key]);
    const columns = [
      { title: "Brick", left: true, value: (row) => row.name.toLowerCase(), show: (row) => el("span", { class: "brick-name", title: row.name.length > 40 ? plain(row.name) : null }, swatch(row.category), shorten(row.name, 44)) },
      { title: "Share", value: (row) => row.share, show: (row) => shareBar(row.share, most, row.category), hint: "Part of all exclusive brick time" },
      { title: "Distribution", left: true, first: "down", narrow: false, value: (row) => row.p99_us / (row.p50_us || 1), show: (row) => smallHistogram(row, `var(--${brickline.categoryColour(row.category)})`), hint: "Durations on a logarithmic axis of their own, bars by square root; dark line p50, warm line p99. Sorts by p99 over p50." },
      { title: "p50", value: (row) => row.p50_us, show: (row) => time(row.p50_us * 1e3) },
      { title: "p90", narrow: false, value: (row) => row.p90_us, show: (row) => time(row.p90_us * 1e3) },
      { title: "p99", narrow: false, value: (row) => row.p99_us, show: (row) => time(row.p99_us * 1e3) },
      { title: "Mean", narrow: false, value: (row) => row.avg_us, show: (row) => time(row.avg_us * 1e3) },
      { title: "Total", narrow: false, value: (row) => row.total_ns, show: (row) => time(row.total_ns), hint: "Inclusive time of the timed entries" },
      { title: "Count", narrow: false, value: (row) => row.count, show: (row) => count(row.count) },
    ];
    if (any) columns.push({ title: "Timed", narrow: false, value: (row) => row.timed / (row.count || 1), show: (row) => sampled(row) ? el("span", { class: "sampled", title: `${count(row.timed)} of ${count(row.count)} entries were timed` }, percent(row.timed / row.count, row.timed * 100 < row.count ? 1 : 0)) : "all", hint: "Part of the entries that was timed" });
    if (has("throughput_gbps")) columns.push({ title: "GB/s", narrow: false, value: (row) => row.throughput_gbps || null, show: (row) => row.throughput_gbps ? figure(row.throughput_gbps) : "" });
    if (has("gflops")) columns.push({ title: "GFLOP/s", narrow: false, value: (row) => row.gflops || null, show: (row) => row.gflops ? figure(row.gflops) : "" });
    if (data.bricks.some((row) => row.bottleneck !== "unknown")) columns.push({ title: "Bound by", left: true, narrow: false, value: (row) => row.bottleneck === "unknown" ? "" : row.bottleneck, show: (row) => row.bottleneck === "unknown" ? "" : row.bottleneck });
    const left = data.bricks_left_out;
    const choices = data.categories.filter((each) => each.count).map((each) => ({ label: each.name, test: (row) => row.category === each.name }));
    section({ id: "bricks", title: "Bricks", badge: count(data.figures.bricks),
      lead: "Share is of exclusive time, so nested bricks count once. Open a row for its histogram and all its figures." + (any ? " Percentiles are of the timed entries." : ""),
      build(body) {
        if (left) body.append(brickline.notice("info", `The ${count(data.bricks.length)} bricks with the longest total are here; ${count(left.count)} more share ${percent(left.share)} of the time.`));
        body.append(table({ label: "Bricks", noun: "bricks", columns, rows: data.bricks, sort: { at: 1 }, text: (row) => `${row.name} ${row.category}`, open: (row) => details(data, row),
          choices: choices.length > 1 ? choices : null }).node);
      } });
  };

  brickline.stepsView = (data) => {
    if (!data.steps.length) return;
    section({ id: "steps", title: "Steps", badge: count(data.figures.steps), lead: "Model passes by phase. A step's time is the host's, from its start to its end.", build(body) {
      const columns = [
        { title: "Phase", left: true, value: (row) => row.phase, show: (row) => shorten(row.phase || "(none)", 40) },
        { title: "Steps", value: (row) => row.count, show: (row) => count(row.count) },
        { title: "Tokens", value: (row) => row.tokens, show: (row) => count(row.tokens) },
        { title: "Per token", value: (row) => row.us_per_token || null, show: (row) => row.us_per_token ? time(row.us_per_token * 1e3) : "" },
        { title: "Tokens/s", narrow: false, value: (row) => row.tokens_per_s || null, show: (row) => row.tokens_per_s ? rate(row.tokens_per_s) : "" },
        { title: "Distribution", left: true, narrow: false, value: (row) => row.p99_us / (row.p50_us || 1), show: (row) => smallHistogram(row, "var(--c7)") },
        { title: "p50", narrow: false, value: (row) => row.p50_us, show: (row) => time(row.p50_us * 1e3) },
        { title: "p99", narrow: false, value: (row) => row.p99_us, show: (row) => time(row.p99_us * 1e3) },
        { title: "Longest", narrow: false, value: (row) => row.max_us, show: (row) => time(row.max_us * 1e3) },
      ];
      // Where only some bricks of a timed step are timed, this would count the others as none; bricks on a device lie in no step.
      if (!data.bricks.some(sampled) && data.steps.every((row) => row.outside_bricks_ns !== null)) columns.push({ title: "In no brick", narrow: false, value: (row) => row.outside_bricks_ns, show: (row) => row.wall_ns ? percent(row.outside_bricks_ns / row.wall_ns) : "", hint: "Time of the steps that is in no brick" });
      body.append(table({ label: "Steps by phase", noun: "phases", columns, rows: data.steps, sort: { at: 1 }, open: (row) => el("div", { class: "details" }, largeHistogram(row, `steps of ${row.phase || "no phase"}`)) }).node);
    } });
  };
})();
