/* What a drafter of blocks does in a round, in one call each: drafting, and catching up. Each step
 * is another file's. Called one by one from Python they took as long again as reading the
 * drafter's weights. */
#include <math.h>
#include <string.h>

#include "act.h"
#include "draft.h"

/* --- drafting -------------------------------------------------------------------------------- */

/* What the rows of a block see in a layer. */
typedef struct {
    const int64_t *mask; /* of blocks of one row, of two, and so on */
    int64_t window, from_anchor; /* as in Visibility */
} sf_visible;

/* BlockDrafter of kernels/drafting.py, by address. */
typedef struct {
    sf_live live; /* pages and steps are each call's */
    const sf_segment *table;
    const float *mask_embedding; /* or NULL */
    const sf_layer_weights *const *layer; /* by layer, like the next two */
    const sf_kv *const *kv;
    const sf_visible *visible;
    const float *norm;
    const sf_linear *head;
    const sf_segment *before;
    const sf_linear *after;
    const int64_t *ids; /* or NULL */
    const float *of_hidden, *of_token; /* of the confidence head, or NULL */
    int64_t layers, hidden, first_row, filler, first_key, most_rows;
    float eps, embedding_scale;
} sf_block;

/* A call's intermediate results. */
typedef struct {
    int64_t *tokens, *keys, *positions, *rows, *spans, *mask, *oldest, *picked;
    int32_t *tables;
    float *x, *hidden, *logits, *chances;
} sf_block_work;

static sf_block_work place(const sf_block *b, int64_t count, int64_t most, uint8_t *memory,
                           size_t *bytes) {
    int64_t steps = b->live.steps, all = count * (b->first_row + steps);
    size_t at = 0;
    sf_block_work w;
#define PLACE(name, items)                                                                        \
    w.name = (void *)(memory + sf_reserve(&at, (size_t)(items) * sizeof *w.name))
    PLACE(tokens, count);
    PLACE(keys, count * (steps + 1));
    PLACE(positions, count * (steps + 1));
    PLACE(rows, 4 * all);
    PLACE(spans, 2 * count);
    PLACE(mask, all);
    PLACE(oldest, all);
    PLACE(picked, count * steps);
    PLACE(tables, count * b->live.pages);
    PLACE(x, all * b->hidden);
    PLACE(hidden, count * steps * b->hidden);
    PLACE(logits, count * most * b->head->outputs);
    PLACE(chances, count * steps);
#undef PLACE
    *bytes = at;
    return w;
}

static void look(const sf_block *b, const sf_visible *seen, int64_t count, int64_t rows,
                 const int64_t *keys, int64_t *mask, int64_t *oldest) {
    for (int64_t i = 0; i < count * rows; i++) {
        mask[i] = seen->mask[rows * (rows - 1) / 2 + i % rows];
        int64_t first = seen->from_anchor ? keys[i - i % rows] - seen->window
                                          : keys[i] - (seen->window - 1);
        oldest[i] = first < b->first_key ? b->first_key : first;
    }
}

/* x: the hidden states of the blocks' rows. */
static int run_layers(sf_context *context, const sf_block *b, const sf_block_work *w,
                      int64_t count, int threads) {
    int64_t rows = b->first_row + b->live.steps, all = count * rows;
    const int64_t *positions = w->rows + all, *keys = positions + all;
    int code = sf_embed(b->table, w->rows, all, w->x, threads);
    for (int64_t i = 0; b->mask_embedding && i < all; i++)
        if (i % rows) memcpy(w->x + i * b->hidden, b->mask_embedding, (size_t)b->hidden * 4);
    for (int64_t i = 0; b->embedding_scale != 1.0f && i < all * b->hidden; i++)
        w->x[i] *= b->embedding_scale;
    for (int64_t layer = 0; !code && layer < b->layers; layer++) {
        const sf_visible *seen = &b->visible[layer];
        look(b, seen, count, rows, keys, w->mask, w->oldest);
        sf_batch batch = {all, b->live.pages, positions, keys, keys + all, w->keys, w->mask,
                          w->tables, b->first_key, seen->window ? w->oldest : NULL};
        code = sf_layers(context, &b->layer[layer], 1, &batch, &b->kv[layer], NULL, w->x, NULL,
                         NULL, NULL, threads);
    }
    return code;
}

/* The chance of each draft, from the normed row that gave it and the token before it. */
static void be_confident(const sf_block *b, const sf_block_work *w, int64_t count) {
    for (int64_t i = 0; i < b->live.steps * count; i++) {
        const float *row = w->hidden + i * b->hidden;
        int64_t before = i < count ? w->tokens[i] : w->picked[i - count];
        vf sum = vf_zero();
        for (int k = 0, n = (int)b->hidden; k < n; k += 16)
            sum = vf_fma(sf_load_upto(row + k, n - k), sf_load_upto(b->of_hidden + k, n - k), sum);
        w->chances[i] = 1.0f / (1.0f + expf(-(vf_hsum(sum) + b->of_token[before])));
    }
}

/* The drafts, step by step, from the rows that draft. */
static int pick(sf_context *context, const sf_block *b, const sf_block_work *w, int64_t count,
                int64_t most, int threads) {
    int64_t steps = b->live.steps, rows = b->first_row + steps;
    size_t width = (size_t)b->hidden * 4;
    for (int64_t i = 0; i < steps * count; i++)
        memcpy(w->hidden + i * b->hidden,
               w->x + (i % count * rows + b->first_row + i / count) * b->hidden, width);
    for (int64_t step = 0; step < steps; step += most) {
        int64_t part = steps - step < most ? steps - step : most, at = step * count;
        const int64_t *current = step ? w->picked + at - count : w->tokens;
        int code = sf_head(context, b->norm, b->eps, b->head, w->hidden + at * b->hidden,
                           part * count, w->logits, NULL, threads);
        if (!code)
            code = sf_markov(context, b->before, b->after, current, b->ids, w->logits, part, count,
                             w->picked + at, threads);
        if (code) return code;
        if (!b->of_hidden)
            sf_likeliest(w->logits, part * count, b->head->outputs, b->ids, w->picked + at, 1,
                         w->chances + at, 1);
    }
    if (!b->of_hidden) return SF_OK;
    sf_norm(w->hidden, steps * count, b->hidden, b->norm, b->eps, w->hidden);
    be_confident(b, w, count);
    return SF_OK;
}

/* `BlockDrafter.draft`: the likeliest drafts of blocks behind `slots` [count], and their chances,
 * [count][steps] each. `work` holds what lies between the calls that use `context`. Returns SF_OK,
 * SF_NO_MEMORY, or SF_BAD_INDEX for a token outside a table. */
SF_EXPORT int sf_draft_blocks(sf_context *context, sf_context *work, sf_block *b,
                              const int64_t *slots, int64_t count, int64_t steps, int64_t pages,
                              int64_t *tokens, float *chances, int threads) {
    int64_t most = b->most_rows / count;
    size_t bytes;
    b->live.steps = steps, b->live.pages = pages;
    most = most < 1 ? 1 : most < steps ? most : steps;
    place(b, count, most, NULL, &bytes);
    if (sf_grow(work, bytes)) return SF_NO_MEMORY;
    sf_block_work w = place(b, count, most, work->memory, &bytes);
    sf_live_rows(&b->live, slots, count, w.tokens, w.keys, w.positions, w.tables);
    sf_block_rows(w.tokens, w.keys, w.positions, count, b->first_row + steps, b->filler, w.rows,
                  w.spans);
    int code = run_layers(context, b, &w, count, threads);
    if (!code) code = pick(context, b, &w, count, most, threads);
    for (int64_t i = 0; !code && i < count * steps; i++) {
        tokens[i] = w.picked[i % steps * count + i / steps];
        chances[i] = w.chances[i % steps * count + i / steps];
    }
    return code;
}

/* --- catching up ----------------------------------------------------------------------------- */

/* FeatureWeights of kernels/drafting.py, by address. */
typedef struct {
    const sf_linear *fuse, *kv;
    const float *norm;
    const sf_layer_weights *keys; /* by layer, as sf_store_keys wants them */
    int64_t layers;
    float eps;
} sf_features;

/* `Drafting.write_features` of the rows of a batch: of `spans` spans with `counts` rows each from
 * `first` on, or with NULL of all. `served` by slot, or NULL. */
SF_EXPORT int sf_write_features(sf_context *context, sf_context *work, const sf_features *f,
                                const sf_batch *batch, const float *features,
                                const uint8_t *served, const int64_t *first,
                                const int64_t *counts, int64_t spans, int64_t last_position,
                                const sf_kv *const *kv, int threads) {
    const int64_t none = 0, inputs = f->fuse->inputs;
    if (!counts) first = &none, counts = &batch->rows, spans = 1;
    int64_t rows = 0, row = 0, hidden = f->fuse->outputs, width = f->kv->outputs;
    for (int64_t i = 0; i < spans; i++) rows += counts[i];
    size_t at = 0, keys_at = sf_reserve(&at, (size_t)rows * 8);
    size_t positions_at = sf_reserve(&at, (size_t)rows * 8);
    size_t slots_at = sf_reserve(&at, (size_t)rows * 8);
    size_t inputs_at = sf_reserve(&at, (size_t)(rows * inputs) * 4);
    size_t fused_at = sf_reserve(&at, (size_t)(rows * hidden) * 4);
    size_t projected_at = sf_reserve(&at, (size_t)(rows * width) * 4);
    if (sf_grow(work, at)) return SF_NO_MEMORY;
    int64_t *keys = (int64_t *)(work->memory + keys_at);
    int64_t *positions = (int64_t *)(work->memory + positions_at);
    int64_t *slots = (int64_t *)(work->memory + slots_at);
    float *gathered = (float *)(work->memory + inputs_at);
    float *fused = (float *)(work->memory + fused_at);
    float *projected = (float *)(work->memory + projected_at);
    for (int64_t i = 0; i < spans; i++) {
        for (int64_t j = first[i]; j < first[i] + counts[i]; j++, row++) {
            int64_t slot = batch->row_slot[j];
            keys[row] = batch->key_index[j];
            positions[row] = keys[row] < last_position ? keys[row] : last_position;
            slots[row] = slot >= 0 && served && !served[slot] ? -1 : slot;
        }
        if (counts[i] == rows)
            gathered = (float *)features + first[i] * inputs; /* neighbours: no copy */
        else
            memcpy(gathered + (row - counts[i]) * inputs, features + first[i] * inputs,
                   (size_t)(counts[i] * inputs) * 4);
    }
    sf_batch own = *batch;
    own.rows = rows, own.positions = positions, own.key_index = keys, own.row_slot = slots;
    own.mask = NULL;
    int code = sf_head(context, NULL, 0.0f, f->fuse, gathered, rows, fused, NULL, threads);
    if (code) return code;
    sf_norm(fused, rows, hidden, f->norm, f->eps, fused);
    code = sf_head(context, NULL, 0.0f, f->kv, fused, rows, projected, NULL, threads);
    for (int64_t layer = 0; !code && layer < f->layers; layer++)
        sf_store_keys(&f->keys[layer], &own, kv[layer], projected + layer * (width / f->layers),
                      width, threads);
    return code;
}
