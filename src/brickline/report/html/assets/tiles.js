"use strict";
// Tiles: mean time by row and column of each level and brick, with the sums at the edges.
(() => {
  const { el, svg, clear, time, count, percent, figure, shorten, plain, section, hover } = brickline;

  function extent(values) { return [Math.min(...values), Math.max(...values)]; }

  /** Count and total of the cells of each row, or of each column. */
  function sums(grid, axis, size) {
    const found = Array.from({ length: size }, () => ({ count: 0, total: 0 }));
    for (const cell of grid.cells) { found[cell[axis]].count += cell[2]; found[cell[axis]].total += cell[3]; }
    return found.map((each) => ({ ...each, mean: each.count ? each.total / each.count : 0 }));
  }

  function draw(grid) {
    const rows = grid.rows.length, columns = grid.columns.length;
    if (!rows) return el("p", { class: "muted" }, "No place of these tiles was kept.");
    const size = Math.max(9, Math.min(34, Math.floor(640 / Math.max(columns, rows, 10)))), left = 54, top = 24, side = 86, foot = rows > 1 ? 64 : 8;
    const wide = left + columns * size + (columns > 1 ? side : 20), high = top + rows * size + foot;
    const [low, most] = extent(grid.cells.map((cell) => cell[3] / cell[2]));
    const warm = (mean) => brickline.heat(most > low ? 0.12 + 0.88 * (mean - low) / (most - low) : 0.4);
    const root = svg("svg", { class: "tiles", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `Mean time of ${count(grid.count)} tiles, ${rows} rows by ${columns} columns, from ${time(low)} to ${time(most)}` });
    const every = (many) => Math.ceil(many * size < 26 * many ? 26 / size : 1);
    grid.columns.forEach((name, at) => { if (at % every(columns) === 0) root.append(svg("text", { x: left + (at + 0.5) * size, y: top - 8, "text-anchor": "middle" }, name)); });
    grid.rows.forEach((name, at) => { if (size >= 12 || at % 3 === 0) root.append(svg("text", { x: left - 8, y: top + (at + 0.5) * size + 4, "text-anchor": "end" }, name)); });
    for (const [row, column, many, total, shortest, longest, gflops] of grid.cells) {
      const node = svg("rect", { x: left + column * size + 0.5, y: top + row * size + 0.5, width: size - 1, height: size - 1, rx: Math.min(3, size / 6), "data-mean": (total / many).toFixed(1) });
      node.style.fill = warm(total / many);
      node.addEventListener("pointermove", (event) => hover(event.clientX, event.clientY, [`row ${grid.rows[row]}, column ${grid.columns[column]}`, `mean ${time(total / many)}, ${time(shortest)} to ${time(longest)}`, `${count(many)} tiles${gflops ? ` · ${figure(gflops)} GFLOP/s` : ""}`]));
      node.addEventListener("pointerleave", () => hover());
      root.append(node);
    }
    if (columns > 1) margins(root, sums(grid, 0, rows), (at) => ({ x: left + columns * size + 8, y: top + at * size + 1 }), size, "row", grid.rows);
    if (rows > 1) margins(root, sums(grid, 1, columns), (at) => ({ x: left + at * size + 1, y: top + rows * size + 8 }), size, "column", grid.columns);
    return root;
  }

  /** Bars of the mean of each row or column beside the grid. */
  function margins(root, means, place, size, word, names) {
    const most = Math.max(...means.map((each) => each.mean)) || 1;
    means.forEach((each, at) => {
      const { x, y } = place(at), long = Math.max(1, 52 * each.mean / most);
      const thick = Math.min(10, size - 2), off = (size - 2 - thick) / 2, row = word === "row";
      const node = svg("rect", { class: "margin", x: row ? x : x + off, y: row ? y + off : y, width: row ? long : thick, height: row ? thick : long, rx: 2 });
      node.addEventListener("pointermove", (event) => hover(event.clientX, event.clientY, [`${word} ${names[at]}`, `mean ${time(each.mean)} of ${count(each.count)} tiles`]));
      node.addEventListener("pointerleave", () => hover());
      root.append(node);
    });
  }

  function card(grid) {
    return el("div", { class: "card" }, el("h3", { title: plain(grid.owner || "") || null }, `${grid.level} tiles`, grid.owner !== null ? ` of ${shorten(grid.owner, 60)}` : ""),
      el("p", { class: "muted" }, [`${count(grid.count)} tiles${grid.timed < grid.count ? `, ${count(grid.timed)} timed` : ""}`, `mean ${time(grid.avg_us * 1e3)}`, `p50 ${time(grid.p50_us * 1e3)}`, `p99 ${time(grid.p99_us * 1e3)}`, grid.gflops ? `${figure(grid.gflops)} GFLOP/s` : null, grid.peak_share ? `${percent(grid.peak_share)} of the peak` : null].filter(Boolean).join(" · ")),
      el("div", { class: "grid-scroll", tabindex: "0", role: "region", "aria-label": "Tile grid, scrolls" }, draw(grid)),
      grid.past_bound ? el("p", { class: "muted" }, `${count(grid.past_bound)} tiles lie past the bound of places kept apart.`) : null);
  }

  brickline.tilesView = (data) => {
    if (!data.tiles) return;
    const { grids, left_out: left } = data.tiles;
    section({ id: "tiles", title: "Tiles", badge: count(grids.length), lead: "Mean time by tile row and column, the warmest the slowest; bars at the edges are the means of each row and column.", build(body) {
      const place = el("div");
      const show = (at) => clear(place).append(card(grids[at]));
      if (grids.length > 1) {
        const select = el("select", { "aria-label": "Which tiles", onchange: () => show(select.selectedIndex) }, grids.map((grid) => el("option", null, `${grid.level}${grid.owner !== null ? ` · ${shorten(grid.owner, 50)}` : ""} · ${time(grid.total_ns)}`)));
        body.append(el("div", { class: "bar" }, select, left ? el("span", { class: "said" }, `${count(left)} more are left out`) : null));
      }
      body.append(place);
      show(0);
    } });
  };
})();
