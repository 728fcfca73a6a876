"use strict";
// brickline.verdicts: rows of verdicts as Python packed them, their words and figures, and their
// table. A row is {name, reference_name, brick, op, direction, layer_idx, position, ordinal, z,
// local_error, propagated_error, verdict, row}; what is not known is null.
brickline.verdicts = (() => {
  const { el, plain, count, percent, unpack, table, notice } = brickline;
  const NO_NUMBER = -(2 ** 31);
  const TEXTS = ["name", "reference_name", "brick", "op", "direction"];
  const WHOLE = ["layer_idx", "position", "ordinal"];
  const FIGURES = ["z", "local_error", "propagated_error"];
  const KINDS = { culprit: "bad", suspect: "bad", "non-finite origin": "bad", structural: "warn", nondeterministic: "warn",
    unknown: "warn", unobservable: "warn", watch: "warn", accepted: "good", identical: "good", rounding: "good" };
  const SAYS = { culprit: "wrong by itself, shown by executing it again", suspect: "fingerprints alone point here",
    "non-finite origin": "finite inputs, an output that is not", structural: "another op, shape or dtype than on the other side",
    nondeterministic: "two executions of the same side differ by as much", unknown: "not shown either way",
    unobservable: "a difference of this size cannot be seen here", watch: "more than the clean limit and less than twice it",
    amplified: "the error came with the inputs and grew much", tie: "a choice that rounding cannot tell apart",
    accepted: "known and intended", propagated: "the error came with the inputs", rounding: "no more than rounding explains",
    identical: "the same bits" };

  // --- figures ------------------------------------------------------------------------------
  const exponent = (value, places) => value.toExponential(places).replace(/e([+-])(\d)$/, "e$10$2");
  /** An error as the terminal writes it: 3.1e-02. */
  function error(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number" || !Number.isFinite(value)) return notFinite(value);
    return value === 0 ? "0" : exponent(value, 1);
  }
  /** A ratio such as z: three digits, whole from 100 on. */
  function ratio(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number" || !Number.isFinite(value)) return notFinite(value);
    const size = Math.abs(value);
    if (size >= 100 && size < 1e6) return count(value);
    return size && (size < 1e-3 || size >= 1e6) ? exponent(value, 2) : String(Number(value.toPrecision(3)));
  }
  const notFinite = (value) => ({ Infinity: "∞", NaN: "not a number", "-Infinity": "−∞" }[String(value)] || plain(value));
  /** Figures that JSON could not hold came as their names. */
  const number = (value) => typeof value === "string" ? Number(value) : value;

  /** A figure that is an estimate says so; that nothing differs is exact. */
  const about = (value, isEstimate) => isEstimate && value ? `≈ ${error(value)}` : error(value);

  const kind = (verdict) => KINDS[verdict] || "plain";
  const chip = (verdict) => el("span", { class: `chip ${kind(verdict)}`, title: SAYS[verdict] || null }, plain(verdict));
  const call = (row) => row.position === null ? "" : row.ordinal ? `${row.position}.${row.ordinal}` : String(row.position);

  /** A name cut in its middle, since the ends of a dotted path say the most. */
  function name(text, most = 52) {
    const shown = Array.from(plain(text));
    if (shown.length <= most) return shown.join("");
    const head = Math.floor((most - 1) / 3);
    return shown.slice(0, head).join("") + "…" + shown.slice(shown.length - (most - 1 - head)).join("");
  }

  /** Rows from columns; `texts` are the page's names, `order` its words for verdicts. */
  function rowsOf(packed, texts, order) {
    const columns = Object.fromEntries(Object.entries(packed).filter(([, value]) => typeof value === "object").map(([key, value]) => [key, unpack(value)]));
    return Array.from({ length: packed.count }, (_, at) => {
      const row = { row: columns.row[at], verdict: order[columns.verdict[at]], rank: columns.verdict[at] };
      for (const key of TEXTS) row[key] = columns[key][at] ? texts[columns[key][at] - 1] : null;
      for (const key of WHOLE) row[key] = columns[key][at] === NO_NUMBER ? null : columns[key][at];
      for (const key of FIGURES) {
        const value = columns[key][at];
        row[key] = Number.isNaN(value) ? null : value === -Infinity ? NaN : value;
      }
      return row;
    });
  }

  /** What one row knows, in full. */
  function pairs(row) {
    const list = [["brick", row.name], ["held to", row.reference_name], ["brick id", row.brick], ["op", row.op], ["layer", row.layer_idx], ["call", call(row)],
      ["pass", row.direction], ["verdict", `${row.verdict}: ${SAYS[row.verdict] || ""}`], ["z", row.z === null ? null : ratio(row.z)],
      ["local error", row.local_error === null ? null : String(row.local_error)], ["output error", row.propagated_error === null ? null : String(row.propagated_error)],
      ["row of the report", count(row.row + 1)]];
    return el("dl", { class: "pairs" }, list.filter(([, value]) => value !== null && value !== "").map(([key, value]) => [el("dt", null, key), el("dd", null, plain(value))]));
  }

  // --- section ------------------------------------------------------------------------------
  const part = (many, all) => many / all >= 0.0005 && (many / all < 0.9995 || many === all) ? percent(many / all) : many / all < 0.5 ? "< 0.1 %" : "> 99.9 %";
  function strip(view) {
    const all = view.counts.reduce((sum, each) => sum + each, 0);
    const there = view.order.map((verdict, at) => ({ verdict, many: view.counts[at] })).filter((each) => each.many);
    if (!all) return null;
    const bar = el("div", { class: "strip", role: "img", "aria-label": there.map((each) => `${count(each.many)} ${each.verdict}`).join(", ") },
      there.map((each) => el("i", { class: `v-${kind(each.verdict)} v-${each.verdict.replace(/[^a-z]/g, "")}`, style: { "flex-grow": each.many / all }, title: `${count(each.many)} ${each.verdict}` })));
    const legend = el("p", { class: "legend" }, there.map((each) => el("span", { title: SAYS[each.verdict] },
      el("i", { class: `v-${kind(each.verdict)} v-${each.verdict.replace(/[^a-z]/g, "")}` }), `${count(each.many)} ${each.verdict}`, el("small", null, ` ${part(each.many, all)}`))));
    return el("div", { class: "spread" }, bar, legend);
  }

  function leftOut(out, most) {
    if (!out) return null;
    const rest = out.more ? el("p", { class: "muted" }, `… and ${count(out.more)} more of ${count(out.more_groups)} other bricks.`) : null;
    return el("div", { class: "leftout" },
      notice("warn", `${count(out.count)} more verdicts are not listed: a page holds ${count(most)} of them, those that matter most first, in the order of execution. The rest is counted here by brick; the saved report holds every one.`),
      table({ label: "Verdicts that are not listed", noun: "bricks", rows: out.groups, text: (row) => `${row[0]} ${row[1]}`, sort: { at: 2, down: true }, columns: [
        { title: "Brick", left: true, value: (row) => row[0], show: (row) => el("span", { class: "mono", title: plain(row[0]) }, name(row[0], 44)) },
        { title: "Verdict", left: true, value: (row) => row[1], show: (row) => chip(row[1]) },
        { title: "Not listed", value: (row) => row[2], show: (row) => count(row[2]) } ] }).node, rest);
  }

  function build(body, data) {
    const view = data.verdicts, rows = rowsOf(view.rows, data.texts, view.order);
    const some = (key) => rows.some((row) => row[key] !== null && row[key] !== undefined);
    const sign = data.estimated ? "≈ " : "";
    const hint = data.estimated || null;
    const columns = [
      { title: "Brick", left: true, className: "name", value: (row) => row.name, show: (row) => el("span", { class: "mono", title: plain(row.name ?? "") }, name(row.name ?? "")) },
      { title: "Verdict", left: true, first: "up", value: (row) => row.rank, show: (row) => chip(row.verdict) },
      some("op") && { title: "Op", left: true, narrow: false, value: (row) => row.op, show: (row) => el("span", { class: "mono" }, name(row.op ?? "", 28)) },
      some("layer_idx") && { title: "Layer", first: "up", narrow: false, value: (row) => row.layer_idx },
      some("position") && { title: "Call", first: "up", value: (row) => row.position === null ? null : row.position + row.ordinal / 1e6, show: call },
      rows.some((row) => row.direction !== "forward") && { title: "Pass", left: true, narrow: false, value: (row) => row.direction },
      some("z") && { title: "z", hint: "1 is the most that rounding makes", value: (row) => size(row.z), show: (row) => ratio(row.z) },
      some("local_error") && { title: `${sign}Local error`, hint: hint || "what it adds to its inputs' error, relative L2", value: (row) => size(row.local_error), show: (row) => error(row.local_error) },
      some("propagated_error") && { title: `${sign}Output error`, hint: hint || "its output against the other side's, relative L2", value: (row) => size(row.propagated_error), show: (row) => error(row.propagated_error) },
      { title: "Order", hint: "the order of execution", first: "up", narrow: false, value: (row) => row.row, show: (row) => count(row.row + 1) },
    ].filter(Boolean);
    const present = view.order.filter((verdict) => rows.some((row) => row.verdict === verdict));
    const choices = present.length > 1 ? present.map((verdict) => ({ label: verdict, test: (row) => row.verdict === verdict })) : null;
    body.append(strip(view) || notice("info", "The report holds no verdicts."));
    if (!rows.length) { if (view.counts.some(Boolean)) body.append(notice("info", "Every verdict is identical or rounding: there is nothing to list.")); return; }
    const listed = table({ label: "Verdicts", noun: "verdicts", rows, columns, choices, open: pairs, sort: { at: 1, down: false },
      text: (row) => [row.name, row.reference_name, row.brick, row.op, row.verdict, row.direction, row.layer_idx === null ? "" : `layer ${row.layer_idx}`].join(" ") });
    brickline.verdicts.find = (text) => { listed.filter(text); document.getElementById("verdicts").scrollIntoView(); };
    body.append(listed.node, leftOut(view.left_out, view.most) || "");
  }
  const size = (value) => value === null ? null : Number.isNaN(value) ? Infinity : value;

  return { rowsOf, build, chip, kind, error, ratio, about, number, name, call, find: null };
})();
