/* Philox4x32-10 (Salmon et al., 2011) and the noise made of it, as in surefoot/kernels/noise.py. */
#ifndef SF_PHILOX_H
#define SF_PHILOX_H

#include <math.h>

#include "vec.h"

#define SF_CHUNK 64 /* tokens whose words are made at once */

/* What a row's words depend on besides the token. */
typedef struct {
    uint64_t seed;
    uint32_t position, choice;
} sf_stream;

/* The words of tokens first .. first + 63 in order, 16 a vector; `first` is a multiple of 4. */
SF_INLINE void sf_philox(const sf_stream *stream, int64_t first, vi *words) {
    /* A lane computes four neighbouring tokens; the transposition wants lane 4 l + i to have the
     * four that end up in vector i. */
    static const int32_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const vi m0 = vi_set1((int32_t)0xD2511F53), m1 = vi_set1((int32_t)0xCD9E8D57);
    uint32_t k0 = (uint32_t)stream->seed, k1 = (uint32_t)(stream->seed >> 32);
    vi c0 = vi_add(vi_set1((int32_t)(uint32_t)(first / 4)), vi_load(order));
    vi c1 = vi_set1((int32_t)stream->position), c2 = vi_set1((int32_t)stream->choice);
    vi c3 = vi_zero();
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        vi high0, low0, high1, low1;
        vi_mul_wide(c0, m0, &high0, &low0);
        vi_mul_wide(c2, m1, &high1, &low1);
        c0 = vi_xor(vi_xor(high1, c1), vi_set1((int32_t)k0));
        c2 = vi_xor(vi_xor(high0, c3), vi_set1((int32_t)k1));
        c1 = low1;
        c3 = low0;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
    vi_transpose4(words);
}

/* The Gumbel variate of a word. In double up to the last rounding, so that every C library gives
 * the same float but for a tie of its last bits. */
static inline float sf_gumbel(uint32_t word) {
    float v = ((float)word + 0.5f) * 0x1p-32f;
    if (v > 1 - 0x1p-24f) v = 1 - 0x1p-24f;
    return (float)-log(-log1p(-(double)v));
}

#endif
