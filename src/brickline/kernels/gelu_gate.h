// y[i] = gelu(gate[i]) * up[i]. TILE elements a block. gelu(g) is g times the normal distribution
// up to g where EXACT is 1, else its form by tanh: g / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) *
// (g + 0.044715 g^3), which is g / (1 + exp(-2 u)).

BRICKLINE void gelu_gate(Block& block, const Element* gate, const Element* up, Element* y,
                         int64_t n) {
    const int64_t first = block.index() * TILE;
    block.each(minimum<int64_t>(TILE, n - first), [&](int64_t i) {
        const float g = float(gate[first + i]);
#if EXACT
        const float active = g * normal_share(g);
#else
        const float u = 0.79788456f * fma(0.044715f * g * g, g, g);
        const float active = g / (1.0f + exp(-2.0f * u));
#endif
        y[first + i] = Element(active * float(up[first + i]));
    });
}
