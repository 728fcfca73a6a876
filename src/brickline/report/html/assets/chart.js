"use strict";
// brickline.canvas, scales and ticks: what every drawing needs. It knows nothing of what is drawn.
(() => {
  const { el, onRedraw } = brickline;

  /**
   * A canvas that is sharp on every screen and draws again when the theme or the width changes.
   * `draw(context, width, height)` gets CSS pixels. Returns {node, canvas, redraw, size()}.
   */
  brickline.canvas = ({ label, height, draw, focusable = false, describedBy }) => {
    const canvas = el("canvas", { role: "img", "aria-label": label, tabindex: focusable ? "0" : null, "aria-describedby": describedBy || null });
    const node = el("div", { class: "canvas", style: { height: `${height}px` } }, canvas);
    let asked = false, width = 0, tall = height;
    function redraw() {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => {
        asked = false;
        const box = node.getBoundingClientRect();
        if (!box.width) return;
        const ratio = Math.min(window.devicePixelRatio || 1, 3);
        width = box.width;
        tall = box.height;
        const wide = Math.round(width * ratio), high = Math.round(tall * ratio);
        if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
        const context = canvas.getContext("2d");
        context.setTransform(ratio, 0, 0, ratio, 0, 0);
        context.clearRect(0, 0, width, tall);
        draw(context, width, tall);
      });
    }
    onRedraw(redraw);
    new ResizeObserver(redraw).observe(node);
    return { node, canvas, redraw, size: () => ({ width, height: tall }), setHeight(value) { node.style.height = `${value}px`; redraw(); } };
  };

  /** A colour between two, both as "#rrggbb". */
  brickline.mix = (from, to, part) => {
    const at = (text, place) => parseInt(text.slice(place, place + 2), 16);
    return `#${[1, 3, 5].map((place) => Math.round(at(from, place) * (1 - part) + at(to, place) * part).toString(16).padStart(2, "0")).join("")}`;
  };

  /** Round places between two values, about `many` of them. */
  brickline.ticks = (low, high, many = 6) => {
    const span = high - low;
    if (!(span > 0) || !Number.isFinite(span)) return [];
    const rough = span / Math.max(1, many), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
    return found;
  };

  /** Powers of ten between two positive values. */
  brickline.decades = (low, high) => {
    const found = [];
    for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * (1 + 1e-9); power++) found.push(10 ** power);
    return found;
  };

  /** A scale from values to pixels; `log` for positive values. */
  brickline.scale = (low, high, from, to, log = false) => {
    const place = log ? Math.log10 : (value) => value;
    const first = place(low), span = place(high) - first || 1;
    const scale = (value) => from + (to - from) * (place(value) - first) / span;
    scale.back = (pixel) => { const value = first + span * (pixel - from) / (to - from); return log ? 10 ** value : value; };
    return scale;
  };
})();
