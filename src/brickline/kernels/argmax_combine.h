// y[r] = the first place of the largest element of row r, from what argmax_tiles left. A block a
// row.

BRICKLINE void argmax_combine(Block& block, const float* largest, const int32_t* places, Index* y,
                              int64_t rows, int64_t n) {
    const int64_t tiles = (n + TILE - 1) / TILE;
    const int64_t from = block.index() * tiles;
    const float top = block.max(tiles, [&](int64_t i) { return largest[from + i]; });
    const int32_t place = block.reduce(
        tiles, int32_t{0x7fffffff}, [](int32_t a, int32_t b) { return a < b ? a : b; },
        [&](int64_t i) {
            const float value = largest[from + i];
            const bool is_top = value == top || (value != value && top != top);
            return is_top ? places[from + i] : int32_t{0x7fffffff};
        });
    block.once([&] { y[block.index()] = Index(place); });
}
