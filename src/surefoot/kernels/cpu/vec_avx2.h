/* 16 lanes in two registers. */
#include <immintrin.h>

#define SF_ISA "avx2"
#define SF_MAX_ROWS 4
#define SF_INT8_ROWS SF_MAX_ROWS
#define SF_OWN_DOTS "dots_avx2.h"

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;

#define SF_F2(A, B) ((vf){(A), (B)})
#define SF_I2(A, B) ((vi){(A), (B)})

SF_INLINE vf vf_zero(void) { return SF_F2(_mm256_setzero_ps(), _mm256_setzero_ps()); }
SF_INLINE vf vf_set1(float x) { return SF_F2(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
SF_INLINE vf vf_load(const float *p) { return SF_F2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
SF_INLINE void vf_store(float *p, vf v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
SF_INLINE vf vf_load_n(const float *p, int n) {
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * 4);
    return vf_load(lanes);
}
SF_INLINE void vf_store_n(float *p, vf v, int n) {
    float lanes[16];
    vf_store(lanes, v);
    memcpy(p, lanes, (size_t)n * 4);
}
SF_INLINE vf vf_add(vf x, vf y) { return SF_F2(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
SF_INLINE vf vf_sub(vf x, vf y) { return SF_F2(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
SF_INLINE vf vf_mul(vf x, vf y) { return SF_F2(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
SF_INLINE vf vf_div(vf x, vf y) { return SF_F2(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
SF_INLINE vf vf_max(vf x, vf y) { return SF_F2(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
SF_INLINE vf vf_min(vf x, vf y) { return SF_F2(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
SF_INLINE vf vf_abs(vf x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return SF_F2(_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
SF_INLINE vf vf_fma(vf x, vf y, vf z) {
    return SF_F2(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
SF_INLINE __m256 sf_mask8(uint32_t bits) {
    __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i hit = _mm256_and_si256(_mm256_set1_epi32((int)bits), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lane));
}
SF_INLINE vf vf_select(uint32_t bits, vf x, vf y) {
    return SF_F2(_mm256_blendv_ps(y.a, x.a, sf_mask8(bits)),
                 _mm256_blendv_ps(y.b, x.b, sf_mask8(bits >> 8)));
}
SF_INLINE uint32_t vf_at_least(vf x, vf y) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
SF_INLINE vf vf_half(const uint16_t *p) {
    return SF_F2(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
SF_INLINE vf vf_from_vi(vi x) { return SF_F2(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
SF_INLINE vi vf_round(vf x) { return SF_I2(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); }
SF_INLINE __m256 sf_exp2i8(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
SF_INLINE vf vf_exp2i(vi n) { return SF_F2(sf_exp2i8(n.a), sf_exp2i8(n.b)); }

SF_INLINE vi vi_zero(void) { return SF_I2(_mm256_setzero_si256(), _mm256_setzero_si256()); }
SF_INLINE vi vi_set1(int32_t x) { return SF_I2(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
SF_INLINE vi vi_load(const void *p) {
    return SF_I2(_mm256_loadu_si256((const __m256i *)p),
                 _mm256_loadu_si256((const __m256i *)p + 1));
}
SF_INLINE void vi_store(void *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
SF_INLINE vi vi_xor(vi x, vi y) {
    return SF_I2(_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b));
}
SF_INLINE vi vi_halve(vi x) {
    return SF_I2(_mm256_srli_epi32(x.a, 1), _mm256_srli_epi32(x.b, 1));
}
SF_INLINE void sf_mul_wide8(__m256i a, __m256i b, __m256i *high, __m256i *low) {
    __m256i even = _mm256_mul_epu32(a, b);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
SF_INLINE void vi_mul_wide(vi x, vi y, vi *high, vi *low) {
    sf_mul_wide8(x.a, y.a, &high->a, &low->a);
    sf_mul_wide8(x.b, y.b, &high->b, &low->b);
}
SF_INLINE void sf_transpose8(__m256i *a, __m256i *b, __m256i *c, __m256i *d) {
    __m256i p = _mm256_unpacklo_epi32(*a, *b), q = _mm256_unpacklo_epi32(*c, *d);
    __m256i r = _mm256_unpackhi_epi32(*a, *b), s = _mm256_unpackhi_epi32(*c, *d);
    *a = _mm256_unpacklo_epi64(p, q);
    *b = _mm256_unpackhi_epi64(p, q);
    *c = _mm256_unpacklo_epi64(r, s);
    *d = _mm256_unpackhi_epi64(r, s);
}
SF_INLINE void vi_transpose4(vi *x) {
    sf_transpose8(&x[0].a, &x[1].a, &x[2].a, &x[3].a);
    sf_transpose8(&x[0].b, &x[1].b, &x[2].b, &x[3].b);
}
SF_INLINE vi vi_add(vi x, vi y) {
    return SF_I2(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b));
}
SF_INLINE void vi_store_bytes(int8_t *p, vi x) {
    int32_t lanes[16];
    _mm256_storeu_si256((__m256i *)lanes, x.a);
    _mm256_storeu_si256((__m256i *)(lanes + 8), x.b);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}
SF_INLINE int32_t vi_hsum(vi x) {
    int32_t lanes[8], sum = 0;
    _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi32(x.a, x.b));
    for (int i = 0; i < 8; i++) sum += lanes[i];
    return sum;
}

SF_INLINE vi vb_load(const uint16_t *p) {
    return SF_I2(_mm256_loadu_si256((const __m256i *)p),
                 _mm256_loadu_si256((const __m256i *)(p + 16)));
}
SF_INLINE vf vb_even(vi x) {
    return SF_F2(_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16)));
}
SF_INLINE vf vb_odd(vi x) {
    __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    return SF_F2(_mm256_castsi256_ps(_mm256_and_si256(x.a, high)),
                 _mm256_castsi256_ps(_mm256_and_si256(x.b, high)));
}
