// y = w @ (rms_norm(x) * weight), bit for bit rms_norm followed by gemv. A block norms the vector
// for itself, then a group of 32 lanes takes a row at a time, a block ROWS rows.
//
// One launch less, and no round trip of the normed vector: of a matrix of 2048 rows the norm would
// take as long as the product.

BRICKLINE void norm_gemv(Block& block, const Element* w, const Element* x, const Element* weight,
                         Output* y, int64_t m, int64_t n, float eps) {
    const int64_t first = block.index() * ROWS;
    const int64_t rows = minimum<int64_t>(ROWS, m - first);
    const Element* const vector = normed(block, x, weight, n, eps);
    if (vector == nullptr) return;
    block.products(w, first, rows, n, vector, [&](Group& group, int64_t row, float sum) {
        group.once([&] { y[row] = Output(sum); });
    });
}
