// y[r, i] = (x[r, i] - mean) / sqrt(variance + eps) * weight[i] + bias[i], with mean and variance
// of row r. One block a row. The variance is that of the differences from the mean, which a second
// pass over the row sums: their squares do not cancel as mean(x^2) - mean^2 does. Float throughout,
// and one rounding at the end.

BRICKLINE void layer_norm(Block& block, const Element* x, const Element* weight,
                          const Element* bias, Element* y, int64_t rows, int64_t n, float eps) {
    const Element* in = x + block.index() * n;
    Element* out = y + block.index() * n;
    const float mean = block.sum(n, [&](int64_t i) { return float(in[i]); }) / float(n);
    const float squares = block.sum(n, [&](int64_t i) {
        const float apart = float(in[i]) - mean;
        return apart * apart;
    });
    const float scale = rsqrt(squares / float(n) + eps);
    block.each(n, [&](int64_t i) {
        out[i] = Element((float(in[i]) - mean) * scale * float(weight[i]) + float(bias[i]));
    });
}
