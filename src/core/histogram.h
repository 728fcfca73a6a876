// Buckets of a base-2 exponential histogram at scale 4: bucket i holds (2^(i/16), 2^((i+1)/16)].
// The edges are those of OpenTelemetry and of Prometheus native histograms, so counts convert
// exactly. Knows nothing but numbers.
#pragma once

#include <cstdint>

#include "brickline/abi.h"

namespace brickline {

namespace histogram_detail {
// thresholds[k] = floor(2^(k/16) * 2^63): the edge k sixteenths into an octave, normalised.
extern const uint64_t thresholds[17];
// first[s]: how many edges lie at or below the start of the s-th of 64 slices of an octave. A slice
// is narrower than any gap between edges, so one comparison finishes the search.
extern const uint8_t first[64];
}  // namespace histogram_detail

// Index of the bucket of a positive duration, clamped to the last; -1 is (2^(-1/16), 1], 1 ns.
inline int bucket_index(uint64_t ns) {
    using namespace histogram_detail;
    const int octave = 63 - __builtin_clzll(ns);
    const uint64_t normal = ns << (63 - octave);
    const unsigned base = first[(normal >> 57) & 63];
    const int within = int(base) + (normal > thresholds[base + 1]);
    // A power of two closes the bucket below it.
    const int index = (normal & (normal - 1)) == 0 ? octave * 16 - 1 : octave * 16 + within;
    return index < int(HIST_BINS) - 1 ? index : int(HIST_BINS) - 2;
}

// Position of a bucket among the stored bins: index -1 is bin 0.
inline uint32_t bin_of(uint64_t ns) { return uint32_t(bucket_index(ns) + 1); }

}  // namespace brickline
