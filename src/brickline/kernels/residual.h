// y[i] = a[i] + b[i]. TILE elements a block.

BRICKLINE void residual(Block& block, const Element* a, const Element* b, Element* y, int64_t n) {
    const int64_t first = block.index() * TILE;
    block.each(minimum<int64_t>(TILE, n - first), [&](int64_t i) {
        y[first + i] = Element(float(a[first + i]) + float(b[first + i]));
    });
}
