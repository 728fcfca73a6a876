// y = silu(gate @ x) * (up @ x); w has `hidden` rows of gate, then as many of up. Bit for bit gemv
// with a result of Element, and silu_gate: both products are rounded to Element before they meet.
//
// A group of 32 lanes takes a row of gate and its row of up, a block PAIRS of them.

BRICKLINE void gated_gemv(Block& block, const Element* w, const Element* x, Element* y,
                          int64_t hidden, int64_t n) {
    const int64_t first = block.index() * PAIRS;
    block.groups(minimum<int64_t>(PAIRS, hidden - first), [&](Group& group, int64_t r) {
        const Element* const gate = w + (first + r) * n;
        const float g = float(Element(group.dot(n, gate, x)));
        const float u = float(Element(group.dot(n, gate + hidden * n, x)));
        group.once([&] { y[first + r] = Element(g / (1.0f + exp(-g)) * u); });
    });
}
