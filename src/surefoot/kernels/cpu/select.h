/* Selection without sorting, for values at or below zero: a value's bits without the sign grow as
 * it falls, so three histograms over 11, 10 and 10 of them find it exactly, in linear time. */
#ifndef SF_SELECT_H
#define SF_SELECT_H

#include "vmath.h"

#define SF_BINS 2048

SF_INLINE uint32_t sf_fall(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits & 0x7fffffffu;
}

/* The largest b such that the values of `list` [n] at or above it weigh `target` together, or the
 * smallest value if all weigh less. `weight` [n] NULL counts them. Both lists are overwritten;
 * n >= 1. Sums run in the order of the list. */
static inline float sf_select(float *list, float *weight, int64_t n, double target, double *bins) {
    double above = 0;
    for (int shift = 20; shift >= 0 && n > 1; shift -= 10) {
        uint32_t last = shift == 20 ? SF_BINS - 1 : 1023, chosen = 0;
        memset(bins, 0, (last + 1) * sizeof *bins);
        for (int64_t i = 0; i < n; i++)
            bins[sf_fall(list[i]) >> shift & last] += weight ? (double)weight[i] : 1.0;
        double before = above;
        for (uint32_t bin = 0; bin <= last; bin++) {
            if (bins[bin] <= 0) continue;
            chosen = bin, above = before;
            before += bins[bin];
            if (before >= target) break;
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            if ((sf_fall(list[i]) >> shift & last) != chosen) continue;
            if (weight) weight[kept] = weight[i];
            list[kept++] = list[i];
        }
        n = kept;
    }
    return list[0];
}

#endif
