/* The input rows of a linear, laid out for register tiles of R rows. Layouts of a tile:
 *   float  [K][R], K rounded up to even
 *   int8   per block of 32: q [R][32], then four words each [R]: scale dx (f32), dx * sum(q) (f32),
 *          -8 * sum(q) (int32), -128 * sum(q) (int32)
 * The quantisation is symmetric: dx = max|x| / 127, q = round(x * 127 / max|x|).
 */
#ifndef SF_ACT_H
#define SF_ACT_H

#include "native.h"
#include "vmath.h"

#define SF_ACT_BYTES 48 /* of an int8 row's block, words included */

typedef struct {
    int64_t start;
    int rows;
} sf_tile;

/* The tile that a row is in. Up to SF_MAX_ROWS rows are one tile, more are cut into as even ones as
 * can be, of at most `most`. */
SF_INLINE sf_tile sf_tile_of(int64_t row, int64_t rows, int most) {
    if (rows <= SF_MAX_ROWS) return (sf_tile){0, (int)rows};
    int64_t tiles = (rows + most - 1) / most, small = rows / tiles, larger = rows % tiles;
    int64_t first = larger * (small + 1); /* row of the small ones */
    if (row < first) return (sf_tile){row - row % (small + 1), (int)small + 1};
    return (sf_tile){row - (row - first) % small, (int)small};
}

SF_INLINE sf_tile sf_float_tile(int64_t row, int64_t rows) {
    return sf_tile_of(row, rows, SF_MAX_ROWS);
}

SF_INLINE sf_tile sf_int8_tile(int64_t row, int64_t rows) {
    return sf_tile_of(row, rows, SF_INT8_ROWS);
}

SF_INLINE int64_t sf_even(int64_t n) { return (n + 1) & ~(int64_t)1; }

SF_INLINE size_t sf_acts_int8_bytes(int64_t rows, int64_t inputs) {
    return (size_t)(rows * (inputs / SF_BLOCK) * SF_ACT_BYTES);
}

SF_INLINE size_t sf_acts_float_bytes(int64_t rows, int64_t inputs) {
    return (size_t)(rows * sf_even(inputs) * 4);
}

SF_INLINE void sf_quantize_block(const float *x, int8_t *q, float *scale, float *sum, int32_t *sum8,
                                 int32_t *sum128, int r) {
    vf a = vf_load(x), b = vf_load(x + 16);
    float largest = vf_hmax(vf_max(vf_abs(a), vf_abs(b)));
    vf inverse = vf_set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    vi qa = vf_round(vf_mul(a, inverse)), qb = vf_round(vf_mul(b, inverse));
    int32_t total = vi_hsum(vi_add(qa, qb));
    q += 32 * r;
    vi_store_bytes(q, qa);
    vi_store_bytes(q + 16, qb);
    scale[r] = largest / 127.0f;
    sum[r] = largest / 127.0f * (float)total;
    sum8[r] = -8 * total;
    sum128[r] = -128 * total;
}

/* Store columns [first, first + n) of a row; `first` is a multiple of 32, and so is n unless the
 * columns are the row's last. */
static inline void sf_acts_put(const sf_acts *acts, int64_t row, int first, int n, const float *x) {
    if (acts->formats & SF_WANTS_FLOAT) {
        sf_tile tile = sf_float_tile(row, acts->rows);
        int64_t r = row - tile.start, R = tile.rows;
        float *to = acts->f + tile.start * sf_even(acts->inputs) + (int64_t)first * R + r;
        for (int k = 0; k < n; k++) to[(int64_t)k * R] = x[k];
        if (first + n == acts->inputs && (acts->inputs & 1)) to[(int64_t)n * R] = 0.0f;
    }
    if (acts->formats & SF_WANTS_INT8) {
        sf_tile tile = sf_int8_tile(row, acts->rows);
        int64_t blocks = acts->inputs / SF_BLOCK, before = tile.start * blocks;
        int r = (int)(row - tile.start), R = tile.rows;
        int8_t *to = acts->q + (before + (int64_t)(first / SF_BLOCK) * R) * SF_ACT_BYTES;
        for (int k = 0; k < n; k += SF_BLOCK, to += (size_t)R * SF_ACT_BYTES) {
            float *scale = (float *)(to + 32 * R), *sum = scale + R;
            int32_t *sum8 = (int32_t *)(sum + R), *sum128 = sum8 + R;
            sf_quantize_block(x + k, to, scale, sum, sum8, sum128, r);
        }
    }
}

/* Reserve `bytes` of scratch memory at the cursor, on a cache line. */
static inline size_t sf_reserve(size_t *cursor, size_t bytes) {
    size_t at = *cursor;
    *cursor = (at + bytes + 63) / 64 * 64;
    return at;
}

/* Rows of a linear's input, and where they go in scratch memory that is yet to be had. */
static inline sf_acts sf_reserve_acts(size_t *cursor, const sf_linear *linear, int64_t rows,
                                      size_t at[2]) {
    at[0] = sf_reserve(cursor, linear->formats & SF_WANTS_INT8
                                   ? sf_acts_int8_bytes(rows, linear->inputs) : 0);
    at[1] = sf_reserve(cursor, linear->formats & SF_WANTS_FLOAT
                                   ? sf_acts_float_bytes(rows, linear->inputs) : 0);
    return (sf_acts){(int32_t)rows, linear->inputs, linear->formats, NULL, NULL};
}

static inline void sf_place_acts(sf_acts *acts, uint8_t *memory, const size_t at[2]) {
    acts->q = (int8_t *)(memory + at[0]);
    acts->f = (float *)(memory + at[1]);
}

#endif
