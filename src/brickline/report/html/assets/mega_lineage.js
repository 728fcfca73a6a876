"use strict";
// Lineage that can be followed: a task, what it read from whom, who reads it, and all that contributed.
(() => {
  const { el, svg, clear, time, count, shorten, plain, section, unpack, known } = brickline;
  const SIDE = 10, WIDE = 1000, NODE = 296, ROW = 40;

  /** Columns of tasks and of lineage, and who reads whom. */
  function prepared(data) {
    const tasks = Object.fromEntries(Object.entries(data.tasks).map(([name, column]) => [name, unpack(column)]));
    if (!data.lineage) return { tasks, size: tasks.op.length, flow: null };
    const flow = Object.fromEntries(["begin", "sources", "given_begin", "given", "counts"].map((name) => [name, unpack(data.lineage[name])]));
    const size = tasks.op.length, readers = Array.from({ length: size }, () => null);
    for (let task = 0; task < size; task++) {
      for (let at = flow.begin[task]; at < flow.begin[task + 1]; at++) (readers[flow.sources[at]] ||= []).push(task);
    }
    return { tasks, size, flow: { ...flow, readers, memory: data.lineage.memory } };
  }

  brickline.megaTasks = prepared;
  brickline.taskName = (data, task) => {
    const { tasks } = data.ready, brick = data.bricks[tasks.brick[task]], op = data.ops[tasks.op[task]] ?? `op ${tasks.op[task]}`;
    const words = [op, brick !== undefined && brick !== op ? brick : null, tasks.layer[task] >= 0 ? `layer ${tasks.layer[task]}` : null].filter(Boolean);
    return `${data.mode === "program" ? "launch" : "submission"} ${data.first + task} (${words.join(", ")})`;
  };

  const direct = (flow, task) => Array.from(flow.sources.slice(flow.begin[task], flow.begin[task + 1]));
  const given = (flow, task) => Array.from(flow.given.slice(flow.given_begin[task], flow.given_begin[task + 1]), (at) => flow.memory[at]);

  /** Every task that contributed, itself included. */
  function closure(flow, first) {
    const seen = new Set([first]), waiting = [first];
    while (waiting.length) {
      const task = waiting.pop();
      for (let at = flow.begin[task]; at < flow.begin[task + 1]; at++) {
        const source = flow.sources[at];
        if (!seen.has(source)) { seen.add(source); waiting.push(source); }
      }
    }
    return seen;
  }

  /** Sources on the left, the task, and its readers on the right. */
  function picture(data, task, pick) {
    const { flow } = data.ready;
    const sources = direct(flow, task), memory = given(flow, task), readers = flow.readers[task] || [];
    const left = [...sources.map((each) => ({ task: each })), ...memory.map((name) => ({ name }))], right = readers.map((each) => ({ task: each }));
    const lines = Math.max(Math.min(left.length, SIDE + 1), Math.min(right.length, SIDE + 1), 1), high = lines * ROW + 10;
    const root = svg("svg", { class: "flow", viewBox: `0 0 ${WIDE} ${high}`, role: "group", "aria-label": `What ${brickline.taskName(data, task)} read, and who reads it` });
    const middle = { x: (WIDE - NODE) / 2, y: (high - ROW) / 2 };
    const node = (x, y, words, kind, to) => {
      const group = svg("g", { class: `node ${kind}`, role: to === undefined ? null : "button", tabindex: to === undefined ? null : "0", "data-task": to ?? null, "aria-label": plain(words) },
        svg("title", null, plain(words)), svg("rect", { x, y: y + 4, width: NODE, height: ROW - 8, rx: 7 }), svg("text", { x: x + 10, y: y + ROW / 2 + 4 }, shorten(words, 44)));
      if (to !== undefined) {
        group.addEventListener("click", () => pick(to));
        group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(to); } });
      }
      return group;
    };
    const side = (list, x, edge) => {
      const few = list.slice(0, SIDE), extra = list.length - few.length, height = (few.length + (extra ? 1 : 0)) * ROW, top = (high - height) / 2;
      few.forEach((each, at) => {
        const y = top + at * ROW;
        root.append(svg("path", { d: edge(y + ROW / 2) }), node(x, y, each.task === undefined ? each.name : brickline.taskName(data, each.task), each.task === undefined ? "given" : "", each.task));
      });
      if (extra) root.append(svg("text", { x: x + 10, y: top + few.length * ROW + ROW / 2 + 4 }, `and ${count(extra)} more, below`));
    };
    const curve = (x1, y1, x2, y2) => `M${x1} ${y1} C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
    side(left, 4, (y) => curve(4 + NODE, y, middle.x, middle.y + ROW / 2));
    side(right, WIDE - NODE - 4, (y) => curve(middle.x + NODE, middle.y + ROW / 2, WIDE - NODE - 4, y));
    root.append(node(middle.x, middle.y, brickline.taskName(data, task), "chosen"));
    return root;
  }

  function facts(data, task) {
    const { tasks, flow } = data.ready, rows = [["Region", count(tasks.region[task])], ["Items", tasks.done ? `${count(tasks.done[task])} of ${count(tasks.items[task])} done` : count(tasks.items[task])]];
    if (tasks.state) rows.push(["State", data.states[tasks.state[task]]]);
    if (tasks.alias[task] >= 0) rows.push(["Computed by", brickline.taskName(data, tasks.alias[task])]);
    if (tasks.end && tasks.end[task] >= 0) rows.push(["Ran", `${time(tasks.begin[task])} to ${time(tasks.end[task])}, ${time(tasks.work[task])} of work, ${time(tasks.wait[task])} of waiting before`]);
    const hidden = flow.counts[task] - (flow.begin[task + 1] - flow.begin[task]);
    if (hidden > 0) rows.push(["Not on this page", `${count(hidden)} of its ${count(flow.counts[task])} sources`]);
    return el("dl", { class: "pairs" }, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, plain(value))]));
  }

  /** All that contributed, by op, brick and layer. */
  function everything(data, task) {
    const { tasks, flow } = data.ready, all = closure(flow, task), groups = new Map(), memory = new Set();
    for (const each of all) {
      const key = `${tasks.op[each]} ${tasks.brick[each]} ${tasks.layer[each]}`;
      const group = groups.get(key) || { op: tasks.op[each], brick: tasks.brick[each], layer: tasks.layer[each], tasks: 0, items: 0 };
      group.tasks += 1;
      if (tasks.alias[each] < 0) group.items += tasks.items[each]; // else they are those of whom it repeats
      groups.set(key, group);
      for (const name of given(flow, each)) memory.add(name);
    }
    const table = brickline.table({ label: "All sources", noun: "sources", rows: [...groups.values()], sort: { at: 4 }, columns: [
      { title: "Op", left: true, value: (row) => data.ops[row.op], show: (row) => shorten(data.ops[row.op] ?? row.op, 40) },
      { title: "Brick", left: true, value: (row) => data.bricks[row.brick] ?? "", show: (row) => shorten(data.bricks[row.brick] ?? "", 40) },
      { title: "Layer", value: (row) => row.layer < 0 ? null : row.layer },
      { title: data.mode === "program" ? "Launches" : "Submissions", value: (row) => row.tasks, show: (row) => count(row.tasks) },
      { title: "Items", value: (row) => row.items, show: (row) => count(row.items) },
    ] });
    return [el("p", { class: "muted", id: "all-sources" }, `In all ${count(all.size)} ${data.mode === "program" ? "launches" : "submissions"} contributed${memory.size ? `, and given memory ${[...memory].slice(0, 40).map((name) => shorten(name, 40)).join(", ")}${memory.size > 40 ? " and more" : ""}` : ""}.`), el("div", { class: "sources-table" }, table.node)];
  }

  /** The section; returns what shows a task in it. */
  brickline.lineageView = (data) => {
    let place = null, trail = [];
    const ready = data.ready;
    const show = (task, { jump = true, back = false } = {}) => {
      if (!ready.flow || !(task >= 0) || task >= ready.size) return;
      const node = document.getElementById("lineage");
      if (!place) { node.dataset.wanted = task; }
      else {
        if (!back && trail[trail.length - 1] !== task) trail.push(task);
        trail = trail.slice(-12);
        const old = trail.slice(0, -1);
        clear(place).append(el("div", { class: "card chosen-task", "data-task": task },
          el("div", { class: "trail" }, old.length ? el("button", { type: "button", id: "lineage-back", onclick: () => { trail.pop(); show(trail[trail.length - 1], { back: true }); } }, "← Back") : null, old.map((each) => `${data.first + each} ›`), el("b", null, String(data.first + task))),
          el("h3", null, plain(brickline.taskName(data, task))), facts(data, task),
          el("div", { class: "flow-scroll", tabindex: "0", role: "region", "aria-label": "Neighbours, scrolls" }, picture(data, task, (each) => show(each))),
          lists(task), everything(data, task)));
      }
      if (jump) node.scrollIntoView();
    };
    const button = (task) => el("button", { type: "button", "data-task": task, onclick: () => show(task) }, shorten(brickline.taskName(data, task), 60));
    const lists = (task) => [["All that it read", direct(ready.flow, task)], ["All that read it", ready.flow.readers[task] || []]].filter(([, found]) => found.length > SIDE)
      .map(([words, found]) => el("details", null, el("summary", null, `${words}: ${count(found.length)}`), el("div", { class: "choices" }, found.slice(0, 500).map(button))));
    section({ id: "lineage", title: "Lineage", lead: "Where values came from. Follow a task to what it read, or to who reads it.", build(body) {
      if (!ready.flow) { body.append(el("p", { class: "muted" }, "Lineage was off, so that nothing is known of where values came from.")); return; }
      place = el("div");
      const outputs = data.outputs.flatMap(([name, tasks]) => tasks.map((task) => ({ name, task })));
      if (outputs.length) {
        const select = el("select", { "aria-label": "Output to explain", onchange: () => show(outputs[select.selectedIndex].task, { jump: false }) }, outputs.map((each) => el("option", null, `${shorten(each.name, 40)} · ${shorten(brickline.taskName(data, each.task), 60)}`)));
        body.append(el("div", { class: "bar" }, el("label", null, "Output ", select), data.outputs.length < data.outputs_of ? el("span", { class: "said" }, `${count(data.outputs_of - data.outputs.length)} more outputs are not on this page`) : null));
      }
      body.append(place);
      const wanted = document.getElementById("lineage").dataset.wanted;
      const first = wanted !== undefined ? Number(wanted) : outputs.length ? outputs[0].task : ready.size - 1;
      if (known(first) && ready.size) show(first, { jump: false });
    } });
    return show;
  };
})();
