// y[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * weight[i]. One block a row; float throughout, and
// one rounding at the end.

BRICKLINE void rms_norm(Block& block, const Element* x, const Element* weight, Element* y,
                        int64_t rows, int64_t n, float eps) {
    const Element* in = x + block.index() * n;
    Element* out = y + block.index() * n;
    const float squares = block.sum(n, [&](int64_t i) { return float(in[i]) * float(in[i]); });
    const float scale = rsqrt(squares / float(n) + eps);
    block.each(n, [&](int64_t i) { out[i] = Element(float(in[i]) * scale * float(weight[i])); });
}
