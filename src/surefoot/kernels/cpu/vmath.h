/* exp, silu and RMSNorm. Each is a function of one lane or one row, whatever surrounds it. */
#ifndef SF_VMATH_H
#define SF_VMATH_H

#include "native.h"

/* exp(x) to about 1 ulp for -87 <= x <= 88, clamped outside; exp(0) = 1 exactly.
 * x = n ln 2 + r with |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 p(r), p fitted for the least
 * relative error (3e-9). */
SF_INLINE vf vf_exp(vf x) {
    x = vf_min(vf_max(x, vf_set1(-87.0f)), vf_set1(88.0f));
    vi n = vf_round(vf_mul(x, vf_set1(1.442695041f)));
    vf steps = vf_from_vi(n);
    vf r = vf_fma(steps, vf_set1(-0.693359375f), x); /* exact: 9 bits of ln 2 */
    r = vf_fma(steps, vf_set1(2.12194440e-4f), r);
    vf p = vf_fma(vf_set1(1.3814523e-3f), r, vf_set1(8.368747e-3f));
    p = vf_fma(p, r, vf_set1(4.1668393e-2f));
    p = vf_fma(p, r, vf_set1(1.666652e-1f));
    p = vf_fma(p, r, vf_set1(4.9999994e-1f));
    p = vf_fma(p, vf_mul(r, r), r);
    return vf_mul(vf_add(p, vf_set1(1.0f)), vf_exp2i(n));
}

SF_INLINE vf vf_silu(vf x) {
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), x))));
}

/* Of all lanes, in a fixed tree, the same on every instruction set: lane i with lane i + 8, then
 * i + 4, i + 2, i + 1. */
#ifndef SF_OWN_TREES
SF_INLINE float vf_hsum(vf a) {
    float lane[16];
    vf_store(lane, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

SF_INLINE float vf_hmax(vf a) {
    float lane[16];
    vf_store(lane, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}
#endif

SF_INLINE vf sf_load_upto(const float *p, int left) {
    return left >= 16 ? vf_load(p) : vf_load_n(p, left);
}

/* 16 logits, -inf past the end. */
SF_INLINE vf sf_load_logits(const float *x, int64_t left) {
    float padded[SF_LANES];
    if (left >= SF_LANES) return vf_load(x);
    for (int i = 0; i < SF_LANES; i++) padded[i] = i < left ? x[i] : -__builtin_inff();
    return vf_load(padded);
}

SF_INLINE void sf_store_upto(float *p, vf v, int left) {
    if (left >= 16)
        vf_store(p, v);
    else
        vf_store_n(p, v, left);
}

/* y = x * rsqrt(mean(x^2) + eps) * weight; y may be x. */
static inline void sf_rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int done = 0;
    for (; done + 64 <= n; done += 64)
        for (int j = 0; j < 4; j++) {
            vf v = vf_load(x + done + 16 * j);
            sum[j] = vf_fma(v, v, sum[j]);
        }
    for (int j = 0; j < 4 && done + 16 * j < n; j++) {
        vf v = sf_load_upto(x + done + 16 * j, n - done - 16 * j);
        sum[j] = vf_fma(v, v, sum[j]);
    }
    float total = vf_hsum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
    vf inverse = vf_set1(1.0f / __builtin_sqrtf(total / (float)n + eps));
    for (int i = 0; i < n; i += 16) {
        vf v = vf_mul(sf_load_upto(x + i, n - i), inverse);
        sf_store_upto(y + i, vf_mul(v, sf_load_upto(weight + i, n - i)), n - i);
    }
}

#endif
