"use strict";
// Share by category or brick and layer, as a heat map with its sums at the edges.
(() => {
  const { el, clear, percent, shorten, plain, section, hover } = brickline;
  const STEPS = 5;

  /** A mix between two neighbouring colours of the scale, for a share of the largest. */
  brickline.heat = (part) => {
    const place = Math.max(0, Math.min(1, part)) * (STEPS - 1), low = Math.min(STEPS - 2, Math.floor(place));
    return `color-mix(in oklab, var(--heat-${low}), var(--heat-${low + 1}) ${Math.round(100 * (place - low))}%)`;
  };

  function grid(data, of, noun) {
    const { rows, cells } = data.heat[of];
    const columns = data.heat.columns;
    const most = Math.max(...cells.flat());
    const sums = columns.map((_, column) => cells.reduce((sum, row) => sum + row[column], 0));
    const crowded = columns.length > 17;
    const say = (column) => column === "no layer" ? "no layer" : `layer ${column}`;
    const cell = (share, row, column, top) => {
      const part = share > 0 && top ? Math.max(0.06, share / top) : 0;
      return el("td", { class: part > 0.77 ? "warm strong" : part > 0.61 ? "warm" : null, style: { "--cell": brickline.heat(part) }, "data-row": row, "data-column": column, "aria-label": `${percent(share, 2)}` },
        crowded || share < 0.0005 ? "" : (100 * share).toFixed(1));
    };
    const mostSum = Math.max(...sums);
    const table = el("table", { class: `heat ${crowded ? "crowded" : ""}`, "aria-label": `Share of brick time by ${noun} and layer` },
      el("thead", null, el("tr", null, el("th", { scope: "col", class: "left" }, noun === "category" ? "Category" : "Brick"), columns.map((column, at) => el("th", { scope: "col", class: crowded && at % Math.ceil(columns.length / 16) && column !== "no layer" ? "quiet" : null }, column === "no layer" ? "none" : column)), el("th", { scope: "col", class: "sum" }, "All"))),
      el("tbody", null,
        rows.map((name, row) => el("tr", null, el("th", { scope: "row", title: name.length > 26 ? plain(name) : null }, shorten(name, 26)),
          cells[row].map((share, column) => cell(share, row, column, most)),
          el("td", { class: "sum" }, percent(cells[row].reduce((sum, share) => sum + share, 0))))),
        el("tr", { class: "sums" }, el("th", { scope: "row" }, "All"), sums.map((share, column) => cell(share, -1, column, mostSum)), el("td", { class: "sum" }, percent(sums.reduce((sum, share) => sum + share, 0))))));
    table.addEventListener("pointermove", (event) => {
      const at = event.target.closest("td[data-row]");
      if (!at) { hover(); return; }
      const row = Number(at.dataset.row), column = Number(at.dataset.column);
      const share = row < 0 ? sums[column] : cells[row][column];
      hover(event.clientX, event.clientY, [row < 0 ? "all" : shorten(rows[row], 40), say(columns[column]), `${percent(share, 2)} of all brick time`]);
    });
    table.addEventListener("pointerleave", () => hover());
    return el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": `Heat map by ${noun}, scrolls` }, table);
  }

  function bars(data) {
    return el("div", { class: "category-bar", role: "img", "aria-label": data.categories.map((each) => `${each.name} ${percent(each.share)}`).join(", ") },
      data.categories.filter((each) => each.share > 0).map((each) => el("span", { style: { "flex-grow": each.share, background: `var(--${brickline.categoryColour(each.name)})` }, title: `${each.name}: ${percent(each.share)}` })));
  }

  brickline.heatView = (data) => {
    if (!data.bricks.length) return;
    section({ id: "layers", title: "Categories and layers", label: "Layers", badge: data.heat ? String(data.heat.layers) : null,
      lead: data.heat ? "Each cell is a share of all brick time, the warmest the largest of the grid." : null, build(body) {
        body.append(bars(data), el("p", { class: "legend" }, data.categories.map((each) => el("span", null, el("i", { style: { background: `var(--${brickline.categoryColour(each.name)})` } }), `${each.name} `, el("b", null, percent(each.share))))));
        if (!data.heat) { body.append(el("p", { class: "muted" }, "No brick of this run names a layer: give layer= to profiler.brick to see them apart.")); return; }
        const place = el("div");
        const show = (of) => clear(place).append(grid(data, of, of === "categories" ? "category" : "brick"));
        const buttons = [["categories", "By category"], ["bricks", "By brick"]].map(([of, label]) => el("button", { type: "button", "aria-pressed": String(of === "categories"), onclick: (event) => {
          buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === event.currentTarget)));
          show(of);
        } }, label));
        body.append(el("div", { class: "choices heat-choices", role: "group", "aria-label": "Rows of the heat map" }, buttons), place);
        show("categories");
      } });
  };
})();
