// y[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * weight[i]. One block a row; float throughout, and
// one rounding at the end. The weights are asked for ahead.

BRICKLINE void rms_norm_ahead(Block& block, const Element*, const Element* weight, Element*, int64_t,
                              int64_t n, float) {
    fetch_rows(block, weight, 1, n);
}

BRICKLINE void rms_norm(Block& block, const Element* x, const Element* weight, Element* y,
                        int64_t rows, int64_t n, float eps) {
    constexpr int W = WIDEST<Element>;
    const Element* in = x + block.index() * n;
    Element* out = y + block.index() * n;
    const float scale = rsqrt(squares_of(block, in, n) / float(n) + eps);
    const int64_t whole = n % W == 0 ? n : 0;
    block.each_vector<W>(whole, [&](int64_t i) {
        const Vector<Element, W> a = load<W>(in + i), b = load<W>(weight + i);
        Vector<Element, W> result;
        BRICKLINE_UNROLL
        for (int k = 0; k < W; ++k) result[k] = Element(float(a[k]) * scale * float(b[k]));
        store<W>(out + i, result);
    });
    block.each(n - whole, [&](int64_t i) {
        out[i] = Element(float(in[i]) * scale * float(weight[i]));
    });
}
