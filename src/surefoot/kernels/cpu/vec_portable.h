/* Plain C loops over 16 lanes, which compilers vectorise for whatever the CPU has. */
#include <math.h>

#define SF_ISA "portable"
#define SF_MAX_ROWS 4

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;
typedef struct { uint8_t v[64]; } vw;

/* A fused multiply-add only where the CPU has one: libm's emulation is far too slow. Either choice
 * holds for every path of one build. */
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
#define SF_FMA1(A, B, C) __builtin_fmaf((A), (B), (C))
#else
#define SF_FMA1(A, B, C) ((A) * (B) + (C))
#endif

#define SF_EACH(T, EXPRESSION)                              \
    T out;                                                  \
    for (int i = 0; i < 16; i++) out.v[i] = (EXPRESSION);   \
    return out

SF_INLINE vf vf_zero(void) { SF_EACH(vf, 0.0f); }
SF_INLINE vf vf_set1(float x) { SF_EACH(vf, x); }
SF_INLINE vf vf_load(const float *p) { SF_EACH(vf, p[i]); }
SF_INLINE void vf_store(float *p, vf x) { memcpy(p, x.v, 64); }
SF_INLINE vf vf_load_n(const float *p, int n) { SF_EACH(vf, i < n ? p[i] : 0.0f); }
SF_INLINE void vf_store_n(float *p, vf x, int n) { memcpy(p, x.v, (size_t)n * 4); }
SF_INLINE vf vf_add(vf x, vf y) { SF_EACH(vf, x.v[i] + y.v[i]); }
SF_INLINE vf vf_sub(vf x, vf y) { SF_EACH(vf, x.v[i] - y.v[i]); }
SF_INLINE vf vf_mul(vf x, vf y) { SF_EACH(vf, x.v[i] * y.v[i]); }
SF_INLINE vf vf_div(vf x, vf y) { SF_EACH(vf, x.v[i] / y.v[i]); }
SF_INLINE vf vf_max(vf x, vf y) { SF_EACH(vf, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
SF_INLINE vf vf_min(vf x, vf y) { SF_EACH(vf, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
SF_INLINE vf vf_abs(vf x) { SF_EACH(vf, __builtin_fabsf(x.v[i])); }
SF_INLINE vf vf_fma(vf x, vf y, vf z) { SF_EACH(vf, SF_FMA1(x.v[i], y.v[i], z.v[i])); }
SF_INLINE vf vf_select(uint32_t bits, vf x, vf y) {
    SF_EACH(vf, (bits >> i) & 1 ? x.v[i] : y.v[i]);
}
SF_INLINE vf vf_half(const uint16_t *p) { SF_EACH(vf, sf_half_to_float(p[i])); }
SF_INLINE vf vf_from_vi(vi x) { SF_EACH(vf, (float)x.v[i]); }
SF_INLINE vi vf_round(vf x) { SF_EACH(vi, (int32_t)__builtin_rintf(x.v[i])); }
SF_INLINE vf vf_exp2i(vi n) {
    vf out;
    for (int i = 0; i < 16; i++) {
        uint32_t bits = (uint32_t)(n.v[i] + 127) << 23;
        memcpy(&out.v[i], &bits, 4);
    }
    return out;
}

SF_INLINE vi vi_zero(void) { SF_EACH(vi, 0); }
SF_INLINE vi vi_set1(int32_t x) { SF_EACH(vi, x); }
SF_INLINE vi vi_add(vi x, vi y) { SF_EACH(vi, x.v[i] + y.v[i]); }
SF_INLINE void vi_store_bytes(int8_t *p, vi x) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)x.v[i];
}
SF_INLINE int32_t vi_hsum(vi x) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += x.v[i];
    return sum;
}

SF_INLINE vi vb_load(const uint16_t *p) {
    SF_EACH(vi, (int32_t)((uint32_t)p[2 * i] | (uint32_t)p[2 * i + 1] << 16));
}
SF_INLINE vf vb_even(vi x) { SF_EACH(vf, sf_bf16_to_float((uint16_t)x.v[i])); }
SF_INLINE vf vb_odd(vi x) { SF_EACH(vf, sf_bf16_to_float((uint16_t)((uint32_t)x.v[i] >> 16))); }

SF_INLINE vw vw_load(const uint8_t *p) {
    vw out;
    memcpy(out.v, p, 64);
    return out;
}
SF_INLINE vw vw_low(vw x) {
    for (int i = 0; i < 64; i++) x.v[i] &= 15;
    return x;
}
SF_INLINE vw vw_high(vw x) {
    for (int i = 0; i < 64; i++) x.v[i] >>= 4;
    return x;
}
typedef const int8_t *vx;
SF_INLINE vx vx_load(const int8_t *x) { return x; }
SF_INLINE vi vi_dot255(vi acc, vw w, vx x) {
    for (int i = 0; i < 16; i++)
        acc.v[i] += w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] +
                    w.v[4 * i + 3] * x[3];
    return acc;
}
SF_INLINE vi vi_dot15(vi acc, vw w, vx x) { return vi_dot255(acc, w, x); }
