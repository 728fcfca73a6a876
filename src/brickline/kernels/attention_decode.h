// Attention of one token's queries over SPAN positions of the caches: block (s, h) takes positions
// s * SPAN up to `length` of head h of the caches, for the QUERIES heads that share it. It leaves
// the largest score, the sum of exp(score - largest), and the values weighted with it, all float;
// attention_combine makes attention of them. score = scale * (q . k), then SOFT_CAP * tanh(score /
// SOFT_CAP) where that is defined.
//
// The grid depends on the capacity alone, so a plan keeps it while `length` grows. A block beyond
// the length reads nothing and leaves an empty part: minus infinity and zeros. A length beyond the
// capacity records FAULT_CAPACITY and is taken as the capacity.

// Asks for the rows of a block; the last one may be on its way to the caches still.
BRICKLINE void attention_decode_ahead(Block& block, const Element*, const Element* k_cache,
                                      const Element* v_cache, float*, float*, float*, int64_t,
                                      int64_t capacity, int64_t length, float) {
    const int64_t first = block.index(0) * SPAN;
    const int64_t count = minimum<int64_t>(SPAN, minimum(length, capacity) - first);
    const int64_t from = (block.index(1) * capacity + first) * DIM;
    fetch_rows(block, k_cache + from, count, DIM);
    fetch_rows(block, v_cache + from, count, DIM);
}

BRICKLINE void attention_decode(Block& block, const Element* q, const Element* k_cache,
                                const Element* v_cache, float* largest, float* total, float* values,
                                int64_t kv_heads, int64_t capacity, int64_t length, float scale) {
    const Part part = part_of(block, largest, total, values);
    const int64_t head = block.index(1);
    const int64_t first = block.index(0) * SPAN;
    if (length > capacity) block.fault(FAULT_CAPACITY);
    const int64_t count = minimum<int64_t>(SPAN, minimum(length, capacity) - first);
    if (count <= 0) {
        leave_empty(block, part);
        return;
    }
    const int64_t from = (head * capacity + first) * DIM;
    attend(block, q + head * QUERIES * DIM, k_cache + from, v_cache + from, count, scale, part);
}
