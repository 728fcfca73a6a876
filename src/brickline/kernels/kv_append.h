// k_cache[h, position + r] = k[r, h], and v_cache the same of v. A block a head of a row.
//
// The caches are [kv_heads, capacity, dim]: what a block of attention reads of one head then lies
// in one piece, which a CPU prefetches, CUDA loads in whole lines, and two byte numbers describe.
// With positions outermost every row of a head would be a jump, for the sake of one write a token.
// A row beyond the capacity records FAULT_CAPACITY and is left out.

BRICKLINE void kv_append(Block& block, const Element* k, const Element* v, Element* k_cache,
                         Element* v_cache, int64_t rows, int64_t kv_heads, int64_t dim,
                         int64_t capacity, int64_t position) {
    const int64_t head = block.index() % kv_heads;
    const int64_t place = position + block.index() / kv_heads;
    if (place >= capacity) {
        block.fault(FAULT_CAPACITY);
        return;
    }
    const int64_t from = block.index() * dim;
    const int64_t to = (head * capacity + place) * dim;
    block.each(dim, [&](int64_t i) {
        k_cache[to + i] = k[from + i];
        v_cache[to + i] = v[from + i];
    });
}
