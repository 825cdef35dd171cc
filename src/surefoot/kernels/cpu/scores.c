/* Logprobs of rows: of the chosen token, its rank, and the likeliest tokens. Two passes over a row,
 * each in one order, whatever is computed beside it. */
#include <math.h>

#include "team.h"
#include "vmath.h"

#define VECTORS_A_SUM 64 /* added up as floats, and then as doubles */

/* Which rows are scored: `count` of each span at `places` [spans], the first of which is in `first`;
 * the others follow it, or with `steps` are so many behind it. Those past the last row are that. */
typedef struct {
    const int64_t *first, *places, *steps;
    int64_t spans, stride, count;
} sf_scored;

typedef struct {
    const float *x;
    int64_t rows, columns;
    const int64_t *tokens;
    const sf_scored *scored; /* null: all rows */
    int64_t width;
    int32_t *out;
} scores_job;

static int64_t scored_row(const sf_scored *s, int64_t item, int64_t rows) {
    if (!s) return item;
    int64_t place = s->places[item / s->count], step = item % s->count;
    int64_t row = s->first[place] + (s->steps ? s->steps[place * s->stride + step] : step);
    return row < rows ? row : rows - 1;
}

static int64_t items(const sf_scored *s, int64_t rows) { return s ? s->spans * s->count : rows; }

/* Put `value` of column `id` among the `count` likeliest so far, of at most `width`, behind those
 * that are as likely. Returns how many there are then. */
static int64_t put(float value, int64_t id, int64_t count, int64_t width, int32_t *ids,
                   float *values) {
    if (count == width && !(value > values[width - 1])) return count;
    int64_t at = count < width ? count++ : width - 1;
    for (; at > 0 && values[at - 1] < value; at--) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = (int32_t)id;
    return count;
}

static void score_row(const float *x, int64_t columns, int64_t token, int64_t width, int32_t *out) {
    vf highest = vf_set1(-__builtin_inff());
    for (int64_t c = 0; c < columns; c += SF_LANES)
        highest = vf_max(highest, sf_load_logits(x + c, columns - c));
    const float top = vf_hmax(highest), chosen = x[token];
    int32_t *ids = out + 2;
    float *values = (float *)(ids + width);
    int64_t count = 0, greater = 0;
    double total = 0;
    vf sum = vf_zero();
    for (int64_t c = 0; c < columns; c += SF_LANES) {
        int64_t left = columns - c < SF_LANES ? columns - c : SF_LANES;
        vf v = sf_load_logits(x + c, left);
        uint32_t there = (1u << left) - 1;
        greater += __builtin_popcount(~vf_at_least(vf_set1(chosen), v) & there);
        sum = vf_add(sum, vf_select(there, vf_exp(vf_sub(v, vf_set1(top))), vf_zero()));
        if ((c / SF_LANES + 1) % VECTORS_A_SUM == 0) total += (double)vf_hsum(sum), sum = vf_zero();
        if (!width) continue;
        float border = count < width ? -__builtin_inff() : values[width - 1];
        for (uint32_t bits = vf_at_least(v, vf_set1(border)) & there; bits; bits &= bits - 1) {
            int64_t id = c + __builtin_ctz(bits);
            count = put(x[id], id, count, width, ids, values);
        }
    }
    total += (double)vf_hsum(sum);
    /* Not minus both at once: large logits would lose what tells them apart. */
    float rest = (float)log(total), logprob = chosen - top - rest;
    memcpy(out, &logprob, 4);
    out[1] = (int32_t)greater + 1;
    for (int64_t i = 0; i < width; i++) values[i] = values[i] - top - rest;
}

static void scores_task(void *argument) {
    const scores_job *j = argument;
    int64_t item, last;
    sf_share(items(j->scored, j->rows), &item, &last);
    for (; item < last; item++) {
        int64_t row = scored_row(j->scored, item, j->rows);
        score_row(j->x + row * j->columns, j->columns, j->tokens[row], j->width,
                  j->out + item * (2 + 2 * j->width));
    }
}

/* out [rows or scored rows, 2 + 2 width], as kernels/logprobs.py has it, of x [rows, columns], of
 * which scored ones are without NaN, and chosen tokens [rows]; width at most columns. SF_BAD_INDEX
 * for a token that does not exist. */
SF_EXPORT int sf_scores(const float *x, int64_t rows, int64_t columns, const int64_t *tokens,
                        const sf_scored *scored, int64_t width, int32_t *out, int threads) {
    for (int64_t row = 0; row < rows; row++)
        if (tokens[row] < 0 || tokens[row] >= columns) return SF_BAD_INDEX;
    scores_job j = {x, rows, columns, tokens, scored, width, out};
    sf_run(items(scored, rows) * columns < 1 << 14 ? 1 : threads, scores_task, &j);
    return SF_OK;
}
