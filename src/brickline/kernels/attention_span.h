// What attention_decode.h and rope_attention.h share: attention of QUERIES heads over up to SPAN
// positions of one head of the caches, which leaves a part for attention_combine.
//
// Three steps, in each of which every lane has loads of 16 bytes under way at once:
//   1. an index for each (position, query) computes a whole score, in 16 partial sums by d % 16;
//   2. a group a query makes exponentials of scores, in shared memory;
//   3. an index for each (part, query, vector of d) sums every PARTS-th position; then the parts
//      are added in ascending order.
// The order of every sum depends on SPAN, PARTS and DIM alone.

constexpr int SUMS = 16;
constexpr int64_t REST = DIM % SUMS;
// Lanes read vectors where heads are aligned to 16 bytes. One CPU thread takes the same sums in
// loops over a whole head, which its compiler turns into vectors.
constexpr int W = REST == 0 ? WIDEST<Element> : 1;
constexpr int COLUMNS = platform::ONE_THREAD ? DIM : W;

BRICKLINE float score_of(const Element* q, const Element* k) {
    float sum[SUMS];
    if constexpr (platform::ONE_THREAD) {
        for (int j = 0; j < SUMS; ++j) {
            float own = 0.0f;
            for (int d = 0; d < DIM - REST; d += SUMS)
                own = fma(float(q[d + j]), float(k[d + j]), own);
            sum[j] = own;
        }
        for (int j = 0; j < REST; ++j)
            sum[j] = fma(float(q[DIM - REST + j]), float(k[DIM - REST + j]), sum[j]);
    } else {
        BRICKLINE_UNROLL
        for (int j = 0; j < SUMS; ++j) sum[j] = 0.0f;
        BRICKLINE_UNROLL
        for (int d = 0; d < DIM; d += W) {
            const Vector<Element, W> a = load<W>(q + d);
            const Vector<Element, W> b = load<W>(k + d);
            BRICKLINE_UNROLL
            for (int j = 0; j < W; ++j) {
                float& own = sum[(d + j) % SUMS];
                own = fma(float(a[j]), float(b[j]), own);
            }
        }
    }
    BRICKLINE_UNROLL
    for (int j = 0; j < 8; ++j) sum[j] = sum[j] + sum[j + 8];
    BRICKLINE_UNROLL
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] + sum[j + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// sum[j] = the sum of power[p] * rows[p, j] over every PARTS-th p from `first` on, for COLUMNS
// columns.
BRICKLINE void weigh(const float* power, const Element* rows, int64_t first, int64_t count,
                     float* sum) {
    if constexpr (platform::ONE_THREAD) {
        for (int j = 0; j < COLUMNS; ++j) sum[j] = 0.0f;
        for (int64_t p = first; p < count; p += PARTS) {
            const Element* const row = rows + p * DIM;
            const float share = power[p];
            BRICKLINE_INDEPENDENT
            for (int j = 0; j < COLUMNS; ++j) sum[j] = fma(share, float(row[j]), sum[j]);
        }
    } else {
        Vector<float, W> own = {};
        BRICKLINE_IN_FLIGHT
        for (int64_t p = first; p < count; p += PARTS) {
            const Vector<Element, W> row = load<W>(rows + p * DIM);
            BRICKLINE_UNROLL
            for (int j = 0; j < W; ++j) own[j] = fma(power[p], float(row[j]), own[j]);
        }
        store<W>(sum, own);
    }
}

// Where a block leaves its part.
struct Part {
    float* largest;
    float* total;
    float* values;
};

// The part of block (s, h), parts of a head side by side.
BRICKLINE Part part_of(Block& block, float* largest, float* total, float* values) {
    const int64_t first = (block.index(1) * block.blocks(0) + block.index(0)) * QUERIES;
    return {largest + first, total + first, values + first * DIM};
}

BRICKLINE void leave_empty(Block& block, const Part& part) {
    block.each(QUERIES * DIM, [&](int64_t i) { part.values[i] = 0.0f; });
    block.each(QUERIES, [&](int64_t i) {
        part.largest[i] = platform::float_of(0xff800000);
        part.total[i] = 0.0f;
    });
}

BRICKLINE void attend(Block& block, const Element* q, const Element* keys, const Element* rows,
                      int64_t count, float scale, const Part& part) {
    float* const scores = block.shared<float>(QUERIES * SPAN);
    float* const sums = block.shared<float>(PARTS * QUERIES * DIM);
    if (scores == nullptr || sums == nullptr) return;

    block.each(count * QUERIES, [&](int64_t i) {
        const int64_t position = i / QUERIES;
        const int64_t query = i % QUERIES;
        float score = scale * score_of(q + query * DIM, keys + position * DIM);
#ifdef SOFT_CAP
        score = float(SOFT_CAP) * tangent(score / float(SOFT_CAP));
#endif
        scores[query * SPAN + position] = score;
    });
    block.sync();

    block.groups(QUERIES, [&](Group& group, int64_t query) {
        float* const row = scores + query * SPAN;
        const float top = group.max(count, [&](int64_t i) { return row[i]; });
        const float sum = group.sum(count, [&](int64_t i) { return row[i] = exp(row[i] - top); });
        group.once([&] {
            part.largest[query] = top;
            part.total[query] = sum;
        });
    });
    block.sync();

    constexpr int64_t PIECES = DIM / COLUMNS;
    block.each(PARTS * QUERIES * PIECES, [&](int64_t i) {
        const int64_t query = i / PIECES % QUERIES;
        weigh(scores + query * SPAN, rows + i % PIECES * COLUMNS, i / (PIECES * QUERIES), count,
              sums + i * COLUMNS);
    });
    block.sync();

    block.each(QUERIES * DIM, [&](int64_t i) {
        float sum = sums[i];
        BRICKLINE_UNROLL
        for (int p = 1; p < PARTS; ++p) sum = sum + sums[p * QUERIES * DIM + i];
        part.values[i] = sum;
    });
}
