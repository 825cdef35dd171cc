/* The integer sums of a block with 16 registers and no instruction for dot products of bytes.
 *
 * Weights of at most 15 leave room in 16 bits for the eight products of pairs that a lane's sum over
 * a block takes (8 * 2 * 15 * 127 = 30480), so only the last step widens to 32 bits. Bytes up to 255
 * are taken as two such halves. Eight lanes at a time: sums of four rows stay in registers. */
SF_INLINE __m256i sf_four(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

/* sum + pairs, here and now: compilers that gather a block's additions at its end run out of
 * registers. */
SF_INLINE __m256i sf_add_pairs(__m256i sum, __m256i w, __m256i x) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    __asm__("" : "+x"(sum));
    return sum;
}

SF_INLINE __m256i sf_low4(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
SF_INLINE __m256i sf_high4(__m256i x) { return sf_low4(_mm256_srli_epi16(x, 4)); }

/* Lanes 8 half .. 8 half + 7 of a panel at w; dot [R] are set. */
SF_INLINE void sf_half_dots(const int q8, const int R, const int half, const uint8_t *w,
                            int64_t ahead, const int8_t *x, __m256i *dot) {
    __asm__ volatile("" : "+r"(x)); /* loading the row's bytes again is cheaper than keeping them */
    __m256i low[SF_MAX_ROWS], high[SF_MAX_ROWS];
    SF_UNROLL for (int r = 0; r < R; r++) low[r] = high[r] = _mm256_setzero_si256();
    SF_UNROLL for (int v = 0; v < 8; v++) {
        if (!q8 && v >= 4) break;
        const uint8_t *at = w + 64 * v + 32 * half;
        if (!half) __builtin_prefetch(at + ahead, 0, 2);
        __m256i bytes = _mm256_loadu_si256((const __m256i *)at);
        __m256i first = sf_low4(bytes), second = sf_high4(bytes);
        SF_UNROLL for (int r = 0; r < R; r++) {
            const int8_t *four = x + 32 * r + (q8 ? 4 : 8) * v;
            __m256i a = sf_four(four), b = q8 ? a : sf_four(four + 4);
            low[r] = sf_add_pairs(low[r], first, a);
            if (q8)
                high[r] = sf_add_pairs(high[r], second, b);
            else
                low[r] = sf_add_pairs(low[r], second, b);
        }
    }
    SF_UNROLL for (int r = 0; r < R; r++) {
        __m256i sum = _mm256_madd_epi16(low[r], _mm256_set1_epi16(1));
        if (q8) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(high[r], _mm256_set1_epi16(16)));
        dot[r] = sum;
    }
}

SF_INLINE void sf_block_dots(const int q8, const int R, const int P, const uint8_t *panel,
                             int64_t panel_bytes, const int8_t *x, vi *dot) {
    SF_UNROLL for (int p = 0; p < P; p++) {
        __m256i a[SF_MAX_ROWS], b[SF_MAX_ROWS];
        sf_half_dots(q8, R, 0, panel + p * panel_bytes, P * panel_bytes, x, a);
        sf_half_dots(q8, R, 1, panel + p * panel_bytes, 0, x, b);
        SF_UNROLL for (int r = 0; r < R; r++)
            dot[r * P + p] = vi_add(dot[r * P + p], SF_I2(a[r], b[r]));
    }
}
