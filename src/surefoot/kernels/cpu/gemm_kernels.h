/* Register tiles: R rows by P panels of 16 outputs, each output one fixed-order sum over K.
 *
 * The sums of an output do not depend on R, P or on the surroundings: one accumulator per output,
 * K ascending, every rounding an explicit vf_fma or vf_mul. This is what makes a row's result
 * independent of the other rows in a batch.
 */
#ifndef SF_GEMM_KERNELS_H
#define SF_GEMM_KERNELS_H

#include "native.h"

#define SF_UNROLL _Pragma("GCC unroll 32")
#define SF_MAX_PANELS 3
#define SF_AHEAD 4096 /* bytes of weights asked for ahead of their use */

/* Ask for the weights that follow those of P panels in memory, while these are read side by side:
 * every line of memory once, scales included, and early enough when its panel's turn comes. To a
 * second-level cache, because they may fill a first-level one before they are used. */
SF_INLINE const uint8_t *sf_ahead(const int P, const uint8_t *panel, int64_t panel_bytes) {
    return panel + (P - 1) * panel_bytes + SF_AHEAD;
}

SF_INLINE void sf_prefetch(const uint8_t *at, const int bytes) {
    SF_UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* x: the tile's [K][R]. R and P are compile-time constants wherever this is inlined. */
SF_INLINE void sf_tile_f32(const int R, const int P, const uint8_t *panel, int64_t panel_bytes,
                           const float *x, int K, vf *acc) {
    SF_UNROLL for (int i = 0; i < R * P; i++) acc[i] = vf_zero();
    for (int k = 0; k < K; k++) {
        vf w[SF_MAX_PANELS];
        SF_UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *at = panel + p * panel_bytes + (int64_t)k * 64;
            __builtin_prefetch(at + SF_AHEAD);
            w[p] = vf_load((const float *)at);
        }
        SF_UNROLL for (int r = 0; r < R; r++) {
            vf value = vf_set1(x[k * R + r]);
            SF_UNROLL for (int p = 0; p < P; p++)
                acc[r * P + p] = vf_fma(w[p], value, acc[r * P + p]);
        }
    }
}

SF_INLINE void sf_tile_bf16(const int R, const int P, const uint8_t *panel, int64_t panel_bytes,
                            const float *x, int K, vf *acc) {
    SF_UNROLL for (int i = 0; i < R * P; i++) acc[i] = vf_zero();
    for (int k = 0; k < K; k += 2) {
        vi pair[SF_MAX_PANELS];
        vf w[SF_MAX_PANELS];
        SF_UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *at = panel + p * panel_bytes + (int64_t)k * 32;
            __builtin_prefetch(at + SF_AHEAD);
            pair[p] = vb_load((const uint16_t *)at);
        }
        SF_UNROLL for (int p = 0; p < P; p++) w[p] = vb_even(pair[p]);
        SF_UNROLL for (int r = 0; r < R; r++) {
            vf value = vf_set1(x[k * R + r]);
            SF_UNROLL for (int p = 0; p < P; p++)
                acc[r * P + p] = vf_fma(w[p], value, acc[r * P + p]);
        }
        SF_UNROLL for (int p = 0; p < P; p++) w[p] = vb_odd(pair[p]);
        SF_UNROLL for (int r = 0; r < R; r++) {
            vf value = vf_set1(x[k * R + R + r]);
            SF_UNROLL for (int p = 0; p < P; p++)
                acc[r * P + p] = vf_fma(w[p], value, acc[r * P + p]);
        }
    }
}

/* dot[r * P + p] += the integer sums of a block's quants with the rows x [R][32]. */
#ifdef SF_OWN_DOTS
#include SF_OWN_DOTS
#else
SF_INLINE void sf_block_dots(const int q8, const int R, const int P, const uint8_t *panel,
                             int64_t panel_bytes, const int8_t *x, vi *dot) {
    /* 8 consecutive k at a time: two groups of 4 for each lane */
    SF_UNROLL for (int v = 0; v < 4; v++) {
        vw low[SF_MAX_PANELS], high[SF_MAX_PANELS];
        SF_UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *at = panel + p * panel_bytes + v * (q8 ? 128 : 64);
            low[p] = vw_load(at);
            if (q8) {
                high[p] = vw_load(at + 64);
            } else {
                high[p] = vw_high(low[p]);
                low[p] = vw_low(low[p]);
            }
        }
        SF_UNROLL for (int r = 0; r < R; r++) {
            vx first = vx_load(x + 32 * r + 8 * v), second = vx_load(x + 32 * r + 8 * v + 4);
            SF_UNROLL for (int p = 0; p < P; p++) {
                vi *sums = &dot[r * P + p];
                *sums = q8 ? vi_dot255(*sums, low[p], first) : vi_dot15(*sums, low[p], first);
                *sums = q8 ? vi_dot255(*sums, high[p], second)
                           : vi_dot15(*sums, high[p], second);
            }
        }
    }
}
#endif

/* w = d * q + m per block, x = dx * qx: the block adds (d * dx) * (q . qx) + m * (dx * sum(qx)).
 * Where m is a multiple of d (Q4_0: -8 d, Q8_0: -128 d) it goes into the integer sum instead,
 * which is exact. */
SF_INLINE void sf_tile_quant(const int kind, const int R, const int P, const uint8_t *panel,
                             int64_t panel_bytes, const int8_t *x, int blocks, vf *acc) {
    const int q8 = kind == SF_Q8_0, affine = kind == SF_Q4_1;
    const int quant_bytes = q8 ? 512 : 256, halves = affine ? 32 : 16;
    const uint8_t *scales = panel + (int64_t)blocks * quant_bytes;
    SF_UNROLL for (int i = 0; i < R * P; i++) acc[i] = vf_zero();
#ifndef SF_OWN_DOTS
    const int block_bytes = P * (quant_bytes + 2 * halves);
    const uint8_t *ahead = sf_ahead(P, panel, panel_bytes);
#endif
    for (int b = 0; b < blocks; b++) {
#ifndef SF_OWN_DOTS
        sf_prefetch(ahead + (int64_t)b * block_bytes, block_bytes);
#endif
        const float *dx = (const float *)(x + 32 * R), *sum = dx + R;
        const int32_t *offset = (const int32_t *)(sum + R) + (q8 ? R : 0);
        vi dot[SF_MAX_ROWS * SF_MAX_PANELS];
        SF_UNROLL for (int i = 0; i < R * P; i++)
            dot[i] = affine ? vi_zero() : vi_set1(offset[i / P]);
        sf_block_dots(q8, R, P, panel, panel_bytes, x, dot);
        SF_UNROLL for (int p = 0; p < P; p++) {
            const uint16_t *half = (const uint16_t *)(scales + p * panel_bytes);
            vf d = vf_half(half), m = affine ? vf_half(half + 16) : vf_zero();
            SF_UNROLL for (int r = 0; r < R; r++) {
                vf *total = &acc[r * P + p];
                *total = vf_fma(vf_from_vi(dot[r * P + p]), vf_mul(d, vf_set1(dx[r])), *total);
                if (affine) *total = vf_fma(m, vf_set1(sum[r]), *total);
            }
        }
        panel += quant_bytes;
        scales += 2 * halves;
        x += R * 48;
    }
}

#endif
