"use strict";
// The profile page: the headline, then every view in order.
(() => {
  const { el, time, count, percent, rate, masthead, figures, notice, section, start } = brickline;
  const data = brickline.data();
  const { figures: known } = data;

  function chips() {
    const facts = new Map(data.circumstances), found = [];
    const created = data.recording.find(([name]) => name === "recorded");
    if (created) found.push(String(created[1]).slice(0, 16).replace("T", " ") + " UTC");
    for (const name of ["devices", "cpu", "torch", "brickline"]) if (facts.has(name)) found.push(name === "torch" || name === "brickline" ? `${name} ${facts.get(name)}` : facts.get(name));
    return found.map((each) => brickline.shorten(each, 60));
  }

  /** A figure and its unit stay on one line. */
  const tight = (text) => text.replace(/(\d) (?=[%µmnsk])/g, "$1\u00a0");
  masthead({ kicker: "Profile", title: data.name, line: data.headline.map(([text, strong]) => el(strong ? "strong" : "span", null, tight(brickline.plain(text)))), chips: chips() });
  const main = document.getElementById("main");
  for (const [kind, words] of data.notices) main.append(notice(kind, words));
  if (data.bricks.length) {
    const list = [];
    if (known.us_per_token !== null) list.push({ label: `Per token${known.phase ? `, ${brickline.shorten(known.phase, 16)}` : ""}`, value: time(known.us_per_token * 1e3), note: `${rate(known.tokens_per_s)} tokens/s` });
    if (known.p50_ns) list.push({ label: "Step p50", value: time(known.p50_ns), note: `p99 ${time(known.p99_ns)}` });
    if (known.steps) list.push({ label: "Steps", value: count(known.steps), note: tight(`${count(known.tokens)} tokens in ${time(known.wall_ns)}`) });
    if (known.coverage !== null) list.push({ label: "Covered by bricks", value: percent(known.coverage), note: "of the steps' wall time" });
    list.push({ label: "In bricks", value: time(known.exclusive_ns), note: `${count(known.bricks)} ${known.bricks === 1 ? "brick" : "bricks"}, exclusive time` });
    if (known.overhead_ns) list.push({ label: "Recording took", value: time(known.overhead_ns), note: known.overhead_share !== null ? `${percent(known.overhead_share)} of the steps` : null });
    main.append(figures(list));
  }
  brickline.bricksView(data);
  brickline.heatView(data);
  brickline.timelineView(data);
  brickline.rooflineView(data);
  brickline.tilesView(data);
  brickline.graphView(data);
  brickline.stepsView(data);
  brickline.recordingView(data);
  start({ first: 2 });
})();
