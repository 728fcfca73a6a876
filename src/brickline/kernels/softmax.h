// y[r, i] = e[i] / sum(e) with e[i] = exp(x[r, i] - max(x[r])). One block a row. A row of at most
// KEPT elements keeps its exponentials in shared memory; of a longer one they are computed twice.

BRICKLINE void softmax(Block& block, const Element* x, Element* y, int64_t rows, int64_t n) {
    const Element* in = x + block.index() * n;
    Element* out = y + block.index() * n;
    const float largest = block.max(n, [&](int64_t i) { return float(in[i]); });
    const auto power = [&](int64_t i) { return exp(float(in[i]) - largest); };
    if (n <= KEPT) {
        float* const kept = block.shared<float>(n);
        if (kept == nullptr) return;
        const float total = block.sum(n, [&](int64_t i) { return kept[i] = power(i); });
        const float scale = 1.0f / total;
        block.each(n, [&](int64_t i) { out[i] = Element(kept[i] * scale); });
    } else {
        const float scale = 1.0f / block.sum(n, power);
        block.each(n, [&](int64_t i) { out[i] = Element(power(i) * scale); });
    }
}
