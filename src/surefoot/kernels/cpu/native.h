/* Structures shared with Python (backend.py mirrors them with ctypes) and between the C files. */
#ifndef SF_NATIVE_H
#define SF_NATIVE_H

#include "vec.h"

#define SF_BLOCK 32 /* weights that share one scale, along K */
#define SF_EXPORT __attribute__((visibility("default")))

enum { SF_F32 = 0, SF_BF16 = 1, SF_Q4_0 = 2, SF_Q4_1 = 3, SF_Q8_0 = 4 };
enum { SF_OK = 0, SF_NO_MEMORY = 1, SF_BAD_INDEX = 2 };

/* A packed matrix [outputs, inputs], cut into panels of 16 outputs. Output rows past the end and
 * the odd last input of a bf16 matrix are zeros. A panel holds
 *   f32   [K][16]
 *   bf16  [K/2][16][2]
 *   q4    [K/32][4][16 lanes][4]: byte (v, lane, i) has k = 8v + i low and k = 8v + 4 + i high,
 *         then fp16 scales [K/32][16] (Q4_0) or [K/32][d 16, m 16] (Q4_1)
 *   q8    [K/32][8][16 lanes][4] of q + 128, then fp16 [K/32][16]
 */
typedef struct {
    int32_t kind;
    int32_t outputs;
    int32_t inputs;
    int32_t panels;
    int64_t panel_bytes;
    const uint8_t *data;
} sf_segment;

/* Segments share their input; their outputs are concatenated. */
typedef struct {
    int32_t segments;
    int32_t inputs;
    int32_t outputs;
    int32_t formats; /* SF_WANTS_*: the forms of the input that the segments read */
    const sf_segment *segment;
    const float *bias; /* or NULL */
} sf_linear;

enum { SF_WANTS_FLOAT = 1, SF_WANTS_INT8 = 2 };

typedef struct {
    int32_t hidden, inner, heads, kv_heads, head_dim, kv_kind;
    float eps, scale;
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be NULL */
    const float *cos, *sin;                                /* [positions, head_dim / 2] */
    sf_linear qkv, o, gate_up, down;
} sf_layer_weights;

/* FlatBatch, by address. */
typedef struct {
    int64_t rows;
    int64_t table_stride;
    const int64_t *positions, *key_index, *row_slot, *span_start;
    const int64_t *mask; /* or NULL */
    const int32_t *tables;
    int64_t first_key;     /* 0, or 1: nobody sees key 0 */
    const int64_t *oldest; /* the first key that each row sees, or NULL */
} sf_batch;

/* One layer's paged keys and values: per block, per kv head, tiles of 16 keys, each
 *   K  f32 [head_dim][16 keys]         bf16 [head_dim/2][16 keys][2]
 *   V  f32 [head_dim/16][16 keys][16]  bf16 [head_dim/16][8][16][2] (two keys interleaved)
 * K is transposed so that a score needs no horizontal sum. A block whose size is no multiple of
 * 16 leaves the last lanes of its last tile unused. */
typedef struct {
    uint8_t *data;
    int32_t block_size;
    int32_t tiles; /* per block */
} sf_kv;

/* Scratch memory, grown when needed and kept; one call at a time may use it. A call with fewer
 * multiplications than `serial_below` runs on one thread: waking others costs more. */
typedef struct {
    uint8_t *memory;
    size_t capacity;
    int64_t serial_below;
} sf_context;

/* Copies of what enters the layers: [rows][stride], a layer's from column[layer] on; below 0: not
 * wanted. */
typedef struct {
    const int64_t *column;
    float *features;
    int64_t stride;
} sf_capture;

/* layer.c: room for `bytes`; SF_OK or SF_NO_MEMORY. */
int sf_grow(sf_context *context, size_t bytes);

/* The rows of a linear's input, packed for register tiles (see act.h). */
typedef struct {
    int32_t rows, inputs, formats;
    int8_t *q;
    float *f;
} sf_acts;

/* The largest output of each row and its first column, as far as one thread has seen. */
typedef struct {
    float value;
    int64_t column;
} sf_best;

#define SF_MOST_PANELS 12 /* in a run of work */

/* y = (add ? y : 0) + value + bias, row stride `ld`. With `best` [threads][rows], y is scratch
 * instead, [threads][rows][SF_MOST_PANELS * 16], and only the largest outputs remain. */
typedef struct {
    float *y;
    int64_t ld;
    int32_t add;
    sf_best *best;
} sf_out;

/* How much of some work is done, on a cache line of its own. */
typedef struct {
    _Alignas(64) int64_t next;
} sf_counter;

/* gemm.c: every thread of the team calls it, with the same weights and zeroed counters, one for each
 * thread; and with the same rows, though they may be a copy of its own. */
void sf_gemm(const sf_linear *linear, const sf_acts *acts, sf_out out, sf_counter *work);

/* The calling thread will soon multiply with these. */
void sf_expect(const sf_linear *linear, const sf_counter *work);

/* attention.c */
size_t sf_attention_scratch(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv);
void sf_write_row(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv, int64_t row,
                  int kv_head, const float *k, const float *v);
void sf_attend(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv, const float *q,
               int64_t q_stride, float *out, int64_t out_stride, uint8_t *scratch,
               sf_counter *work);

/* ops.c: a row of the matrix as floats [inputs]. */
void sf_unpack_row(const sf_segment *s, int64_t row, float *out);

/* ops.c: the first column that holds the largest value of x [n]. */
int64_t sf_first_largest(const float *x, int64_t n, float *largest);

#endif
