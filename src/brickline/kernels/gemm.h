// y[r, c] = sum over i of x[r, i] * w[c, i], plus bias[c] where BIAS is 1, accumulated in float.
// For few rows of x, up to 64 or so: weights pass once from memory.
//
// Block (b, t) takes ROWS rows of w and COLUMNS rows of x, four of them at a time, a group of 32
// lanes one row of w; both stay in the nearest cache meanwhile. On CUDA the four rows of x meet
// each vector of weights while it is in registers. Every sum has the order of Group::dot, so each
// row of y is bit for bit what gemv gives of that row of x (without bias).

struct Four {
    float of[4];
};

// The products of a row of weights with four rows of x, each n apart.
BRICKLINE Four products(Group& group, int64_t n, const Weight* w, const Input* x) {
    constexpr int W = WIDEST<Weight>;
    const auto add = [](const Four& a, const Four& b) {
        return Four{{a.of[0] + b.of[0], a.of[1] + b.of[1], a.of[2] + b.of[2], a.of[3] + b.of[3]}};
    };
    return group.reduce_vector<W>(n, Four{}, add, [&](Vector<Four, W>& sums, int64_t i) {
        const Vector<Weight, W> weights = load<W>(w + i);
        BRICKLINE_UNROLL
        for (int r = 0; r < 4; ++r) {
            const Vector<Input, W> values = load<W>(x + r * n + i);
            BRICKLINE_UNROLL
            for (int k = 0; k < W; ++k)
                sums[k].of[r] = sums[k].of[r] + float(weights[k]) * float(values[k]);
        }
    });
}

#if BIAS
BRICKLINE void gemm(Block& block, const Input* x, const Weight* w, const Output* bias, Output* y,
                    int64_t m, int64_t n, int64_t k) {
    const auto result = [&](float sum, int64_t c) { return Output(sum + float(bias[c])); };
#else
BRICKLINE void gemm(Block& block, const Input* x, const Weight* w, Output* y, int64_t m, int64_t n,
                    int64_t k) {
    const auto result = [&](float sum, int64_t) { return Output(sum); };
#endif
    const int64_t first = block.index(0) * ROWS;
    const int64_t top = block.index(1) * COLUMNS;
    const int64_t end = minimum<int64_t>(top + COLUMNS, m);
    const int64_t rows = minimum<int64_t>(ROWS, n - first);
    for (int64_t r = top; r < end; r += 4) {
        const int64_t count = minimum<int64_t>(4, end - r);
        block.groups(rows, [&](Group& group, int64_t place) {
            const int64_t c = first + place;
            if (!platform::ONE_THREAD && count == 4 && k % WIDEST<Weight> == 0) {
                const Four sums = products(group, k, w + c * k, x + r * k);
                group.once([&] {
                    BRICKLINE_UNROLL
                    for (int j = 0; j < 4; ++j) y[(r + j) * n + c] = result(sums.of[j], c);
                });
                return;
            }
            for (int64_t j = 0; j < count; ++j) {
                const float sum = group.dot(k, w + c * k, x + (r + j) * k);
                group.once([&] { y[(r + j) * n + c] = result(sum, c); });
            }
        });
    }
}
