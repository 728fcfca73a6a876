// rope_append and attention_decode of one token in one launch, with the same bits: length is
// position + 1. For CUDA, where a launch costs more than what is computed again: every block turns
// the queries of its head for itself, and the block that has the position turns the key and writes
// key and value into the caches before it reads them. Nobody else reads that row.
//
// qkv has QUERIES * kv_heads heads of queries, then kv_heads of keys, then as many of values, and
// stays as it is. A position beyond the capacity records FAULT_CAPACITY; attention is then that of
// a full cache.

BRICKLINE void rope_attention(Block& block, const Element* qkv, const float* rates,
                              Element* k_cache, Element* v_cache, float* largest, float* total,
                              float* values, int64_t kv_heads, int64_t capacity, int64_t position,
                              float scale) {
    const Part part = part_of(block, largest, total, values);
    const int64_t head = block.index(1);
    const int64_t first = block.index(0) * SPAN;
    if (position >= capacity) block.fault(FAULT_CAPACITY);
    const int64_t count = minimum<int64_t>(SPAN, minimum(position + 1, capacity) - first);
    if (count <= 0) {
        leave_empty(block, part);
        return;
    }
    Element* const keys = k_cache + (head * capacity + first) * DIM;
    Element* const rows = v_cache + (head * capacity + first) * DIM;
    fetch_rows(block, keys, count, DIM);
    fetch_rows(block, rows, count, DIM);
    Element* const q = block.shared<Element>(QUERIES * DIM);
    if (q == nullptr) return;
    const bool is_owner = position < capacity && position - first < SPAN;
    const Element* const queries = qkv + head * QUERIES * DIM;
    const Element* const key = qkv + (kv_heads * QUERIES + head) * DIM;
    const Element* const value = key + kv_heads * DIM;
    const int64_t own = (position - first) * DIM;
    rotate(block, queries, rates, q, DIM, position, QUERIES);
    if (is_owner) {
        rotate(block, key, rates, keys + own, DIM, position, 1);
        block.each(DIM, [&](int64_t i) { rows[own + i] = value[i]; });
    }
    block.sync();
    attend(block, q, keys, rows, count, scale, part);
}
