/* 16 lanes in one register; int8 dot products with VNNI where the CPU has it. */
#include <immintrin.h>

#define SF_ISA_BASE "avx512"
#define SF_MAX_ROWS 8  /* rows of a register tile */
#define SF_INT8_ROWS 6 /* of several int8 tiles: of eight rows, registers do not hold all sums */

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vw;

SF_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
SF_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
SF_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
SF_INLINE void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
SF_INLINE __mmask16 sf_first(int n) { return (__mmask16)((1u << n) - 1u); }
/* The first n lanes; the others are zero. */
SF_INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(sf_first(n), p); }
SF_INLINE void vf_store_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, sf_first(n), v); }
SF_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
SF_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
SF_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
SF_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
SF_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
SF_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
SF_INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
/* a * b + c, rounded once */
SF_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* Lanes whose bit is set come from a, the others from b. */
SF_INLINE vf vf_select(uint32_t bits, vf a, vf b) {
    return _mm512_mask_blend_ps((__mmask16)bits, b, a);
}
/* Bit i: a[i] >= b[i]. */
SF_INLINE uint32_t vf_at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
SF_INLINE vf vf_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
/* Reduced by the trees of vmath.h, in registers. */
#ifdef __AVX512DQ__
#define SF_OWN_TREES
SF_INLINE float vf_hsum(vf a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
SF_INLINE float vf_hmax(vf a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
#endif
SF_INLINE vf vf_from_vi(vi a) { return _mm512_cvtepi32_ps(a); }
SF_INLINE vi vf_round(vf a) { return _mm512_cvtps_epi32(a); }
/* 2^n for -126 <= n <= 127 */
SF_INLINE vf vf_exp2i(vi n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

SF_INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
SF_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
SF_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
SF_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
SF_INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
SF_INLINE vi vi_halve(vi a) { return _mm512_srli_epi32(a, 1); } /* of an unsigned number */
SF_INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
/* The halves of the 64-bit products of unsigned numbers. */
SF_INLINE void vi_mul_wide(vi a, vi b, vi *high, vi *low) {
    __m512i even = _mm512_mul_epu32(a, b);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
/* Lane 4 l + i of a[j] goes to lane 4 l + j of a[i]. */
SF_INLINE void vi_transpose4(vi *a) {
    __m512i p = _mm512_unpacklo_epi32(a[0], a[1]), q = _mm512_unpacklo_epi32(a[2], a[3]);
    __m512i r = _mm512_unpackhi_epi32(a[0], a[1]), s = _mm512_unpackhi_epi32(a[2], a[3]);
    a[0] = _mm512_unpacklo_epi64(p, q);
    a[1] = _mm512_unpackhi_epi64(p, q);
    a[2] = _mm512_unpacklo_epi64(r, s);
    a[3] = _mm512_unpackhi_epi64(r, s);
}
/* 16 lanes, each within int8, as bytes */
SF_INLINE void vi_store_bytes(int8_t *p, vi a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a));
}
SF_INLINE int32_t vi_hsum(vi a) { return _mm512_reduce_add_epi32(a); }

/* bf16 pairs: a 32-bit lane holds element 2k in its low half and 2k + 1 in its high half. */
SF_INLINE vi vb_load(const uint16_t *p) { return _mm512_loadu_si512(p); }
SF_INLINE vf vb_even(vi a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
SF_INLINE vf vb_odd(vi a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000u)));
}

SF_INLINE vw vw_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
SF_INLINE vw vw_low(vw a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
SF_INLINE vw vw_high(vw a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}

/* Four signed bytes, repeated for every lane. */
typedef __m512i vx;
SF_INLINE vx vx_load(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
/* acc += the dot product of each lane's 4 unsigned weights with the 4 signed bytes x; exact.
 * vi_dot15 is for weights of at most 15, vi_dot255 for any. */
#if defined(__AVX512VNNI__)
#define SF_ISA SF_ISA_BASE "+vnni"
SF_INLINE vi vi_dot255(vi acc, vw w, vx x) {
    return _mm512_dpbusd_epi32(acc, w, x);
}
SF_INLINE vi vi_dot15(vi acc, vw w, vx x) { return vi_dot255(acc, w, x); }
#else
#define SF_ISA SF_ISA_BASE
SF_INLINE vi vi_dot15(vi acc, vw w, vx x) {
    __m512i pairs = _mm512_maddubs_epi16(w, x); /* at most 2 * 15 * 127 */
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
SF_INLINE vi vi_dot255(vi acc, vw w, vx x) {
    /* maddubs would saturate: widen even and odd bytes to 16 bits instead */
    __m512i even = _mm512_madd_epi16(
        _mm512_and_si512(w, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
    return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
}
#endif
