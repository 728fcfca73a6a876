"use strict";
// The page of a megakernel's report: what comes first, then section by section.
(() => {
  const { el, plain, shorten, time, count, percent, section, start, notice, figures, masthead, table, data: read, known } = brickline;
  const data = read();
  data.ready = brickline.megaTasks(data);
  const { tasks, size } = data.ready, total = data.processed + data.remaining;

  masthead({ title: data.name, kicker: `Megakernel · ${data.mode} mode · ${plain(data.device)}`,
    line: data.remaining ? `${count(data.remaining)} of ${count(total)} items remain: ${data.why_remaining}.` : `All ${count(total)} items are done.`,
    chips: [el("span", { class: `chip ${data.remaining ? "warn" : "good"}`, id: "complete" }, data.remaining ? "partial" : "complete"), ...(data.faults_of ? [el("span", { class: "chip bad" }, `${count(data.faults_of)} ${data.faults_of === 1 ? "fault" : "faults"}`)] : [])] });

  const work = data.shares.find(([word]) => word === "work");
  document.getElementById("main").append(figures([
    { label: "Items done", value: count(data.processed), note: `of ${count(total)}` },
    { label: "Wall time", value: time(data.wall_ns), note: data.phases.map(([word, ns]) => `${word} ${time(ns)}`).join(", ") || "its phases were not measured" },
    ...(work ? [{ label: "Workers worked", value: percent(work[1]), note: brickline.workerWords(data) }] : []),
    ...(known(data.imbalance) ? [{ label: "Imbalance", value: data.imbalance.toFixed(2), note: "the busiest worker to the mean; 1 is even" }] : []),
    { label: "Regions", value: count(data.regions_of), note: `of ${count(data.tasks_of)} ${data.mode === "program" ? "launches" : "submissions"}` }]));
  if (size < data.tasks_of) document.getElementById("main").append(notice("info", `The first ${count(size)} of ${count(data.tasks_of)} tasks are on this page; the saved report has all of them.`));

  let show = () => {};
  const pick = (task) => show(task);
  const follow = (task) => data.lineage ? el("button", { type: "button", onclick: () => pick(task) }, "Lineage") : "";

  if (data.faults.length) section({ id: "faults", title: "Faults", badge: count(data.faults_of), build(body) {
    body.append(table({ label: "Faults", noun: "faults", rows: data.faults, text: (row) => row.join(" "), columns: [
      { title: "Task", left: true, value: (row) => row[0], show: (row) => row[0] < size ? shorten(brickline.taskName(data, row[0]), 60) : String(data.first + row[0]) },
      { title: "Item", value: (row) => row[1], show: (row) => count(row[1]) },
      { title: "Code", left: true, value: (row) => row[2], show: (row) => plain(row[2]) },
      { title: "Meaning", left: true, value: (row) => row[4], show: (row) => shorten(row[4], 80) },
      { title: "Retries", value: (row) => row[5], show: (row) => count(row[5]) },
      { title: "", left: true, value: () => null, show: (row) => follow(row[0]) },
    ] }).node);
    if (data.faults.length < data.faults_of) body.append(el("p", { class: "muted" }, `The first ${count(data.faults.length)} of ${count(data.faults_of)} are shown.`));
  } });
  brickline.workerBars(data);
  brickline.spanTimeline(data, pick);
  if (data.op_times.length) section({ id: "ops", title: "Ops", badge: count(data.op_times.length), lead: "Time inside items, over all workers.", build(body) {
    const sum = data.op_times.reduce((all, row) => all + (row[3] || 0), 0);
    body.append(table({ label: "Ops", noun: "ops", rows: data.op_times, text: (row) => row[0], sort: { at: 3 }, columns: [
      { title: "Op", left: true, value: (row) => row[0], show: (row) => shorten(row[0], 60) },
      { title: "Tasks", value: (row) => row[1], show: (row) => count(row[1]) },
      { title: "Items", value: (row) => row[2], show: (row) => count(row[2]) },
      { title: "Work", value: (row) => row[3], show: (row) => time(row[3]) },
      { title: "Share", value: (row) => row[3], show: (row) => sum && known(row[3]) ? percent(row[3] / sum) : "–", narrow: false },
      { title: "An item", value: (row) => known(row[3]) && row[2] ? row[3] / row[2] : null, show: (row) => known(row[3]) && row[2] ? time(row[3] / row[2]) : "–", narrow: false },
      { title: "Waited before", value: (row) => row[4], show: (row) => time(row[4]), narrow: false },
    ] }).node);
  } });
  section({ id: "tasks", title: data.mode === "program" ? "Launches" : "Submissions", badge: count(data.tasks_of), build(body) {
    const rows = Array.from({ length: size }, (_, at) => at), timed = tasks.end;
    body.append(table({ label: "Tasks", noun: "tasks", rows, text: (at) => `${brickline.taskName(data, at)} ${tasks.state ? data.states[tasks.state[at]] : ""}`,
      choices: tasks.state ? [{ label: "Not done", test: (at) => tasks.state[at] !== 0 && tasks.state[at] !== 5 }, { label: "Deduped", test: (at) => tasks.state[at] === 5 }] : undefined, columns: [
        { title: "Task", left: true, first: "up", value: (at) => at, show: (at) => shorten(brickline.taskName(data, at), 60) },
        { title: "Items", value: (at) => tasks.items[at], show: (at) => count(tasks.items[at]) },
        { title: "Region", value: (at) => tasks.region[at], show: (at) => count(tasks.region[at]), narrow: false },
        ...(tasks.state ? [{ title: "State", left: true, value: (at) => data.states[tasks.state[at]] }] : []),
        ...(timed ? [{ title: "Work", value: (at) => timed[at] < 0 ? null : tasks.work[at], show: (at) => timed[at] < 0 ? "–" : time(tasks.work[at]) },
          { title: "Waited", value: (at) => timed[at] < 0 ? null : tasks.wait[at], show: (at) => timed[at] < 0 ? "–" : time(tasks.wait[at]), narrow: false },
          { title: "Began", first: "up", value: (at) => timed[at] < 0 ? null : tasks.begin[at], show: (at) => timed[at] < 0 ? "–" : time(tasks.begin[at]), narrow: false }] : []),
        { title: "", left: true, value: () => null, show: (at) => follow(at) },
      ] }).node);
  } });
  show = brickline.lineageView(data);
  section({ id: "counters", title: "Counters", build(body) {
    body.append(el("div", { class: "card" }, el("dl", { class: "pairs" }, data.counters.map(([name, value]) => [el("dt", null, plain(name)), el("dd", null, plain(value))]))));
    for (const note of data.notes) body.append(el("p", { class: "muted" }, plain(note)));
  } });
  start({ first: 2 });
})();
