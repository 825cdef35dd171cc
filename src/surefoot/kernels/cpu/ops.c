/* Packing of weights, embedding rows and argmax. */
#include "team.h"
#include "vmath.h"

SF_EXPORT const char *sf_isa(void) { return SF_ISA; }

static int64_t quant_bytes(int kind) { return kind == SF_Q8_0 ? 512 : 256; }
static int64_t scale_bytes(int kind) { return kind == SF_Q4_1 ? 64 : 32; }

/* Bytes of one packed panel; see native.h for the layouts. */
SF_EXPORT int64_t sf_panel_bytes(int kind, int64_t inputs) {
    if (kind == SF_F32) return inputs * 64;
    if (kind == SF_BF16) return (inputs + 1) / 2 * 64;
    int64_t bytes = inputs / SF_BLOCK * (quant_bytes(kind) + scale_bytes(kind));
    return (bytes + 63) / 64 * 64;
}

static uint8_t *quant_byte(uint8_t *panel, int64_t block, int kind, int k, int lane) {
    int vector = kind == SF_Q8_0 ? k / 4 : k / 8;
    return panel + block * quant_bytes(kind) + vector * 64 + lane * 4 + k % 4;
}

static int quant_at(const uint8_t *panel, int64_t block, int kind, int k, int lane) {
    int byte = *quant_byte((uint8_t *)panel, block, kind, k, lane);
    if (kind == SF_Q8_0) return byte;
    return (k / 4) % 2 ? byte >> 4 : byte & 15;
}

/* One GGUF block (see kernels/quant.py) into its place. */
static void pack_block(int kind, const uint8_t *from, uint8_t *panel, int64_t blocks, int64_t block,
                       int lane) {
    uint16_t *scales = (uint16_t *)(panel + blocks * quant_bytes(kind) + block * scale_bytes(kind));
    memcpy(scales + lane, from, 2);
    if (kind == SF_Q4_1) memcpy(scales + 16 + lane, from + 2, 2);
    from += kind == SF_Q4_1 ? 4 : 2;
    for (int k = 0; k < SF_BLOCK; k++) {
        uint8_t *to = quant_byte(panel, block, kind, k, lane);
        if (kind == SF_Q8_0)
            *to = (uint8_t)((int8_t)from[k] + 128);
        else
            *to |= (uint8_t)((k < 16 ? from[k] & 15 : from[k - 16] >> 4) << ((k / 4) % 2 ? 4 : 0));
    }
}

typedef struct {
    int kind;
    const uint8_t *from;
    int64_t outputs, inputs;
    uint8_t *to;
} pack_job;

static void pack_task(void *argument) {
    const pack_job *job = argument;
    const int kind = job->kind;
    const uint8_t *from = job->from;
    const int64_t outputs = job->outputs, inputs = job->inputs;
    int64_t bytes = sf_panel_bytes(kind, inputs), blocks = inputs / SF_BLOCK;
    int64_t block_bytes = kind == SF_Q4_0 ? 18 : kind == SF_Q4_1 ? 20 : 34;
    int64_t p, last;
    sf_share((outputs + 15) / 16, &p, &last);
    for (; p < last; p++) {
        uint8_t *panel = job->to + p * bytes;
        memset(panel, 0, (size_t)bytes);
        for (int lane = 0; lane < 16 && 16 * p + lane < outputs; lane++) {
            int64_t row = 16 * p + lane;
            if (kind == SF_F32) {
                const float *source = (const float *)from + row * inputs;
                for (int64_t k = 0; k < inputs; k++) ((float *)panel)[16 * k + lane] = source[k];
            } else if (kind == SF_BF16) {
                const uint16_t *source = (const uint16_t *)from + row * inputs;
                for (int64_t k = 0; k < inputs; k++)
                    ((uint16_t *)panel)[k / 2 * 32 + 2 * lane + k % 2] = source[k];
            } else {
                for (int64_t b = 0; b < blocks; b++)
                    pack_block(kind, from + (row * blocks + b) * block_bytes, panel, blocks, b,
                               lane);
            }
        }
    }
}

/* `from` [outputs, inputs]: float32, bfloat16 or GGUF blocks, contiguous -> panels at `to`. */
SF_EXPORT void sf_pack(int kind, const uint8_t *from, int64_t outputs, int64_t inputs, uint8_t *to,
                       int threads) {
    pack_job job = {kind, from, outputs, inputs, to};
    /* A small matrix is not worth waking anyone. */
    sf_run(outputs * inputs < 1 << 18 ? 1 : threads, pack_task, &job);
}

/* One weight row as floats, the same values as dequantising the original. */
void sf_unpack_row(const sf_segment *s, int64_t row, float *out) {
    const uint8_t *panel = s->data + row / 16 * s->panel_bytes;
    int lane = (int)(row % 16);
    if (s->kind == SF_F32) {
        for (int k = 0; k < s->inputs; k++) out[k] = ((const float *)panel)[16 * k + lane];
    } else if (s->kind == SF_BF16) {
        const uint16_t *pairs = (const uint16_t *)panel + 2 * lane;
        for (int k = 0; k < s->inputs; k++) out[k] = sf_bf16_to_float(pairs[k / 2 * 32 + k % 2]);
    } else {
        int64_t blocks = s->inputs / SF_BLOCK;
        const uint8_t *scales = panel + blocks * quant_bytes(s->kind);
        int zero = s->kind == SF_Q8_0 ? 128 : s->kind == SF_Q4_0 ? 8 : 0;
        for (int64_t b = 0; b < blocks; b++, scales += scale_bytes(s->kind)) {
            const uint16_t *half = (const uint16_t *)scales + lane;
            float d = sf_half_to_float(half[0]);
            float m = s->kind == SF_Q4_1 ? sf_half_to_float(half[16]) : 0.0f;
            for (int k = 0; k < SF_BLOCK; k++)
                out[b * SF_BLOCK + k] =
                    (float)(quant_at(panel, b, s->kind, k, lane) - zero) * d + m;
        }
    }
}

typedef struct {
    const sf_segment *table;
    const int64_t *tokens;
    int64_t rows;
    float *out;
} embed_job;

static void embed_task(void *argument) {
    const embed_job *job = argument;
    int64_t r, last;
    sf_share(job->rows, &r, &last);
    for (; r < last; r++)
        sf_unpack_row(job->table, job->tokens[r], job->out + r * job->table->inputs);
}

/* out [rows, inputs] = the table's rows `tokens`; SF_BAD_INDEX if one is outside the table. */
SF_EXPORT int sf_embed(const sf_segment *table, const int64_t *tokens, int64_t rows, float *out,
                       int threads) {
    for (int64_t r = 0; r < rows; r++)
        if (tokens[r] < 0 || tokens[r] >= table->outputs) return SF_BAD_INDEX;
    embed_job job = {table, tokens, rows, out};
    sf_run(rows * table->inputs < 1 << 15 ? 1 : threads, embed_task, &job);
    return SF_OK;
}

#define PART 16384 /* columns of an argmax that one thread takes */

int64_t sf_first_largest(const float *x, int64_t n, float *largest) {
    vf best[4];
    int64_t i = 0;
    for (int j = 0; j < 4; j++) best[j] = vf_set1(-__builtin_inff());
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; j++) best[j] = vf_max(best[j], vf_load(x + i + 16 * j));
    float top = vf_hmax(vf_max(vf_max(best[0], best[1]), vf_max(best[2], best[3])));
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    *largest = top;
    for (i = 0; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

typedef struct {
    const float *x;
    int64_t rows, columns, parts;
    float *values;
    int64_t *indices;
} argmax_job;

static void argmax_task(void *argument) {
    const argmax_job *job = argument;
    int64_t item, last;
    sf_share(job->rows * job->parts, &item, &last);
    for (; item < last; item++) {
        int64_t first = item % job->parts * PART;
        int64_t n = job->columns - first < PART ? job->columns - first : PART;
        const float *part = job->x + item / job->parts * job->columns + first;
        job->indices[item] = first + sf_first_largest(part, n, &job->values[item]);
    }
}

/* out [rows] = the lowest index of each row's largest value; x [rows, columns] without NaN.
 * `values` and `indices` are scratch of rows * ceil(columns / 16384) elements. */
SF_EXPORT void sf_argmax(const float *x, int64_t rows, int64_t columns, int64_t *out, float *values,
                         int64_t *indices, int threads) {
    int64_t parts = (columns + PART - 1) / PART;
    argmax_job job = {x, rows, columns, parts, values, indices};
    sf_run(parts * rows == 1 ? 1 : threads, argmax_task, &job);
    for (int64_t r = 0; r < rows; r++) {
        int64_t best = r * parts;
        for (int64_t i = best + 1; i < (r + 1) * parts; i++)
            if (values[i] > values[best]) best = i;
        out[r] = indices[best];
    }
}
