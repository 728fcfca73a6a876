"use strict";
// brickline.findings: one card for each finding, with all that the report knows of it.
brickline.findings = (() => {
  const { el, plain, count, percent, copyButton, notice, known } = brickline;
  const { chip, ratio, about, number, call, kind } = brickline.verdicts;
  const AT_ONCE = 12;
  const WORDS = { z: "z", local_error: "local error", propagated_error: "output error", share: "share", where: "where", cause: "cause", repro: "repro" };

  /** Text that can be selected, with a button that copies it. */
  function command(text, note) {
    return el("div", { class: "command" }, el("pre", { tabindex: "0", "aria-label": "Command" }, el("code", null, plain(text))), copyButton(text), note ? el("small", null, note) : null);
  }

  function shareBar(share) {
    const part = Math.max(0, Math.min(1, share));
    return el("span", { class: "share", role: "img", "aria-label": percent(share) }, el("i", { style: { width: `${100 * part}%` } }));
  }

  function figuresOf(finding) {
    const note = finding.estimated ? ", estimated" : "";
    const z = number(finding.z), share = number(finding.share);
    return [
      z === null ? null : ["z", ratio(z), "1 is the most that rounding makes"],
      finding.local_error === null ? null : ["Local error", about(number(finding.local_error), finding.estimated), `added to its inputs' error${note}`],
      finding.propagated_error === null ? null : ["Output error", about(number(finding.propagated_error), finding.estimated), `against the other side${note}`],
      finding.share_text === null ? null : ["Share", finding.share_text, known(share) ? shareBar(share) : null, "of the final difference goes when it is repaired"],
    ].filter(Boolean);
  }

  function card(finding, at) {
    const place = [finding.layer_idx === null ? null : `layer ${finding.layer_idx}`, call(finding) === "" ? null : `call ${call(finding)}`,
      finding.op && finding.op !== finding.name && finding.op !== "output" ? finding.op : null, finding.direction === "forward" ? null : finding.direction].filter(Boolean);
    const lines = [["Where", finding.where], ["Source", finding.source], ["Or it is", finding.alternatives], ["All that share it", finding.members], ["Held to", finding.held_to && finding.held_to !== finding.name ? finding.held_to : null], ["Brick", finding.brick],
      ["Note", finding.reason && !finding.missing.length ? finding.reason : null]].filter(([, text]) => text);
    return el("article", { class: `card finding ${kind(finding.verdict)}`, id: `finding-${at + 1}`, "aria-label": `Finding ${at + 1}` },
      el("header", null, el("span", { class: "rank", "aria-hidden": "true" }, String(at + 1)), el("div", null,
        el("h3", { class: "mono" }, plain(finding.name)), el("p", { class: "muted" }, place.map(plain).join(" · "))), chip(finding.verdict)),
      finding.cause ? el("p", { class: "cause" }, plain(finding.cause)) : null,
      el("dl", { class: "measures" }, figuresOf(finding).map(([title, value, ...notes]) => el("div", null, el("dt", null, title), el("dd", null, value), notes.filter(Boolean).map((note) => el("dd", { class: "note" }, note))))),
      lines.length ? el("dl", { class: "pairs" }, lines.map(([title, text]) => [el("dt", null, title), el("dd", null, plain(text))])) : null,
      finding.repro ? el("div", { class: "repro" }, el("p", { class: "label" }, "See it alone"), command(finding.repro, "It contains weights and inputs.")) : null,
      finding.missing.length ? el("p", { class: "missing" }, el("b", null, `Not known: ${finding.missing.map((each) => WORDS[each]).join(", ")}. `), plain(finding.why_missing)) : null,
      finding.facts.length ? el("details", null, el("summary", null, `${count(finding.facts.length)} measured facts`),
        el("dl", { class: "pairs" }, finding.facts.map(([key, value]) => [el("dt", null, plain(key)), el("dd", null, plain(value))]))) : null);
  }

  function build(body, data) {
    const all = data.findings;
    const cards = el("div", { class: "cards" }, all.slice(0, AT_ONCE).map(card));
    body.append(cards);
    if (all.length > AT_ONCE) {
      const more = el("button", { type: "button", class: "more", onclick: () => { more.remove(); cards.append(...all.slice(AT_ONCE).map((each, at) => card(each, at + AT_ONCE))); } },
        `Show ${count(all.length - AT_ONCE)} more findings`);
      body.append(more);
    }
    if (data.findings_count > all.length) body.append(notice("warn", `The first ${count(all.length)} of ${count(data.findings_count)} findings have a card; the saved report holds every one.`));
  }

  return { build, command };
})();
