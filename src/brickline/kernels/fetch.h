// Memory asked for ahead, so that it is on its way while a block does something else.

// Asks for `rows` rows of n elements where they are aligned as vectors are. One CPU thread does
// not: its processor looks ahead by itself, and nothing else is under way.
template <class T>
BRICKLINE void fetch_rows(Block& block, const T* from, int64_t rows, int64_t n) {
    constexpr int64_t PIECE = platform::PREFETCH_BYTES / sizeof(T);
    if (platform::ONE_THREAD || n % WIDEST<T> != 0) return;
    const int64_t count = rows * n;
    block.each((count + PIECE - 1) / PIECE, [&](int64_t i) {
        const int64_t left = minimum(PIECE, count - i * PIECE);
        platform::prefetch(from + i * PIECE, static_cast<uint32_t>(left * sizeof(T)));
    });
}
