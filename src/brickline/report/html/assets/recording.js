"use strict";
// How the figures came to be: lanes, what recording cost and lost, checks, problems, circumstances.
(() => {
  const { el, time, count, percent, plain, shorten, section, table } = brickline;
  const SEVERITY = { ok: "good", skipped: "", warning: "warn", error: "bad" };

  const card = (title, ...children) => el("div", { class: "card" }, el("h3", null, title), ...children);
  const pairs = (list) => el("dl", { class: "pairs" }, list.map(([name, value]) => [el("dt", null, plain(name)), el("dd", null, typeof value === "number" ? count(value) : plain(value))]));
  const lines = (list) => el("ul", { class: "lines" }, list.map((line) => el("li", null, plain(line))));

  function checks(data) {
    return card("Do the figures hold together?", el("ul", { class: "checks" }, data.checks.map((each) => el("li", null, el("span", { class: `chip ${SEVERITY[each.severity] || ""}` }, each.severity), el("code", null, each.code), el("span", null, plain(each.message))))));
  }
  function budgets(data) {
    return card("Budgets", el("ul", { class: "checks" }, [...data.budgets].sort((a, b) => a.passed - b.passed).map((each) => el("li", null, el("span", { class: `chip ${each.passed ? "good" : "bad"}` }, each.passed ? "ok" : "exceeded"),
      el("span", null, Object.entries(each).filter(([name, value]) => name !== "passed" && value !== null).map(([name, value]) => `${name} ${typeof value === "number" ? brickline.figure(value, 4) : plain(value)}`).join(" · "))))));
  }
  function lanes(data) {
    return table({ label: "Threads and streams", noun: "threads and streams", one: "thread or stream", rows: data.lanes, sort: { at: 1 }, columns: [
      { title: "Thread or stream", left: true, value: (lane) => lane.name, show: (lane) => shorten(lane.name, 48) },
      { title: "Share", value: (lane) => lane.share, show: (lane) => percent(lane.share) },
      { title: "Process", narrow: false, value: (lane) => lane.process, show: (lane) => String(lane.process) },
      { title: "Entries", value: (lane) => lane.count, show: (lane) => count(lane.count) },
      { title: "In bricks", narrow: false, value: (lane) => lane.total_ns, show: (lane) => time(lane.total_ns) },
      { title: "From first to last", narrow: false, value: (lane) => lane.span_ns, show: (lane) => time(lane.span_ns) },
      { title: "Lost", narrow: false, value: (lane) => lane.lost, show: (lane) => lane.lost ? count(lane.lost) : "" },
    ] }).node;
  }

  brickline.recordingView = (data) => {
    section({ id: "recording", title: "Recording", badge: data.problems.length ? "!" : null, lead: "How the figures came to be, and on what machine.", build(body) {
      if (data.problems.length) body.append(el("div", { class: "card problems", role: "note" }, el("h3", null, "Not read, or not recorded"), lines(data.problems)));
      if (data.budgets) body.append(budgets(data));
      const notes = data.notes.filter((note) => !note.startsWith("Not read: ") && !note.startsWith("brickline failed here"));
      const facts = [card("This run", pairs(data.recording))];
      if (notes.length) facts.push(card("Notes", lines(notes)));
      if (data.facts.length) facts.push(card("Facts noted by the program", pairs(data.facts)));
      body.append(el("div", { class: "two" }, facts));
      if (data.checks.length) body.append(checks(data));
      if (data.lanes.length) body.append(el("div", { class: "lane-table" }, lanes(data)));
      body.append(data.circumstances.length ? card("Circumstances", pairs(data.circumstances)) : el("p", { class: "muted" }, "The circumstances of this run are not known."));
    } });
  };
})();
