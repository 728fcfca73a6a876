// y[r] = table[ids[r]]. A block a row. A token outside of the table records FAULT_TOKEN and its row
// is zeros.

BRICKLINE void embedding(Block& block, const Element* table, const Index* ids, Element* y,
                         int64_t rows, int64_t vocabulary, int64_t n) {
    const int64_t token = ids[block.index()];
    Element* const out = y + block.index() * n;
    if (token < 0 || token >= vocabulary) {
        block.fault(FAULT_TOKEN);
        block.each(n, [&](int64_t i) { out[i] = Element(0.0f); });
        return;
    }
    const Element* const row = table + token * n;
    block.each(n, [&](int64_t i) { out[i] = row[i]; });
}
