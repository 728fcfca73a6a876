// What rope.h, rope_append.h and rope_attention.h share: the cosine and sine of an angle, and the
// rotation of heads.
//
// Pairs are (i, i + dim / 2), as Llama has them, or (2 i, 2 i + 1) where INTERLEAVED is 1. Pair i
// turns by position * rates[i] radians. The angle is exact in double, its cosine and sine are
// rounded once to float, and so is each product and their sum: the same bits on every device.

struct Turn {
    float cosine, sine;
};

// Taylor series within a quarter turn around 0: 7e-12 off at most, far below a float's last place.
// The quarters are taken off in two parts of pi / 2, so that an angle of 10^6 loses nothing.
BRICKLINE Turn turn_by(double angle) {
    const double quarters = floor(fma(angle, 0.63661977236758134, 0.5));
    const double near = fma(quarters, -1.5707963267948966, angle);
    const double r = fma(quarters, -6.123233995736766e-17, near);
    const double z = r * r;
    double s = -2.505210838544172e-8;  // -1 / 11!
    s = fma(s, z, 2.7557319223985893e-6);
    s = fma(s, z, -1.984126984126984e-4);
    s = fma(s, z, 8.333333333333333e-3);
    s = fma(s, z, -1.6666666666666666e-1);
    const double sine = fma(s * z, r, r);
    double c = 2.08767569878681e-9;  // 1 / 12!
    c = fma(c, z, -2.755731922398589e-7);
    c = fma(c, z, 2.48015873015873e-5);
    c = fma(c, z, -1.3888888888888889e-3);
    c = fma(c, z, 4.1666666666666664e-2);
    c = fma(c, z, -0.5);
    const double cosine = fma(c, z, 1.0);
    // By bits, without a branch: odd quarters swap the two, and each has two that are negative.
    const uint32_t quarter = static_cast<uint32_t>(static_cast<int64_t>(quarters));
    const uint32_t odd = 0u - (quarter & 1);
    const uint32_t across = platform::bits_of(static_cast<float>(cosine));
    const uint32_t along = platform::bits_of(static_cast<float>(sine));
    const uint32_t x = (across & ~odd) | (along & odd);
    const uint32_t y = (along & ~odd) | (across & odd);
    return {platform::float_of(x ^ (((quarter + 1) & 2) << 30)),
            platform::float_of(y ^ ((quarter & 2) << 30))};
}

// y = x turned, for heads of `dim` elements that lie side by side. x may be y. An odd last element
// is copied.
BRICKLINE void rotate(Block& block, const Element* x, const float* rates, Element* y, int64_t dim,
                      int64_t position, int64_t heads) {
    const int64_t half = dim / 2;
    block.each(heads * half, [&](int64_t pair) {
        const int64_t i = heads == 1 ? pair : pair % half;
        const int64_t at = heads == 1 ? 0 : pair / half * dim;
        const Turn turn = turn_by(static_cast<double>(position) * static_cast<double>(rates[i]));
        const int64_t first = at + (INTERLEAVED ? 2 * i : i);
        const int64_t second = at + (INTERLEAVED ? 2 * i + 1 : half + i);
        const float a = float(x[first]);
        const float b = float(x[second]);
        y[first] = Element(a * turn.cosine - b * turn.sine);
        y[second] = Element(b * turn.cosine + a * turn.sine);
    });
    if (dim % 2 != 0)
        block.each(heads, [&](int64_t i) { y[(i + 1) * dim - 1] = x[(i + 1) * dim - 1]; });
}
