// What norm_gemv.h and gated_gemv.h share: every block norms the vector for itself.

// rms_norm(x) * weight in shared memory, bit for bit what rms_norm writes: 256 lanes reduce in the
// same order as there, and every element is rounded to its type. Null if it does not fit.
BRICKLINE Element* normed(Block& block, const Element* x, const Element* weight, int64_t n,
                          float eps) {
    Element* const out = block.shared<Element>(n);
    if (out == nullptr) return nullptr;
    const float scale = rsqrt(squares_of(block, x, n) / float(n) + eps);
    block.each(n, [&](int64_t i) { out[i] = Element(float(x[i]) * scale * float(weight[i])); });
    block.sync();
    return out;
}
