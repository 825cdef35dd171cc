/* Grammar masks, penalties, bias and masked ends, in place: but for masks, work by the length of a
 * row's history, not of the vocabulary. Every rounding is that of sampling/sampler.py. */
#include <math.h>

#include "native.h"
#include "team.h"

typedef struct {
    const int64_t *slot, *position; /* by row */
    int64_t slots;
    const float *repetition, *presence, *frequency; /* by slot, from here on; NULL: stage off */
    const int64_t *prompt_length, *history;
    int64_t history_stride, max_history;
    const int64_t *bias_ids;
    const float *bias;
    int64_t biases;
    const int64_t *stop_ids, *min_length;
    int64_t stops;
} sf_adjustments;

typedef struct {
    float *x;
    int64_t rows, columns;
    const sf_adjustments *a;
    uint32_t *marks; /* [threads][columns], zero between rows: 2 * count in the output, + 1 if seen */
} adjust_job;

static void penalise(const sf_adjustments *a, int64_t slot, int64_t position, int64_t columns,
                     float *y, uint32_t *marks) {
    const int64_t *history = a->history + slot * a->history_stride;
    int64_t length = position < a->max_history ? position : a->max_history;
    float repetition = a->repetition[slot];
    for (int64_t i = 0; i < length; i++) {
        int64_t token = history[i] < 0 ? 0 : history[i] < columns ? history[i] : columns - 1;
        if (!marks[token]) {
            y[token] = y[token] > 0 ? y[token] / repetition : y[token] * repetition;
            marks[token] = 1;
        }
        if (i >= a->prompt_length[slot]) marks[token] += 2;
    }
    for (int64_t i = 0; i < length; i++) {
        int64_t token = history[i] < 0 ? 0 : history[i] < columns ? history[i] : columns - 1;
        uint32_t count = marks[token] / 2;
        marks[token] = 0;
        if (!count) continue;
        y[token] = y[token] - a->frequency[slot] * (float)count;
        y[token] = y[token] - a->presence[slot];
    }
}

static void adjust_task(void *argument) {
    const adjust_job *j = argument;
    const sf_adjustments *a = j->a;
    int64_t row, last;
    uint32_t *marks = j->marks + j->columns * sf_me;
    sf_share(j->rows, &row, &last);
    if (a->history && row < last) memset(marks, 0, (size_t)j->columns * 4);
    for (; row < last; row++) {
        float *y = j->x + row * j->columns;
        int64_t slot = a->slot[row];
        if (a->history) penalise(a, slot, a->position[row], j->columns, y, marks);
        for (int64_t i = slot * a->biases; i < (slot + 1) * a->biases; i++)
            if (a->bias_ids[i] >= 0) y[a->bias_ids[i]] += a->bias[i];
        if (!a->stop_ids || a->position[row] >= a->min_length[slot]) continue;
        for (int64_t i = slot * a->stops; i < (slot + 1) * a->stops; i++)
            if (a->stop_ids[i] >= 0) y[a->stop_ids[i]] = -INFINITY;
    }
}

/* A row's slot and the ids that it names are in range. */
static int in_range(const sf_adjustments *a, int64_t slot, int64_t columns) {
    if (slot < 0 || slot >= a->slots) return 0;
    for (int64_t i = slot * a->biases; i < (slot + 1) * a->biases; i++)
        if (a->bias_ids[i] >= columns) return 0;
    for (int64_t i = slot * a->stops; i < (slot + 1) * a->stops; i++)
        if (a->stop_ids[i] >= columns) return 0;
    return 1;
}

/* Adjusts x [rows, columns]. SF_BAD_INDEX, and x as it was, for a slot or an id out of range. */
SF_EXPORT int sf_adjust(sf_context *context, float *x, int64_t rows, int64_t columns,
                        const sf_adjustments *a, int threads) {
    for (int64_t row = 0; row < rows; row++)
        if (!in_range(a, a->slot[row], columns)) return SF_BAD_INDEX;
    if (rows == 1 || rows * columns < 1 << 14) threads = 1;
    size_t bytes = a->history ? (size_t)columns * 4 * (size_t)threads : 0;
    if (sf_grow(context, bytes)) return SF_NO_MEMORY;
    adjust_job job = {x, rows, columns, a, (uint32_t *)context->memory};
    sf_run(threads, adjust_task, &job);
    return SF_OK;
}

typedef struct {
    const uint32_t *bits; /* [slots * entries][words] */
    int64_t words, entries;
    const int64_t *slot; /* by row */
    const int64_t *first; /* [spans], rising from 0: each span's first row */
    int64_t spans;
    const int64_t *masked; /* by slot: whether there are masks */
    int64_t slots;
} sf_masks;

typedef struct {
    float *x;
    int64_t rows, columns;
    const sf_masks *m;
} mask_job;

static void mask_task(void *argument) {
    const mask_job *j = argument;
    const sf_masks *m = j->m;
    int64_t row, last, span = 0;
    sf_share(j->rows, &row, &last);
    for (; row < last; row++) {
        float *x = j->x + row * j->columns;
        int64_t slot = m->slot[row];
        /* The last of the spans that begin there: the others have no rows. */
        while (span + 1 < m->spans && m->first[span + 1] <= row) span++;
        if (m->masked[slot] <= 0) continue;
        int64_t entry = row - m->first[span];
        if (entry >= m->entries) entry = m->entries - 1;
        const uint32_t *bits = m->bits + (slot * m->entries + entry) * m->words;
        for (int64_t i = 0; i < j->columns; i += 32) {
            const uint32_t word = bits[i / 32];
            const int size = j->columns - i < 32 ? (int)(j->columns - i) : 32;
            if (size == 32)
                for (int b = 0; b < 32; b++) x[i + b] = word >> b & 1 ? x[i + b] : -INFINITY;
            else
                for (int b = 0; b < size; b++) x[i + b] = word >> b & 1 ? x[i + b] : -INFINITY;
        }
    }
}

/* -INFINITY in x [rows, columns] where masks forbid a column. SF_BAD_INDEX, and x as it was, for a
 * slot out of range or masks that are too narrow. */
SF_EXPORT int sf_mask(float *x, int64_t rows, int64_t columns, const sf_masks *m, int threads) {
    for (int64_t row = 0; row < rows; row++)
        if (m->slot[row] < 0 || m->slot[row] >= m->slots) return SF_BAD_INDEX;
    if (m->words * 32 < columns) return SF_BAD_INDEX;
    if (rows == 1 || rows * columns < 1 << 14) threads = 1;
    mask_job job = {x, rows, columns, m};
    sf_run(threads, mask_task, &job);
    return SF_OK;
}
