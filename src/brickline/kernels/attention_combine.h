// y[h] = the parts of attention_decode of head h, put together: sum(w[s] * values[s]) /
// sum(w[s] * total[s]) with w[s] = exp(largest[s] - max(largest)). A block a head; parts are added
// in ascending order; an empty one has zeros and no weight.

// y[j] = the weighted values over `sum`, for W columns.
constexpr int W = platform::ONE_THREAD ? DIM : 1;
BRICKLINE void add_parts(const float* weights, const float* values, int64_t splits, float sum,
                         Element* y) {
    float value[W];
    for (int j = 0; j < W; ++j) value[j] = 0.0f;
    BRICKLINE_IN_FLIGHT
    for (int64_t s = 0; s < splits; ++s) {
        const float* const part = values + s * QUERIES * DIM;
        for (int j = 0; j < W; ++j) value[j] = fma(weights[s], part[j], value[j]);
    }
    for (int j = 0; j < W; ++j) y[j] = Element(value[j] / sum);
}

BRICKLINE void attention_combine(Block& block, const float* largest, const float* total,
                                 const float* values, Element* y, int64_t kv_heads,
                                 int64_t capacity) {
    const int64_t splits = (capacity + SPAN - 1) / SPAN;
    const int64_t head = block.index() / QUERIES;
    const int64_t first = head * splits * QUERIES + block.index() % QUERIES;
    float* const weights = block.shared<float>(splits);
    if (weights == nullptr) return;
    const float top = block.max(splits, [&](int64_t s) { return largest[first + s * QUERIES]; });
    const float sum = block.sum(splits, [&](int64_t s) {
        const float of_part = total[first + s * QUERIES];
        const float power = exp(largest[first + s * QUERIES] - top);
        const float weight = of_part == 0.0f ? 0.0f : power;
        weights[s] = weight;
        return weight * of_part;
    });
    block.each_vector<W>(DIM, [&](int64_t d) {
        add_parts(weights, values + first * DIM + d, splits, sum, y + block.index() * DIM + d);
    });
}
