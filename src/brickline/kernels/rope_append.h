// One token's queries are turned in place, its keys turned into the cache, its values copied there:
// rope of q, rope of k and kv_append in one launch, with the same bits.
//
// qkv has `heads` heads of queries, then kv_heads of keys, then kv_heads of values; keys and values
// stay in it as they are. A block a head. The caches are those of kv_append.h. A position beyond
// the capacity records FAULT_CAPACITY, and the caches stay as they are.

BRICKLINE void rope_append(Block& block, Element* qkv, const float* rates, Element* k_cache,
                           Element* v_cache, int64_t heads, int64_t kv_heads, int64_t dim,
                           int64_t capacity, int64_t position) {
    const int64_t head = block.index();
    Element* const x = qkv + head * dim;
    if (head < heads) {
        rotate(block, x, rates, x, dim, position, 1);
    } else if (position >= capacity) {
        block.fault(FAULT_CAPACITY);
    } else if (head < heads + kv_heads) {
        rotate(block, x, rates, k_cache + ((head - heads) * capacity + position) * dim, dim,
               position, 1);
    } else {
        Element* const to = v_cache + ((head - heads - kv_heads) * capacity + position) * dim;
        block.each(dim, [&](int64_t i) { to[i] = x[i]; });
    }
}
