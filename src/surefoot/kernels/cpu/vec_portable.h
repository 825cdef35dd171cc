/* 16 lanes as four groups of four in the compiler's own vector types, which it maps to whatever
 * the CPU has (NEON, SSE2). */

#define SF_ISA "portable"
#define SF_MAX_ROWS 4
#define SF_INT8_ROWS SF_MAX_ROWS

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef int16_t s8 __attribute__((vector_size(16)));
typedef struct { f4 v[4]; } vf;
typedef struct { i4 v[4]; } vi;
typedef struct { i4 v[4]; } vw;

#define SF_EACH4(T, EXPRESSION)                                                  \
    T out;                                                                       \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) out.v[i] = (EXPRESSION); \
    return out

SF_INLINE f4 sf_pick4(i4 mask, f4 a, f4 b) { return (f4)(((i4)a & mask) | ((i4)b & ~mask)); }

SF_INLINE vf vf_set1(float x) { SF_EACH4(vf, ((f4){x, x, x, x})); }
SF_INLINE vf vf_zero(void) { return vf_set1(0.0f); }
SF_INLINE vf vf_load(const float *p) {
    vf out;
    memcpy(&out, p, 64);
    return out;
}
SF_INLINE void vf_store(float *p, vf x) { memcpy(p, &x, 64); }
SF_INLINE vf vf_load_n(const float *p, int n) {
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * 4);
    return vf_load(lanes);
}
SF_INLINE void vf_store_n(float *p, vf x, int n) { memcpy(p, &x, (size_t)n * 4); }
SF_INLINE vf vf_add(vf x, vf y) { SF_EACH4(vf, x.v[i] + y.v[i]); }
SF_INLINE vf vf_sub(vf x, vf y) { SF_EACH4(vf, x.v[i] - y.v[i]); }
SF_INLINE vf vf_mul(vf x, vf y) { SF_EACH4(vf, x.v[i] * y.v[i]); }
SF_INLINE vf vf_div(vf x, vf y) { SF_EACH4(vf, x.v[i] / y.v[i]); }
SF_INLINE vf vf_max(vf x, vf y) { SF_EACH4(vf, sf_pick4(x.v[i] > y.v[i], x.v[i], y.v[i])); }
SF_INLINE vf vf_min(vf x, vf y) { SF_EACH4(vf, sf_pick4(x.v[i] < y.v[i], x.v[i], y.v[i])); }
SF_INLINE vf vf_abs(vf x) { SF_EACH4(vf, (f4)((i4)x.v[i] & 0x7fffffff)); }
/* Rounded twice: a fused multiply-add that the CPU lacks would be far too slow. */
SF_INLINE vf vf_fma(vf x, vf y, vf z) { SF_EACH4(vf, x.v[i] * y.v[i] + z.v[i]); }
SF_INLINE vf vf_select(uint32_t bits, vf x, vf y) {
    const i4 lane = {1, 2, 4, 8};
    SF_EACH4(vf, sf_pick4(((int32_t)(bits >> (4 * i)) & lane) == lane, x.v[i], y.v[i]));
}
SF_INLINE uint32_t vf_at_least(vf x, vf y) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) {
        i4 hit = (x.v[i] >= y.v[i]) & (i4){1, 2, 4, 8};
        bits |= (uint32_t)(hit[0] | hit[1] | hit[2] | hit[3]) << (4 * i);
    }
    return bits;
}
SF_INLINE vf vf_half(const uint16_t *p) {
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = sf_half_to_float(p[i]);
    return vf_load(lanes);
}
SF_INLINE vf vf_from_vi(vi x) { SF_EACH4(vf, __builtin_convertvector(x.v[i], f4)); }
/* To nearest even, for |x| < 2^22: adding 1.5 * 2^23 leaves the rounded integer in the low bits. */
SF_INLINE vi vf_round(vf x) {
    const float magic = 12582912.0f;
    SF_EACH4(vi, (i4)(x.v[i] + magic) - 0x4b400000);
}
SF_INLINE vf vf_exp2i(vi n) { SF_EACH4(vf, (f4)((n.v[i] + 127) << 23)); }

SF_INLINE vi vi_set1(int32_t x) { SF_EACH4(vi, ((i4){x, x, x, x})); }
SF_INLINE vi vi_zero(void) { return vi_set1(0); }
SF_INLINE vi vi_add(vi x, vi y) { SF_EACH4(vi, x.v[i] + y.v[i]); }
SF_INLINE vi vi_load(const void *p) {
    vi out;
    memcpy(&out, p, 64);
    return out;
}
SF_INLINE void vi_store(void *p, vi x) { memcpy(p, &x, 64); }
SF_INLINE vi vi_xor(vi x, vi y) { SF_EACH4(vi, x.v[i] ^ y.v[i]); }
SF_INLINE vi vi_halve(vi x) { SF_EACH4(vi, (i4)((u4)x.v[i] >> 1)); }
SF_INLINE void vi_mul_wide(vi x, vi y, vi *high, vi *low) {
    uint32_t a[16], b[16], h[16], l[16];
    memcpy(a, &x, 64);
    memcpy(b, &y, 64);
    for (int i = 0; i < 16; i++) {
        uint64_t product = (uint64_t)a[i] * b[i];
        h[i] = (uint32_t)(product >> 32);
        l[i] = (uint32_t)product;
    }
    memcpy(high, h, 64);
    memcpy(low, l, 64);
}
SF_INLINE void vi_transpose4(vi *x) {
    for (int l = 0; l < 4; l++) {
        i4 a = x[0].v[l], b = x[1].v[l], c = x[2].v[l], d = x[3].v[l];
        for (int i = 0; i < 4; i++) x[i].v[l] = (i4){a[i], b[i], c[i], d[i]};
    }
}
SF_INLINE void vi_store_bytes(int8_t *p, vi x) {
    int32_t lanes[16];
    memcpy(lanes, &x, 64);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}
SF_INLINE int32_t vi_hsum(vi x) {
    i4 sum = (x.v[0] + x.v[1]) + (x.v[2] + x.v[3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

SF_INLINE vi vb_load(const uint16_t *p) {
    vi out;
    memcpy(&out, p, 64);
    return out;
}
SF_INLINE vf vb_even(vi x) { SF_EACH4(vf, (f4)(x.v[i] << 16)); }
SF_INLINE vf vb_odd(vi x) { SF_EACH4(vf, (f4)(x.v[i] & (int32_t)0xffff0000)); }

SF_INLINE vw vw_load(const uint8_t *p) {
    vw out;
    memcpy(&out, p, 64);
    return out;
}
SF_INLINE vw vw_low(vw x) { SF_EACH4(vw, x.v[i] & 0x0f0f0f0f); }
SF_INLINE vw vw_high(vw x) { SF_EACH4(vw, (x.v[i] >> 4) & 0x0f0f0f0f); }

/* Four signed bytes for every lane, as 16-bit pairs: bytes 0 and 2, bytes 1 and 3. */
typedef struct { i4 even, odd; } vx;
SF_INLINE vx vx_load(const int8_t *x) {
    int32_t even = (int32_t)((uint32_t)(uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16);
    int32_t odd = (int32_t)((uint32_t)(uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16);
    return (vx){{even, even, even, even}, {odd, odd, odd, odd}};
}
/* The sum of a lane's two 16-bit halves. */
SF_INLINE i4 sf_halves(s8 x) { return ((i4)x << 16 >> 16) + ((i4)x >> 16); }
SF_INLINE s8 sf_even_products(i4 w, vx x) { return (s8)(w & 0x00ff00ff) * (s8)x.even; }
SF_INLINE s8 sf_odd_products(i4 w, vx x) { return (s8)((w >> 8) & 0x00ff00ff) * (s8)x.odd; }
/* acc += the dot product of each lane's 4 unsigned weights with the 4 signed bytes x; exact: a
 * product fits 16 bits (255 * 128), and so do two if weights are at most 15. */
SF_INLINE vi vi_dot15(vi acc, vw w, vx x) {
    SF_EACH4(vi, acc.v[i] + sf_halves(sf_even_products(w.v[i], x) + sf_odd_products(w.v[i], x)));
}
SF_INLINE vi vi_dot255(vi acc, vw w, vx x) {
    SF_EACH4(vi, acc.v[i] + sf_halves(sf_even_products(w.v[i], x)) +
                     sf_halves(sf_odd_products(w.v[i], x)));
}
