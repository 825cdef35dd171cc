/* Inner loops of span attention, for a group of M query vectors that read the same keys.
 *
 * Every sum runs over the keys one by one from key 0 (over the dimensions from 0 for a score), in
 * its own accumulator: neither M, nor how many tiles pass at once, nor who else reads them changes
 * a bit of it.
 */
#ifndef SF_ATTEND_H
#define SF_ATTEND_H

#include "vmath.h"

#define SF_UNROLL _Pragma("GCC unroll 32")
#if SF_MAX_ROWS == 8
#define SF_GROUP 8         /* most vectors of a group */
#define SF_TILES 2         /* tiles of 16 keys scored at once */
#define SF_ACCUMULATORS 16 /* that fit the registers beside what a mix reads */
#define SF_EACH_M(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#else
#define SF_GROUP 4
#define SF_TILES 1
#define SF_ACCUMULATORS 6
#define SF_EACH_M(X) X(1) X(2) X(3) X(4)
#endif

/* K or V of a bf16 tile (layouts in native.h) as that of an f32 tile. */
static inline void sf_widen(const uint8_t *tile, int n, float *to) {
    const uint16_t *from = (const uint16_t *)tile;
    for (int i = 0; i < n / 2 * 32; i += 32) {
        vi pair = vb_load(from + i);
        vf_store(to + i, vb_even(pair));
        vf_store(to + i + 16, vb_odd(pair));
    }
}

/* Raw scores of T tiles, s [T][M][16], for q [n][M]. `ahead`: the tiles that will be read next. */
SF_INLINE void sf_score(const int M, const int T, const int bf16, const float *q,
                        const uint8_t *const *tile, const uint8_t *const *ahead, int n, float *s) {
    vf acc[SF_GROUP * SF_TILES];
    const uint8_t *from[SF_TILES];
    SF_UNROLL for (int i = 0; i < M * T; i++) acc[i] = vf_zero();
    SF_UNROLL for (int t = 0; t < T; t++) from[t] = tile[t];
    for (int d = 0; d < n; d += 2, q += 2 * M) {
        vf even[SF_TILES], odd[SF_TILES];
        SF_UNROLL for (int t = 0; t < T; t++) {
            __builtin_prefetch(ahead[t] + 32 * d);
            if (bf16) {
                vi pair = vb_load((const uint16_t *)from[t]);
                even[t] = vb_even(pair);
                odd[t] = vb_odd(pair);
                from[t] += 64;
            } else {
                even[t] = vf_load((const float *)from[t]);
                odd[t] = vf_load((const float *)from[t] + 16);
                from[t] += 128;
            }
        }
        SF_UNROLL for (int m = 0; m < M; m++) {
            vf value = vf_set1(q[m]);
            SF_UNROLL for (int t = 0; t < T; t++)
                acc[t * M + m] = vf_fma(value, even[t], acc[t * M + m]);
        }
        SF_UNROLL for (int m = 0; m < M; m++) {
            vf value = vf_set1(q[M + m]);
            SF_UNROLL for (int t = 0; t < T; t++)
                acc[t * M + m] = vf_fma(value, odd[t], acc[t * M + m]);
        }
    }
    SF_UNROLL for (int i = 0; i < M * T; i++) vf_store(s + 16 * i, acc[i]);
}

/* out[m][16 D] += the sum over `tiles` tiles' keys of s [tiles][M][16] * V[key][16 D]. A key past a
 * tile's size is skipped, not weighted by zero: it may hold anything. */
SF_INLINE void sf_mix(const int M, const int D, const int bf16, const uint8_t *const *tile,
                      const uint8_t *const *ahead, const int32_t *size, int64_t tiles,
                      int64_t offset, const float *s, float *const *out, int column) {
    vf acc[SF_ACCUMULATORS];
    SF_UNROLL for (int m = 0; m < M; m++)
        SF_UNROLL for (int c = 0; c < D; c++) acc[m * D + c] = vf_load(out[m] + column + 16 * c);
    for (int64_t t = 0; t < tiles; t++, s += 16 * M) {
        const uint8_t *values = tile[t] + offset;
        const uint8_t *next = ahead[t] + column / D * 64;
        for (int j = 0; j < size[t]; j += 1 + bf16) {
            vf v[8];
            SF_UNROLL for (int c = 0; c < 1 + bf16; c++) __builtin_prefetch(next + 64 * (j + c));
            SF_UNROLL for (int c = 0; c < D; c++) {
                if (bf16) {
                    vi pair = vb_load((const uint16_t *)values + c * 256 + j * 16);
                    v[c] = vb_even(pair);
                    v[D + c] = vb_odd(pair);
                } else {
                    v[c] = vf_load((const float *)values + c * 256 + j * 16);
                }
            }
            SF_UNROLL for (int half = 0; half < 1 + bf16; half++) {
                if (half && j + 1 >= size[t]) break;
                SF_UNROLL for (int m = 0; m < M; m++) {
                    vf weight = vf_set1(s[16 * m + j + half]);
                    SF_UNROLL for (int c = 0; c < D; c++)
                        acc[m * D + c] = vf_fma(weight, v[half * D + c], acc[m * D + c]);
                }
            }
        }
    }
    SF_UNROLL for (int m = 0; m < M; m++)
        SF_UNROLL for (int c = 0; c < D; c++) vf_store(out[m] + column + 16 * c, acc[m * D + c]);
}

/* largest[m] = the largest of each lane of s [tiles][M][16]. */
SF_INLINE void sf_peaks(const int M, const float *s, int64_t tiles, vf *largest) {
    vf best[SF_GROUP];
    SF_UNROLL for (int m = 0; m < M; m++) best[m] = vf_set1(-__builtin_inff());
    for (int64_t t = 0; t < tiles; t++, s += 16 * M)
        SF_UNROLL for (int m = 0; m < M; m++) best[m] = vf_max(best[m], vf_load(s + 16 * m));
    SF_UNROLL for (int m = 0; m < M; m++) largest[m] = best[m];
}

/* s [tiles][M][16] = exp(s - largest[m]) */
SF_INLINE void sf_powers(const int M, float *s, int64_t tiles, const vf *largest) {
    for (int64_t t = 0; t < tiles; t++, s += 16 * M)
        for (int m = 0; m < M; m++)
            vf_store(s + 16 * m, vf_exp(vf_sub(vf_load(s + 16 * m), largest[m])));
}

/* total[m] = the sums of s [tiles][M][16], whose lanes without a key are zero. */
SF_INLINE void sf_total(const int M, const float *s, int64_t tiles, float *total) {
    float sum[SF_GROUP];
    SF_UNROLL for (int m = 0; m < M; m++) sum[m] = 0.0f;
    for (int64_t t = 0; t < tiles; t++, s += 16 * M)
        for (int j = 0; j < 16; j++) SF_UNROLL for (int m = 0; m < M; m++) sum[m] += s[16 * m + j];
    SF_UNROLL for (int m = 0; m < M; m++) total[m] = sum[m];
}

#endif
