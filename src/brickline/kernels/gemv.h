// y[r] = sum over i of w[r, i] * x[i], in float. A group of 32 lanes takes a row at a time, a block
// ROWS rows.
//
// The weights pass once, in accesses of 16 bytes, four of them under way in each lane; x stays in
// the cache. Nothing stands in front of the first weights: no shared memory, no barrier.

BRICKLINE void gemv(Block& block, const Weight* w, const Input* x, Output* y, int64_t m,
                    int64_t n) {
    const int64_t first = block.index() * ROWS;
    const int64_t rows = minimum<int64_t>(ROWS, m - first);
    block.products(w, first, rows, n, x, [&](Group& group, int64_t row, float sum) {
        group.once([&] { y[row] = Output(sum); });
    });
}
