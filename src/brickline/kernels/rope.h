// y[r, h] = x[r, h] turned by position + r, for rows of heads; in place where IN_PLACE is 1. A
// block a head of a row: a lane has a pair, and nothing waits for anything.

#if IN_PLACE
BRICKLINE void rope(Block& block, Element* y, const float* rates, int64_t rows, int64_t heads,
                    int64_t dim, int64_t position) {
    const Element* const x = y;
#else
BRICKLINE void rope(Block& block, const Element* x, const float* rates, Element* y, int64_t rows,
                    int64_t heads, int64_t dim, int64_t position) {
#endif
    const int64_t at = block.index() * dim;
    rotate(block, x + at, rates, y + at, dim, position + block.index() / heads, 1);
}
