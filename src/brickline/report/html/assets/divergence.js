"use strict";
// The page of a divergence report: what comes first, then section by section.
(() => {
  const { el, plain, count, percent, section, start, notice, figures, data: read, known } = brickline;
  const { verdicts, curve, findings } = brickline;
  const data = read();
  const KIND = { matched: "good", diverged: "bad", inconclusive: "warn" };
  const number = verdicts.number;
  const covered = () => data.compared >= data.total ? "100 %" : percent(Math.floor(1000 * data.compared / data.total) / 1000);

  // --- what comes first ---------------------------------------------------------------------
  function masthead() {
    const long = data.headline.length > 90 ? (data.headline.length > 220 ? "longest" : "long") : null;
    return el("div", { class: "masthead" },
      el("p", { class: "roles" }, el("span", { class: `status ${KIND[data.status] || ""}`, id: "status" }, plain(data.status)),
        el("span", null, el("small", null, "candidate"), " ", el("b", { class: "mono" }, plain(data.candidate))), el("small", null, "against"),
        el("span", null, el("small", null, "reference"), " ", el("b", { class: "mono" }, plain(data.reference)))),
      el("h1", { class: long }, plain(data.headline)));
  }

  function answers() {
    return el("dl", { class: "pairs answers" }, data.answers.map((each) => [el("dt", null, el("span", { class: `status ${each.kind}` }, each.question)), el("dd", null, plain(each.text))]));
  }

  const times = (value) => Number(value.toPrecision(2)).toLocaleString("en-US");
  function overview() {
    const others = data.findings_count - data.guilty_count;
    const final = number(data.final_error), floor = number(data.noise_floor), list = [];
    const beyond = known(final) && known(floor) && floor > 0 ? final / floor : null;
    if (final !== null) list.push({ label: data.outputs > 1 ? `Worst of ${count(data.outputs)} outputs differs by` : "Final output differs by", value: verdicts.about(final, data.estimated), note: final === 0 ? "the same to the bit" : `relative L2${data.estimated ? ", estimated from fingerprints" : ""}` });
    if (final !== null || floor !== null) list.push({ label: data.estimated ? "Rounding may grow to" : "Rounding alone makes", value: verdicts.error(floor),
      note: floor === null ? "the report holds no noise floor" : beyond === null ? "the noise floor" : beyond > 1 ? `the difference is ${times(beyond)} times that` : "the difference is no more than that" });
    list.push({ label: "Compared", value: data.total ? covered() : "nothing", note: data.total ? `${count(data.compared)} of ${count(data.total)} ops or launches` : "there was nothing to compare" });
    list.push({ label: "Named guilty", value: count(data.guilty_count), note: others ? `${count(others)} more ${others === 1 ? "finding" : "findings"} below` : data.findings_count ? "every finding" : "no finding at all" });
    return figures(list);
  }

  document.getElementById("main").append(masthead(), el("div", { class: "overview" }, overview()));
  if (data.answers.length) document.getElementById("main").append(answers());
  if (data.texts_cut) document.getElementById("main").append(notice("info", `${count(data.texts_cut)} very long names are cut in their middle on this page.`));

  // --- sections -----------------------------------------------------------------------------
  const lines = (list) => [el("ul", { class: "lines" }, list.lines.map((line) => el("li", null, plain(line)))),
    list.of > list.lines.length ? el("p", { class: "muted" }, `… and ${count(list.of - list.lines.length)} more, in the saved report`) : null];
  const fold = (title, list, open) => list.of ? el("details", { class: "fold", open: open || null }, el("summary", null, `${title} `, el("small", null, count(list.of))), ...lines(list)) : null;

  function why(body) {
    if (data.whys.of) body.append(el("ol", { class: "chain" }, data.whys.lines.map((line) => el("li", null, el("span", null, plain(line))))));
    if (data.whys.of > data.whys.lines.length) body.append(el("p", { class: "muted" }, `… and ${count(data.whys.of - data.whys.lines.length)} more`));
    if (!data.parted.length) return;
    body.append(el("details", { class: "fold parted" }, el("summary", null, "The first launch that parts"), el("div", { class: "sides" }, data.parted.map((each) => el("div", null, el("h3", null, each.side),
      el("dl", { class: "pairs" }, each.pairs.map(([key, value]) => [el("dt", null, key), el("dd", { class: "mono" }, plain(value))])))))));
  }

  function coverage(body) {
    const share = data.total ? data.compared / data.total : 0;
    const rest = data.total - data.compared;
    const card = el("div", { class: "card" },
      el("p", { class: "covered" }, data.total ? `${count(data.compared)} of ${count(data.total)} ops or launches have a verdict` + (rest > 0 ? `; ${count(rest)} have none.` : ".") : "Nothing was compared."),
      el("span", { class: "share wide", role: "img", "aria-label": `${percent(share)} compared` }, el("i", { style: { width: `${100 * Math.min(1, share)}%` } })),
      fold("What could not be observed, or was seen otherwise", data.notes, true), fold("Without a partner on the other side", data.unmatched), fold("Not told apart by their key", data.duplicates));
    body.append(card);
  }

  if (data.whys.of || data.parted.length) section({ id: "why", title: "Why", lead: "From what is seen to what causes it.", build: why });
  if (data.repair.length) section({ id: "repair", title: "Repair", lead: "What makes the difference vanish.", build: (body) => body.append(el("dl", { class: "pairs" }, data.repair.map(([key, value]) => [el("dt", null, plain(key)), el("dd", { class: "mono" }, plain(value))]))) });
  if (data.next_command) section({ id: "next", title: "Next", lead: "What would prove it, or show more.", build: (body) => body.append(findings.command(data.next_command)) });
  if (data.findings_count) section({ id: "findings", title: "Findings", badge: count(data.findings_count), lead: "Ranked: what explains most of the final difference first.", build: (body) => findings.build(body, data) });
  if (data.depth.curves.length) section({ id: "depth", title: "Error over depth", lead: ["In the order of execution, on a logarithmic scale.", data.estimated].filter(Boolean).join(" "), build: (body) => curve.build(body, data) });
  section({ id: "verdicts", title: "Verdicts", badge: count(data.verdicts.told), lead: ["Every verdict but identical and rounding, which are counted.", data.estimated].filter(Boolean).join(" "), build: (body) => verdicts.build(body, data) });
  section({ id: "coverage", title: "Coverage", badge: data.total ? covered() : "0", build: coverage });
  if (data.circumstances.of) section({ id: "circumstances", title: "Circumstances", badge: count(data.circumstances.of), lead: "In what the two sides differ: facts, never verdicts.", build: (body) => body.append(el("div", { class: "card" }, ...lines(data.circumstances).filter(Boolean))) });
  brickline.addKey("← →", "choose a brick on the curve");
  start({ first: 3 });
})();
