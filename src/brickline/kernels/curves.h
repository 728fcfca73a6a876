// Functions made of exp and operations that round alike everywhere, so that kernels which use them
// have the same bits on every device.

// The hyperbolic tangent, within three units in the last place.
BRICKLINE float tangent(float x) {
    const float size = fabs(x);
    const float z = x * x;
    float near = -5.70498872745e-3f;
    near = fma(near, z, 2.06390887954e-2f);
    near = fma(near, z, -5.37397155531e-2f);
    near = fma(near, z, 1.33314422036e-1f);
    near = fma(near, z, -3.33332819422e-1f);
    near = fma(near * z, x, x);
    const float far = 1.0f - 2.0f / (exp(2.0f * size) + 1.0f);
    return size < 0.625f ? near : x < 0.0f ? -far : far;
}

// The normal distribution up to x, within 3e-7 of itself in either tail: half of erfc(-x / sqrt 2),
// by the Chebyshev fit of W. Press et al., with the square's own rounding error put back.
BRICKLINE float normal_share(float x) {
    const float size = minimum(fabs(x), 15.0f);  // beyond it the tail is zero
    const float z = size * 0.70710678f;
    const float lost = fma(size, 0.70710678f, -z) + size * 1.21016171e-08f;
    const float t = 1.0f / fma(0.5f, z, 1.0f);
    float fit = 0.17087277f;
    fit = fma(fit, t, -0.82215223f);
    fit = fma(fit, t, 1.48851587f);
    fit = fma(fit, t, -1.13520398f);
    fit = fma(fit, t, 0.27886807f);
    fit = fma(fit, t, -0.18628806f);
    fit = fma(fit, t, 0.09678418f);
    fit = fma(fit, t, 0.37409196f);
    fit = fma(fit, t, 1.00002368f);
    fit = fma(fit, t, -1.26551223f);
    const float square = z * z;
    const float rest = fma(z, z, -square) + 2.0f * z * lost;
    const float tail = 0.5f * t * (exp(-square) * exp(fit - rest));
    return x < 0.0f ? tail : 1.0f - tail;
}
