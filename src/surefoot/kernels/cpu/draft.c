/* What drafting does beside its network's layers: where the rows stand, what they read, and which
 * tokens come out. On a CPU each of these as tensor operations costs more than a small layer. */
#include <math.h>

#include "act.h"
#include "draft.h"
#include "team.h"

/* --- rows ------------------------------------------------------------------------------------ */

/* `Drafting.live_rows`: tokens [n], keys and positions [steps + 1][n], tables [n][pages]. */
SF_EXPORT void sf_live_rows(const sf_live *l, const int64_t *slots, int64_t n, int64_t *tokens,
                            int64_t *keys, int64_t *positions, int32_t *tables) {
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = slots[i], current = l->length[slot] - 1;
        if (current < 1) current = 1;
        tokens[i] = l->history[slot * l->width + current];
        for (int64_t step = 0; step <= l->steps; step++) {
            int64_t key = current + step, position = key - l->behind;
            if (position < 0) position = 0;
            keys[step * n + i] = key;
            positions[step * n + i] = position < l->last_position ? position : l->last_position;
        }
        int64_t settled = (current - 1) / l->block_size;
        for (int64_t page = 0; page < l->pages; page++) {
            int64_t beyond = page - settled - 1, known = page < l->blocks ? page : l->blocks - 1;
            if (beyond >= l->own) beyond = l->own - 1;
            tables[i * l->pages + page] = page <= settled
                ? l->tables[slot * l->blocks + known]
                : (int32_t)(l->first + slot * l->own + beyond);
        }
    }
}

/* `Drafting.block_rows`: out [4][n * rows] are tokens, positions, keys and owners, from keys and
 * positions [steps][n]; spans [2][n] are first rows and counts. */
SF_EXPORT void sf_block_rows(const int64_t *tokens, const int64_t *keys, const int64_t *positions,
                             int64_t n, int64_t rows, int64_t filler, int64_t *out,
                             int64_t *spans) {
    for (int64_t i = 0; i < n; i++) {
        for (int64_t row = 0; row < rows; row++) {
            int64_t *at = out + i * rows + row, count = n * rows;
            at[0] = row ? filler : tokens[i];
            at[count] = positions[row * n + i];
            at[2 * count] = keys[row * n + i];
            at[3 * count] = i;
        }
        spans[i] = i * rows;
        spans[n + i] = rows;
    }
}

/* `Drafting.keep_rows`: kept [room][width], table [3][room]; the rows that are kept then, or -1. */
SF_EXPORT int64_t sf_keep_rows(const float *features, int64_t width, const int64_t *tokens,
                               const int64_t *keys, const int64_t *slots, const int64_t *first,
                               const int64_t *counts, int64_t spans, float *kept, int64_t *table,
                               int64_t room, int64_t at, int64_t most) {
    int64_t end = at;
    for (int64_t i = 0; i < spans; i++) end += counts[i];
    if (end - at > most || end > room) return -1;
    for (int64_t i = 0; i < spans; i++) {
        memcpy(kept + at * width, features + first[i] * width,
               (size_t)(counts[i] * width) * sizeof(float));
        for (int64_t row = first[i]; row < first[i] + counts[i]; row++, at++) {
            table[at] = tokens[row];
            table[room + at] = keys[row];
            table[2 * room + at] = slots[i];
        }
    }
    return end;
}

/* --- inputs ---------------------------------------------------------------------------------- */

/* y [rows][n] = rms_norm(x). */
SF_EXPORT void sf_norm(const float *x, int64_t rows, int64_t n, const float *weight, float eps,
                       float *y) {
    for (int64_t row = 0; row < rows; row++)
        sf_rms_norm(x + row * n, weight, eps, (int)n, y + row * n);
}

/* out [rows][2 n]: the embeddings of tokens and the features [rows][n], each normed. SF_BAD_INDEX
 * for a token outside the table. */
SF_EXPORT int sf_entry(const sf_segment *table, const int64_t *tokens, int64_t stride,
                       const float *features, int64_t rows, const float *embedding_norm,
                       const float *hidden_norm, float eps, float *out) {
    int n = table->inputs;
    for (int64_t row = 0; row < rows; row++, out += 2 * n) {
        int64_t token = tokens[row * stride];
        if (token < 0 || token >= table->outputs) return SF_BAD_INDEX;
        sf_unpack_row(table, token, out);
        sf_rms_norm(out, embedding_norm, eps, n, out);
        sf_rms_norm(features + row * n, hidden_norm, eps, n, out + n);
    }
    return SF_OK;
}

/* --- tokens ---------------------------------------------------------------------------------- */

/* The probability of the largest of x [n]. */
static float chance_of(const float *x, int64_t n, float top) {
    double total = 0;
    for (int64_t i = 0; i < n; i += 1024) {
        vf sum = vf_zero();
        for (int64_t j = i; j < i + 1024 && j < n; j += 16) {
            vf mass = vf_exp(vf_sub(sf_load_upto(x + j, (int)(n - j)), vf_set1(top)));
            uint32_t there = n - j < 16 ? (1u << (n - j)) - 1u : 0xffffu;
            sum = vf_add(sum, vf_select(there, mass, vf_zero()));
        }
        total += (double)vf_hsum(sum);
    }
    return (float)(1.0 / total);
}

/* `Drafting.likeliest` of x [rows][n]; `ids` may be NULL. */
SF_EXPORT void sf_likeliest(const float *x, int64_t rows, int64_t n, const int64_t *ids,
                            int64_t *tokens, int64_t token_stride, float *chances,
                            int64_t chance_stride) {
    for (int64_t row = 0; row < rows; row++, x += n) {
        float top;
        int64_t at = sf_first_largest(x, n, &top);
        tokens[row * token_stride] = ids ? ids[at] : at;
        chances[row * chance_stride] = chance_of(x, n, top);
    }
}

typedef struct {
    const sf_segment *before;
    const sf_linear *after;
    const int64_t *current, *ids;
    float *logits;
    int64_t steps, rows;
    int64_t *tokens;
    sf_acts acts;
    sf_counter *work; /* by step and thread */
    sf_best *best;    /* by thread and row */
    float *buffers;   /* a row's embedding, by thread */
    int bad;
    sf_barrier barrier;
} markov_job;

static void markov_task(void *argument) {
    markov_job *j = argument;
    int64_t n = j->after->outputs, rows = j->rows, row, last, column, end;
    float *embedded = j->buffers + (int64_t)sf_me * j->after->inputs;
    for (int64_t step = 0; step < j->steps; step++) {
        const int64_t *previous = step ? j->tokens + (step - 1) * rows : j->current;
        sf_share(rows, &row, &last);
        for (; row < last; row++) {
            int64_t token = previous[row];
            if (token < 0 || token >= j->before->outputs) j->bad = 1, token = 0;
            sf_unpack_row(j->before, token, embedded);
            sf_acts_put(&j->acts, row, 0, j->acts.inputs, embedded);
        }
        sf_wait(&j->barrier);
        float *logits = j->logits + step * rows * n;
        sf_gemm(j->after, &j->acts, (sf_out){logits, n, 1, NULL}, &j->work[step * sf_team]);
        sf_wait(&j->barrier);
        sf_share(n, &column, &end);
        for (row = 0; row < rows && end > column; row++) {
            sf_best *best = &j->best[sf_me * rows + row];
            best->column = column + sf_first_largest(logits + row * n + column, end - column,
                                                     &best->value);
        }
        sf_wait(&j->barrier);
        sf_share(rows, &row, &last);
        for (; row < last; row++) {
            sf_best best = j->best[row];
            for (int t = 1; t < sf_team; t++) /* shares are in the order of the columns */
                if (best.column < 0 || j->best[t * rows + row].value > best.value)
                    best = j->best[t * rows + row];
            j->tokens[step * rows + row] = j->ids ? j->ids[best.column] : best.column;
        }
    }
}

/* `Drafting.markov` without chances: logits [steps][rows][outputs] are changed, tokens
 * [steps][rows] set. Returns SF_OK, SF_NO_MEMORY, or SF_BAD_INDEX for a token outside `before`. */
SF_EXPORT int sf_markov(sf_context *context, const sf_segment *before, const sf_linear *after,
                        const int64_t *current, const int64_t *ids, float *logits, int64_t steps,
                        int64_t rows, int64_t *tokens, int threads) {
    size_t cursor = 0, place[2];
    sf_acts acts = sf_reserve_acts(&cursor, after, rows, place);
    size_t counters = (size_t)(steps * threads) * sizeof(sf_counter);
    size_t work_at = sf_reserve(&cursor, counters);
    size_t best_at = sf_reserve(&cursor, (size_t)(threads * rows) * sizeof(sf_best));
    size_t buffers_at = sf_reserve(&cursor, (size_t)(threads * after->inputs) * 4);
    if (sf_grow(context, cursor)) return SF_NO_MEMORY;
    uint8_t *memory = context->memory;
    sf_place_acts(&acts, memory, place);
    memset(memory + work_at, 0, counters);
    sf_best *best = (sf_best *)(memory + best_at);
    for (int64_t i = 0; i < threads * rows; i++) best[i] = (sf_best){-__builtin_inff(), -1};
    markov_job job = {before, after, current, ids, logits, steps, rows, tokens, acts,
                      (sf_counter *)(memory + work_at), best, (float *)(memory + buffers_at), 0,
                      {0, 0, 0}};
    sf_run(threads, markov_task, &job);
    return job.bad ? SF_BAD_INDEX : SF_OK;
}
