// y = residual + w @ x, or y += w @ x where IN_PLACE is 1: bit for bit gemv with a result of
// Element, followed by residual. A group of 32 lanes takes a row at a time, a block ROWS rows.

#if IN_PLACE
BRICKLINE void gemv_residual(Block& block, const Element* w, const Element* x, Element* y,
                             int64_t m, int64_t n) {
    const Element* const residual = y;
#else
BRICKLINE void gemv_residual(Block& block, const Element* w, const Element* x,
                             const Element* residual, Element* y, int64_t m, int64_t n) {
#endif
    const int64_t first = block.index() * ROWS;
    const int64_t rows = minimum<int64_t>(ROWS, m - first);
    block.rows(w, first, rows, n, [&](Group& group, int64_t row, Row<Element> weights) {
        const float before = float(residual[row]);  // asked for ahead of the weights
        const float sum = group.dot(n, weights, x);
        group.once([&] { y[row] = Element(before + float(Element(sum))); });
    });
}
