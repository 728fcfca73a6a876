// The largest of every TILE elements of a row, and the first place that has it; argmax_combine
// takes it from there. A NaN is larger than any number. A block a tile: once for the largest, once
// more, from the cache, for its place.

BRICKLINE void argmax_tiles(Block& block, const Element* x, float* largest, int32_t* places,
                            int64_t rows, int64_t n) {
    const int64_t tiles = (n + TILE - 1) / TILE;
    const int64_t first = block.index() % tiles * TILE;
    const int64_t count = minimum<int64_t>(TILE, n - first);
    const Element* const in = x + block.index() / tiles * n + first;
    const float top = block.max(count, [&](int64_t i) { return float(in[i]); });
    const int32_t place = block.reduce(
        count, int32_t{0x7fffffff}, [](int32_t a, int32_t b) { return a < b ? a : b; },
        [&](int64_t i) {
            const float value = float(in[i]);
            const bool is_top = value == top || (value != value && top != top);
            return is_top ? static_cast<int32_t>(i) : int32_t{0x7fffffff};
        });
    block.once([&] {
        largest[block.index()] = top;
        places[block.index()] = static_cast<int32_t>(first) + place;
    });
}
