"use strict";
// The execution graph: what the critical path is made of, and a tree that folds, the path marked.
(() => {
  const { el, clear, time, count, percent, shorten, plain, section, hover } = brickline;
  const [PARENT, NAME, KIND, MANY, TIME, ON_PATH, SLACK, HIDDEN] = [0, 1, 2, 3, 4, 5, 6, 7];
  const OPEN_AT_FIRST = 60;
  const DEEPEST = 24;

  /** A colour for each name of the path, the largest names first. */
  function colours(names) {
    const order = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c8", "c9"];
    const found = new Map(names.slice(0, order.length).map(([name], at) => [name, order[at]]));
    return (name) => found.get(name) || "c7";
  }

  function pathView(path) {
    const colourOf = colours(path.names), longest = path.names[0];
    const strip = el("div", { class: `path-strip ${path.pieces.length > 60 ? "dense" : ""}`, role: "img", "aria-label": `Critical path of ${time(path.total_ns)}: ${path.names.slice(0, 6).map(([name, , ns]) => `${name} ${percent(ns / path.total_ns)}`).join(", ")}` },
      path.pieces.map(([name, ns]) => el("span", { style: { "flex-grow": ns, background: `var(--${colourOf(name)})` }, onpointermove: (event) => hover(event.clientX, event.clientY, [shorten(name, 60), `${time(ns)}, ${percent(ns / path.total_ns)} of the path`]), onpointerleave: () => hover() })));
    const rest = path.names.slice(9).reduce((sum, each) => sum + each[2], 0);
    return el("div", { class: "card path" }, el("h3", null, `Critical path: ${time(path.total_ns)} over ${count(path.nodes)} ${path.nodes === 1 ? "node" : "nodes"}`),
      longest ? el("p", { class: "muted" }, "The chain of work that decides how long the whole takes, in order. Anything else may be made faster without effect.") : null, strip,
      el("p", { class: "legend" }, path.names.slice(0, 9).map(([name, many, ns]) => el("span", null, el("i", { style: { background: `var(--${colourOf(name)})` } }), shorten(name, 40), many > 1 ? ` ×${count(many)} ` : " ", el("b", null, percent(ns / path.total_ns)))), rest ? el("span", null, el("i", { style: { background: "var(--c7)" } }), `other ${percent(rest / path.total_ns)}`) : null));
  }

  function treeView(graph) {
    const { tree, path } = graph, rows = tree.rows;
    const inside = rows.map(() => []), roots = [], depth = [];
    rows.forEach((row, at) => {
      depth.push(row[PARENT] < 0 ? 0 : depth[row[PARENT]] + 1);
      (row[PARENT] < 0 ? roots : inside[row[PARENT]]).push(at);
    });
    // A row is on the path where it, or anything inside it, adds time to it.
    const through = rows.map((row) => row[ON_PATH]);
    for (let at = rows.length - 1; at >= 0; at--) if (rows[at][PARENT] >= 0) through[rows[at][PARENT]] += through[at];
    const open = new Set();
    let seen = roots.length;
    for (let at = 0; at < rows.length && seen < OPEN_AT_FIRST; at++) if (inside[at].length && (depth[at] === 0 || open.has(rows[at][PARENT]))) { if (seen + inside[at].length > OPEN_AT_FIRST) break; open.add(at); seen += inside[at].length; }
    let onlyPath = false, active = roots[0];
    const list = el("ul", { class: "tree", role: "tree", "aria-label": "What ran inside what" });

    const visible = (at) => !onlyPath || through[at] > 0;
    function shown() {
      const found = [], stack = roots.filter(visible).reverse();
      while (stack.length) {
        const at = stack.pop();
        found.push(at);
        if (open.has(at)) stack.push(...inside[at].filter(visible).reverse());
      }
      return found;
    }

    function line(at) {
      const row = rows[at], many = inside[at].length;
      const facts = [];
      if (through[at] && path) facts.push(el("span", { class: "on-path", title: "Time that it and what lies inside it add to the critical path" }, percent(through[at] / path.total_ns), el("small", null, " of the path")));
      else if (tree.marked && row[SLACK]) facts.push(el("span", { class: "muted", title: "How much later it may finish without delaying the whole" }, `slack ${time(row[SLACK])}`));
      const node = el("li", { role: "treeitem", "aria-level": depth[at] + 1, "aria-expanded": many ? String(open.has(at)) : null, tabindex: at === active ? "0" : "-1", "data-at": at, class: through[at] ? "critical" : null, style: { "--depth": Math.min(depth[at], DEEPEST) } },
        el("span", { class: "fold", "aria-hidden": "true" }, many ? (open.has(at) ? "▾" : "▸") : ""),
        el("span", { class: "kind", title: row[KIND] }, row[KIND] === "AsyncTask" ? "Task" : row[KIND]), el("span", { class: "tree-name", title: row[NAME].length > 50 ? plain(row[NAME]) : null }, shorten(row[NAME], 60), row[MANY] > 1 ? el("b", { class: "many" }, ` ×${count(row[MANY])}`) : null),
        el("span", { class: "tree-facts" }, facts, el("span", { class: "tree-time" }, row[TIME] === null ? "not timed" : time(row[TIME]))));
      return node;
    }

    function hiddenLine(words, level) {
      return el("li", { role: "none", class: "muted rest", style: { "--depth": Math.min(level, DEEPEST) + 1 } }, words);
    }

    function draw(focus = false) {
      clear(list);
      const now = shown();
      if (!now.includes(active)) active = now[0];
      now.forEach((at, place) => {
        list.append(line(at));
        const next = now[place + 1];
        // What has no row is counted at the end of what it lies in.
        if (!onlyPath) for (let up = at; up >= 0; up = rows[up][PARENT]) {
          if (next !== undefined && (rows[next][PARENT] === up || depth[next] > depth[up])) break;
          if (rows[up][HIDDEN] && (open.has(up) || !inside[up].length)) list.append(hiddenLine(`… ${count(rows[up][HIDDEN])} more inside, not on this page`, depth[up] + 1));
        }
      });
      if (tree.hidden_roots) list.append(hiddenLine(`… ${count(tree.hidden_roots)} more`, 0));
      if (focus) list.querySelector(`[data-at="${active}"]`)?.focus();
    }

    function toggle(at, to = !open.has(at)) {
      if (!inside[at].length) return;
      if (to) open.add(at); else open.delete(at);
      active = at;
      draw(true);
    }
    list.addEventListener("click", (event) => {
      const node = event.target.closest("li[data-at]");
      if (!node) return;
      active = Number(node.dataset.at);
      if (inside[active].length) toggle(active); else draw(true);
    });
    list.addEventListener("keydown", (event) => {
      const now = shown(), place = now.indexOf(active);
      const go = (at) => { if (at !== undefined && at >= 0) { active = at; draw(true); } };
      const does = {
        ArrowDown: () => go(now[place + 1]), ArrowUp: () => go(now[place - 1]), Home: () => go(now[0]), End: () => go(now[now.length - 1]),
        ArrowRight: () => inside[active].length && !open.has(active) ? toggle(active, true) : go(inside[active].filter(visible)[0]),
        ArrowLeft: () => open.has(active) ? toggle(active, false) : go(rows[active][PARENT]),
        Enter: () => toggle(active), " ": () => toggle(active),
      }[event.key];
      if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      does();
    });
    const all = (to) => { open.clear(); if (to) rows.forEach((_, at) => { if (inside[at].length) open.add(at); }); draw(); };
    const only = el("button", { type: "button", "aria-pressed": "false", onclick: () => { onlyPath = !onlyPath; only.setAttribute("aria-pressed", String(onlyPath)); draw(); } }, "Critical path only");
    draw();
    const left = graph.nodes - tree.shown;
    return el("div", null, el("div", { class: "bar" }, el("button", { type: "button", onclick: () => all(true) }, "Open all"), el("button", { type: "button", onclick: () => all(false) }, "Fold all"), path ? only : null,
      el("output", { class: "said" }, `${count(graph.nodes)} nodes, ${count(graph.edges)} edges` + (left > 0 ? `; ${count(left)} nodes have no row of their own` : "") + (graph.dropped_nodes ? `; ${count(graph.dropped_nodes)} were past the graph's budget` : ""))),
    el("div", { class: "card tree-card" }, list));
  }

  brickline.graphView = (data) => {
    const { graphs, left_out: left } = data.graphs;
    if (!graphs.length) {
      if (data.bricks.length) section({ id: "graph", title: "Graph", build(body) { body.append(el("p", { class: "muted" }, "This run drew no execution graph. Draw one with BrickProfiler(graph=True), or profiler.enable_graph() for a few steps.")); } });
      return;
    }
    section({ id: "graph", title: "Graph", badge: count(graphs.reduce((sum, each) => sum + (each.nodes || 0), 0)), lead: "What ran inside what, and which of it decides how long the whole takes. More than eight siblings of one name share a row.", build(body) {
      if (left) body.append(brickline.notice("info", `${count(left)} more processes drew graphs, which are not on this page.`));
      for (const graph of graphs) {
        if (graphs.length > 1) body.append(el("h3", { class: "process" }, `Process ${graph.process}`));
        if (graph.problem) body.append(brickline.notice("warn", plain(graph.problem)));
        if (graph.path && graph.path.nodes) body.append(pathView(graph.path));
        if (graph.tree) body.append(treeView(graph));
      }
    } });
  };
})();
