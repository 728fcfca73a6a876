// y[i] = gate[i] / (1 + exp(-gate[i])) * up[i]. TILE elements a block.

BRICKLINE void silu_gate(Block& block, const Element* gate, const Element* up, Element* y,
                         int64_t n) {
    const int64_t first = block.index() * TILE;
    block.each(minimum<int64_t>(TILE, n - first), [&](int64_t i) {
        const float g = float(gate[first + i]);
        y[first + i] = Element(g / (1.0f + exp(-g)) * float(up[first + i]));
    });
}
