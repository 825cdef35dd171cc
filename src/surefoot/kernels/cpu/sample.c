/* Tokens from logits at any temperature: filters, Gumbel noise and argmax in one pass.
 *
 * Noise is a pure function of seed, choice, position and token, so it is only computed for tokens
 * that can still win: not for those so far behind the best that the largest variate cannot help,
 * and exactly only for those whose word promises enough. What is skipped could not have won, hence
 * the result does not depend on parts, threads or their order. */
#include "philox.h"
#include "select.h"
#include "team.h"

#define PART 16384 /* columns that one thread takes */
#define GROUP 256

typedef struct {
    const int64_t *slot, *position; /* by row */
    int64_t slots;
    const float *temperature, *min_p, *top_p; /* by slot, from here on */
    const int64_t *top_k, *seed, *choice;
} sf_draws;

typedef struct {
    float top;       /* the largest logit */
    int64_t at;      /* its first column */
    float threshold; /* scores (logit - top) / temperature below it are filtered out */
} row_state;

typedef struct {
    const float *x;
    int64_t rows, columns, parts;
    const sf_draws *draws;
    row_state *state;
    float *values;
    int64_t *indices;
    uint8_t *scratch;
    size_t per_thread;
    sf_barrier barrier;
} job;

/* Up to 64 logits as four vectors, -inf past the end. */
SF_INLINE void load_chunk(const float *x, int64_t left, vf *v) {
    for (int j = 0; j < 4; j++) v[j] = sf_load_logits(x + 16 * j, left - 16 * j);
}

/* A logit below it has a score below `low`, whatever the rounding. */
static float logit_below(float top, float temperature, double low) {
    double edge = (double)temperature * low;
    double slack = 1e-5 * (fabs((double)top) + fabs(edge)) + 1e-30;
    return low > -INFINITY ? (float)((double)top + edge - slack) : -INFINITY;
}

/* x - top of the k-th largest logit. */
static float kth_largest(const job *j, const float *x, float top, int64_t k, float *list,
                         float *maxima, double *bins) {
    int64_t n = 0, groups = 0;
    const vf low = vf_set1(-__builtin_inff()), highest = vf_set1(top);
    for (int64_t i = 0; i < j->columns; i += GROUP, groups += 16) {
        vf best = low;
        for (int64_t c = i; c < i + GROUP && c < j->columns; c += SF_CHUNK) {
            vf v[4];
            load_chunk(x + c, j->columns - c, v);
            best = vf_max(best, vf_max(vf_max(v[0], v[1]), vf_max(v[2], v[3])));
        }
        vf_store(maxima + groups, vf_sub(best, highest));
    }
    /* Maxima over disjoint columns: the k-th largest of them is no larger than that of all. */
    float bound = k <= groups ? sf_select(maxima, NULL, groups, (double)k, bins) : -INFINITY;
    for (int64_t c = 0; c < j->columns; c += SF_CHUNK) {
        vf v[4];
        load_chunk(x + c, j->columns - c, v);
        for (int q = 0; q < 4; q++) {
            vf gap = vf_sub(v[q], highest);
            uint32_t bits = vf_at_least(gap, vf_set1(bound));
            if (bits) n += sf_append(list + n, gap, bits);
        }
    }
    return sf_select(list, NULL, n, (double)k, bins);
}

/* The score of the last token that top_p keeps among those at or above `threshold`. */
static float nucleus_border(const job *j, const float *x, float top, float temperature, float top_p,
                            float threshold, float *list, float *weights, double *bins) {
    /* Tokens below -cut weigh less than 1 - top_p together: none of them is kept. */
    double cut = log((double)j->columns / (1.0 - (double)top_p)) + 0.01, total = 0;
    float low = threshold > (float)-cut ? threshold : (float)-cut;
    int64_t n = 0;
    vf sum = vf_zero();
    for (int64_t c = 0; c < j->columns; c += SF_CHUNK) {
        vf v[4];
        load_chunk(x + c, j->columns - c, v);
        for (int q = 0; q < 4; q++) {
            vf score = vf_div(vf_sub(v[q], vf_set1(top)), vf_set1(temperature));
            vf mass = vf_exp(score);
            uint32_t alive = vf_at_least(score, vf_set1(threshold));
            uint32_t bits = vf_at_least(score, vf_set1(low));
            sum = vf_add(sum, vf_select(alive, mass, vf_zero()));
            if (!bits) continue;
            sf_append(weights + n, mass, bits);
            n += sf_append(list + n, score, bits);
        }
        if ((c / SF_CHUNK + 1) % 16 == 0) total += (double)vf_hsum(sum), sum = vf_zero();
    }
    total += (double)vf_hsum(sum);
    return sf_select(list, weights, n, (double)top_p * total, bins);
}

static int filtered(const sf_draws *d, int64_t slot, int64_t columns) {
    return d->temperature[slot] > 0 && (d->top_k[slot] < columns || d->top_p[slot] < 1);
}

static void prepare_row(const job *j, int64_t row, uint8_t *scratch) {
    const sf_draws *d = j->draws;
    const float *x = j->x + row * j->columns;
    int64_t slot = d->slot[row], best = row * j->parts;
    for (int64_t i = best + 1; i < (row + 1) * j->parts; i++)
        if (j->values[i] > j->values[best]) best = i;
    float top = j->values[best], temperature = d->temperature[slot], threshold = -INFINITY;
    if (d->min_p[slot] > 0) threshold = (float)log((double)d->min_p[slot]);
    if (filtered(d, slot, j->columns) && isfinite(top)) {
        float *list = (float *)scratch, *other = list + j->columns + SF_CHUNK;
        double *bins = (double *)(scratch + (size_t)(j->columns + SF_CHUNK) * 8);
        if (d->top_k[slot] < j->columns) {
            int64_t k = d->top_k[slot] < 1 ? 1 : d->top_k[slot];
            float border = kth_largest(j, x, top, k, list, other, bins) / temperature;
            if (border > threshold) threshold = border;
        }
        if (d->top_p[slot] < 1) {
            float border = nucleus_border(j, x, top, temperature, d->top_p[slot], threshold, list,
                                          other, bins);
            if (border > threshold) threshold = border;
        }
    }
    j->state[row] = (row_state){top, j->indices[best], threshold};
}

/* The best score plus noise among columns [first, last), or the row's largest logit. */
static void draw_part(const job *j, int64_t row, int64_t first, int64_t last, float *value,
                      int64_t *index) {
    const sf_draws *d = j->draws;
    const float *x = j->x + row * j->columns;
    const row_state s = j->state[row];
    int64_t slot = d->slot[row];
    const float temperature = d->temperature[slot], highest = sf_gumbel(0) + 1e-3f;
    sf_stream stream = {(uint64_t)d->seed[slot], (uint32_t)d->position[row],
                        (uint32_t)d->choice[slot]};
    uint32_t word[SF_CHUNK];
    vi words[4];
    sf_philox(&stream, s.at / SF_CHUNK * SF_CHUNK, words);
    for (int q = 0; q < 4; q++) vi_store(word + 16 * q, words[q]);
    float best = sf_gumbel(word[s.at % SF_CHUNK]);
    int64_t at = s.at;
    float border = logit_below(s.top, temperature, fmax(best - highest, s.threshold));
    for (int64_t c = first; c < last; c += SF_CHUNK) {
        vf v[4];
        load_chunk(x + c, last - c, v);
        vf largest = vf_max(vf_max(v[0], v[1]), vf_max(v[2], v[3]));
        if (!vf_at_least(largest, vf_set1(border))) continue;
        sf_philox(&stream, c, words);
        for (int q = 0; q < 4; q++) {
            vf score = vf_div(vf_sub(v[q], vf_set1(s.top)), vf_set1(temperature));
            /* Noise is at most -log(v), v being the word as a fraction: to win, v must not exceed
             * exp(score - best). The margin is far above the roundings on both sides. */
            vf least = vf_mul(vf_from_vi(vi_halve(words[q])), vf_set1(0x1p-31f * 0.9999f));
            uint32_t bits = vf_at_least(vf_exp(vf_sub(score, vf_set1(best))), least) &
                            vf_at_least(score, vf_set1(s.threshold));
            if (!bits) continue;
            float scores[16];
            vf_store(scores, score);
            vi_store(word, words[q]);
            for (; bits; bits &= bits - 1) {
                int lane = __builtin_ctz(bits);
                float noised = scores[lane] + sf_gumbel(word[lane]);
                int64_t column = c + 16 * q + lane;
                if (noised > best || (noised == best && column < at)) best = noised, at = column;
            }
            border = logit_below(s.top, temperature, fmax(best - highest, s.threshold));
        }
    }
    *value = best;
    *index = at;
}

static void task(void *argument) {
    job *j = argument;
    int64_t item, last, row, end;
    sf_share(j->rows * j->parts, &item, &last);
    int64_t start = item;
    for (; item < last; item++) {
        int64_t first = item % j->parts * PART;
        int64_t n = j->columns - first < PART ? j->columns - first : PART;
        const float *part = j->x + item / j->parts * j->columns + first;
        j->indices[item] = first + sf_first_largest(part, n, &j->values[item]);
    }
    sf_wait(&j->barrier);
    sf_share(j->rows, &row, &end);
    for (; row < end; row++) prepare_row(j, row, j->scratch + j->per_thread * (size_t)sf_me);
    sf_wait(&j->barrier);
    for (item = start; item < last; item++) {
        row = item / j->parts;
        if (!(j->draws->temperature[j->draws->slot[row]] > 0) || !isfinite(j->state[row].top)) {
            j->indices[item] = j->state[row].at;
            j->values[item] = 0;
            continue;
        }
        int64_t first = item % j->parts * PART;
        int64_t stop = first + PART < j->columns ? first + PART : j->columns;
        draw_part(j, row, first, stop, &j->values[item], &j->indices[item]);
    }
}

/* out [rows] = the drawn tokens of x [rows, columns], without NaN. SF_BAD_INDEX for a row whose
 * slot does not exist. */
SF_EXPORT int sf_draw(sf_context *context, const float *x, int64_t rows, int64_t columns,
                      const sf_draws *draws, int64_t *out, int threads) {
    int scratch = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (draws->slot[row] < 0 || draws->slot[row] >= draws->slots) return SF_BAD_INDEX;
        scratch |= filtered(draws, draws->slot[row], columns);
    }
    int64_t parts = (columns + PART - 1) / PART, items = rows * parts;
    if (rows * columns < 1 << 14) threads = 1;
    size_t states = ((size_t)rows * sizeof(row_state) + 63) / 64 * 64;
    size_t per_thread = (size_t)(columns + SF_CHUNK) * 8 + SF_BINS * sizeof(double) + 128;
    per_thread = scratch ? per_thread / 64 * 64 : 0;
    size_t results = ((size_t)items * 16 + 63) / 64 * 64;
    if (sf_grow(context, states + results + per_thread * (size_t)threads)) return SF_NO_MEMORY;
    uint8_t *memory = context->memory;
    int64_t *indices = (int64_t *)(memory + states);
    job j = {x, rows, columns, parts, draws, (row_state *)memory, (float *)(indices + items),
             indices, memory + states + results, per_thread, {0, 0, 0}};
    sf_run(threads, task, &j);
    for (int64_t row = 0; row < rows; row++) {
        int64_t best = row * parts;
        for (int64_t i = best + 1; i < (row + 1) * parts; i++)
            if (j.values[i] > j.values[best] ||
                (j.values[i] == j.values[best] && indices[i] < indices[best]))
                best = i;
        out[row] = indices[best];
    }
    return SF_OK;
}
