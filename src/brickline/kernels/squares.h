// The sum of x[i]^2 over a row, in vectors where rows are made of them. What rms_norm.h and normed.h
// share.

BRICKLINE float squares_of(Block& block, const Element* x, int64_t n) {
    constexpr int W = WIDEST<Element>;
    if (n % W != 0) return block.sum(n, [&](int64_t i) { return float(x[i]) * float(x[i]); });
    const auto add = [](float a, float b) { return a + b; };
    return block.reduce_vector<W>(n, 0.0f, add, [&](Vector<float, W>& sums, int64_t i) {
        const Vector<Element, W> v = load<W>(x + i);
        BRICKLINE_UNROLL
        for (int k = 0; k < W; ++k) sums[k] = sums[k] + float(v[k]) * float(v[k]);
    });
}
