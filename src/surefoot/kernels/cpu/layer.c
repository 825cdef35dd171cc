/* Decoder layers, one after the other, and the final norm with the head: a single task for the team
 * each, with a barrier wherever a step reads what other threads wrote. */
#include <stdlib.h>
#include <string.h>

#include "act.h"
#include "draft.h"
#include "team.h"

#define STORE_ROWS 16 /* fewer rows of keys do not pay for waking other threads */
#define COLUMNS 256 /* of a row, handed to one thread; a multiple of SF_BLOCK */
#define ALONE 8192  /* inputs of a linear that each thread prepares for itself: sharing takes longer */

int sf_grow(sf_context *context, size_t bytes) {
    if (bytes <= context->capacity) return SF_OK;
    free(context->memory);
    context->capacity = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    context->memory = aligned_alloc(4096, context->capacity);
    if (context->memory) return SF_OK;
    context->capacity = 0;
    return SF_NO_MEMORY;
}

SF_EXPORT void sf_release(sf_context *context) {
    free(context->memory);
    context->memory = NULL;
    context->capacity = 0;
}

/* The rows of a linear's input: each thread's own copy, or one for all. */
typedef struct {
    sf_acts acts; /* the first thread's */
    size_t apart; /* bytes from one thread's to the next; 0: all have the same */
} sf_input;

static sf_acts own_acts(const sf_input *input) {
    sf_acts own = input->acts;
    own.q += input->apart * (size_t)sf_me;
    own.f += input->apart / 4 * (size_t)sf_me;
    return own;
}

/* Wait until all rows are there, where others prepare some. */
static void await_input(const sf_input *input, sf_barrier *barrier) {
    if (!input->apart) sf_wait(barrier);
}

/* The part of `count` items that falls to the calling thread: all, if nobody else does any. */
static void share_of(const sf_input *input, int64_t count, int64_t *first, int64_t *last) {
    *first = 0, *last = count;
    if (!input->apart) sf_share(count, first, last);
}

static void norm_rows(const float *x, const float *weight, float eps, const sf_input *input,
                      float *buffer) {
    sf_acts own = own_acts(input), *acts = &own;
    int64_t row, last;
    share_of(input, acts->rows, &row, &last);
    for (; row < last; row++) {
        sf_rms_norm(x + row * acts->inputs, weight, eps, acts->inputs, buffer);
        sf_acts_put(acts, row, 0, acts->inputs, buffer);
    }
}

/* Rows of `x` as the input of a linear, or of silu(gate) * up where x is [gate | up]. Of few rows
 * threads share the columns, about those that they have computed; many are read one by one. */
static void put_rows(const float *x, int64_t stride, int gated, const sf_input *input) {
    sf_acts own = own_acts(input), *acts = &own;
    int64_t parts = (acts->inputs + COLUMNS - 1) / COLUMNS, item, last;
    const int by_columns = acts->rows <= SF_MAX_ROWS;
    share_of(input, acts->rows * parts, &item, &last);
    for (; item < last; item++) {
        int64_t row = by_columns ? item % acts->rows : item / parts;
        int64_t first = (by_columns ? item / acts->rows : item % parts) * COLUMNS;
        int n = (int)(acts->inputs - first < COLUMNS ? acts->inputs - first : COLUMNS);
        const float *from = x + row * stride + first;
        float buffer[COLUMNS];
        if (gated) {
            const float *up = from + acts->inputs;
            for (int i = 0; i < n; i += 16) {
                vf gate = vf_silu(sf_load_upto(from + i, n - i));
                sf_store_upto(buffer + i, vf_mul(gate, sf_load_upto(up + i, n - i)), n - i);
            }
            from = buffer;
        }
        sf_acts_put(acts, row, (int)first, n, from);
    }
}

/* Half-split rotation of one head, then `scale`. */
static void rotate(float *x, const float *cos, const float *sin, int half, float scale) {
    for (int i = 0; i < half; i += 16) {
        int n = half - i;
        vf a = sf_load_upto(x + i, n), b = sf_load_upto(x + half + i, n);
        vf c = sf_load_upto(cos + i, n), s = sf_load_upto(sin + i, n);
        vf first = vf_sub(vf_mul(a, c), vf_mul(b, s));
        vf second = vf_add(vf_mul(b, c), vf_mul(a, s));
        sf_store_upto(x + i, vf_mul(first, vf_set1(scale)), n);
        sf_store_upto(x + half + i, vf_mul(second, vf_set1(scale)), n);
    }
}

/* Norm and rotation of a row's query or key in place. */
static void turn_head(const sf_layer_weights *w, const sf_batch *batch, int64_t row, float *x,
                      const float *norm, float scale) {
    int64_t half = w->head_dim / 2, at = batch->positions[row] * half;
    if (norm) sf_rms_norm(x, norm, w->eps, w->head_dim, x);
    rotate(x, w->cos + at, w->sin + at, (int)half, scale);
}

/* Per row and head: norms and rotation of q and k in place, and the write of k and v. Threads share
 * the heads of queries, and those of keys and values, about as they have computed them. */
static void prepare_heads(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                          float *qkv, int64_t stride) {
    const int64_t rows = batch->rows;
    float *const keys = qkv + (int64_t)w->heads * w->head_dim;
    float *const values = keys + (int64_t)w->kv_heads * w->head_dim;
    int64_t item, last;
    sf_share(rows * w->heads, &item, &last);
    for (; item < last; item++)
        if (batch->row_slot[item % rows] >= 0)
            turn_head(w, batch, item % rows,
                      qkv + item % rows * stride + item / rows * w->head_dim, w->q_norm, w->scale);
    sf_share(rows * w->kv_heads, &item, &last);
    for (; item < last; item++) {
        int64_t row = item % rows, head = item / rows, at = row * stride + head * w->head_dim;
        if (batch->row_slot[row] < 0) continue;
        turn_head(w, batch, row, keys + at, w->k_norm, 1.0f);
        sf_write_row(w, batch, kv, row, (int)head, keys + at, values + at);
    }
}

static int64_t multiplications(const sf_linear *linear, int64_t rows) {
    return rows * linear->inputs * linear->outputs;
}

/* One of the layers: its weights, its keys and values, and its scratch memory, which is that of the
 * layer before. */
typedef struct {
    const sf_layer_weights *w;
    const sf_kv *kv;
    const sf_batch *outputs; /* the rows whose results are wanted; NULL: all */
    sf_input input[4]; /* of qkv, o, gate_up and down */
    float *qkv, *attended, *inner;
    uint8_t *scratch;
    size_t per_thread;
    sf_counter *work; /* by thread: of attention, and of each linear */
} layer_step;

typedef struct {
    layer_step *steps;
    int64_t count;
    const sf_batch *batch;
    const float *inputs;  /* of the first qkv projection; NULL: the norm of x */
    const int64_t *index; /* which rows of the batch the wanted ones are, in rising order */
    const sf_capture *capture;
    float *x, *buffers;
    sf_barrier barrier;
} layers_job;

/* Move the queries and the x of wanted rows to the front. No row moves behind where it was, and a
 * repeated last one is copied onto itself before it is read again. */
static void gather_rows(const layers_job *j, const layer_step *step) {
    const sf_layer_weights *w = step->w;
    size_t queries = (size_t)(w->heads * w->head_dim) * 4, width = (size_t)w->hidden * 4;
    int64_t stride = w->qkv.outputs;
    for (int64_t row = 0; row < step->outputs->rows; row++) {
        int64_t from = j->index[row];
        memmove(step->qkv + row * stride, step->qkv + from * stride, queries);
        memmove(j->x + row * w->hidden, j->x + from * w->hidden, width);
    }
}

/* What enters a layer. Nothing writes x before all threads have passed a barrier. */
static void capture_rows(const sf_capture *c, int64_t layer, const float *x, int64_t rows,
                         int64_t hidden) {
    if (!c || c->column[layer] < 0) return;
    int64_t row, last;
    sf_share(rows, &row, &last);
    for (; row < last; row++)
        memcpy(c->features + row * c->stride + c->column[layer], x + row * hidden,
               (size_t)hidden * 4);
}

static const sf_linear *linear_of(const layer_step *step, int which) {
    const sf_layer_weights *w = step->w;
    const sf_linear *const all[4] = {&w->qkv, &w->o, &w->gate_up, &w->down};
    return all[which];
}

static sf_counter *work_of(const layer_step *step, int which) {
    return step->work + (1 + which) * sf_team;
}

/* Linear number `which`, when its rows are there. After it comes the `next` one of the step `behind`,
 * or where that is NULL the end of the task, for which others wait. */
static void multiply(layers_job *j, const layer_step *step, int which, float *y, int add,
                     const layer_step *behind, int next) {
    const sf_linear *linear = linear_of(step, which);
    sf_acts acts = own_acts(&step->input[which]);
    await_input(&step->input[which], &j->barrier);
    sf_gemm(linear, &acts, (sf_out){y, linear->outputs, add, NULL}, work_of(step, which));
    if (!behind) return;
    sf_expect(linear_of(behind, next), work_of(behind, next));
    sf_wait(&j->barrier);
}

static void run_step(layers_job *j, layer_step *step, const float *inputs) {
    const sf_layer_weights *w = step->w;
    float *buffer = j->buffers + (int64_t)sf_me * (w->hidden + 16);
    layer_step *following = step + 1 < j->steps + j->count ? step + 1 : NULL;
    if (inputs)
        put_rows(inputs, w->qkv.inputs, 0, &step->input[0]);
    else
        norm_rows(j->x, w->input_norm, w->eps, &step->input[0], buffer);
    multiply(j, step, 0, step->qkv, 0, step, 1);
    prepare_heads(w, j->batch, step->kv, step->qkv, w->qkv.outputs);
    sf_wait(&j->barrier);
    const sf_batch *batch = j->batch;
    if (step->outputs) {
        batch = step->outputs;
        if (!batch->rows) return;
        if (sf_me == 0) gather_rows(j, step);
        sf_wait(&j->barrier);
    }
    sf_attend(w, batch, step->kv, step->qkv, w->qkv.outputs, step->attended, w->o.inputs,
              step->scratch + step->per_thread * (size_t)sf_me, step->work);
    sf_wait(&j->barrier);
    put_rows(step->attended, w->o.inputs, 0, &step->input[1]);
    if (!w->gate_up.segments) {
        multiply(j, step, 1, j->x, 1, following, 0);
        return;
    }
    multiply(j, step, 1, j->x, 1, step, 2);
    norm_rows(j->x, w->post_norm, w->eps, &step->input[2], buffer);
    multiply(j, step, 2, step->inner, 0, step, 3);
    put_rows(step->inner, w->gate_up.outputs, 1, &step->input[3]);
    multiply(j, step, 3, j->x, 1, following, 0);
}

static void layers_task(void *argument) {
    layers_job *j = argument;
    for (int64_t i = 0; i < j->count; i++) {
        capture_rows(j->capture, i, j->x, j->batch->rows, j->steps[i].w->hidden);
        run_step(j, &j->steps[i], i ? NULL : j->inputs);
    }
}

/* Room for a linear's input: a copy for each of so many threads, if that is little work. */
static sf_input reserve_input(size_t *cursor, const sf_linear *linear, int64_t rows, int threads,
                              size_t place[2]) {
    size_t begin = *cursor, other[2];
    sf_input found = {sf_reserve_acts(cursor, linear, rows, place), 0};
    if (threads == 1 || rows * linear->inputs > ALONE) return found;
    found.apart = *cursor - begin;
    for (int i = 1; i < threads; i++) sf_reserve_acts(cursor, linear, rows, other);
    return found;
}

/* Where a layer's scratch memory lies from `cursor` on; the first byte behind it. `memory` NULL:
 * how much it is. */
static size_t place_step(layer_step *step, int64_t rows, const sf_batch *batch, int threads,
                         size_t cursor, uint8_t *memory) {
    const sf_layer_weights *w = step->w;
    int64_t wanted = step->outputs ? step->outputs->rows : rows;
    size_t place[4][2];
    step->per_thread = sf_attention_scratch(w, batch, step->kv);
    for (int i = 0; i < 4; i++)
        step->input[i] = reserve_input(&cursor, linear_of(step, i), i ? wanted : rows,
                                       i < 3 ? threads : 1, place[i]);
    size_t qkv_at = sf_reserve(&cursor, (size_t)(rows * w->qkv.outputs) * 4);
    size_t attended_at = sf_reserve(&cursor, (size_t)(wanted * w->o.inputs) * 4);
    size_t inner_at = sf_reserve(&cursor, (size_t)(wanted * w->gate_up.outputs) * 4);
    size_t scratch_at = sf_reserve(&cursor, step->per_thread * (size_t)threads);
    if (!memory) return cursor;
    for (int i = 0; i < 4; i++) sf_place_acts(&step->input[i].acts, memory, place[i]);
    step->qkv = (float *)(memory + qkv_at), step->attended = (float *)(memory + attended_at);
    step->inner = (float *)(memory + inner_at), step->scratch = memory + scratch_at;
    return cursor;
}

/* x [rows, hidden] becomes the output of `count` layers; `inputs` [rows, qkv.inputs] of the first
 * may be NULL. Of a layer without an MLP, x plus its attention. `outputs` and `index`
 * [outputs->rows] may be NULL: else the first rows of x become the output of these, and what the
 * others hold is unspecified. `capture` may be NULL. Returns SF_OK or SF_NO_MEMORY. */
SF_EXPORT int sf_layers(sf_context *context, const sf_layer_weights *const *w, int64_t count,
                        const sf_batch *batch, const sf_kv *const *kv, const float *inputs,
                        float *x, const sf_batch *outputs, const int64_t *index,
                        const sf_capture *capture, int threads) {
    int64_t rows = batch->rows;
    if (rows == 0 || count == 0) return SF_OK;
    const sf_linear *last = w[0]->down.segments ? &w[0]->down : &w[0]->o;
    if (4 * multiplications(last, rows) < context->serial_below) threads = 1;
    size_t first = 0, end = 0, hidden = 0;
    size_t steps_at = sf_reserve(&first, (size_t)count * sizeof(layer_step));
    for (int64_t i = 0; i < count; i++)
        if ((size_t)w[i]->hidden > hidden) hidden = (size_t)w[i]->hidden;
    size_t buffers_at = sf_reserve(&first, (size_t)threads * (hidden + 16) * 4);
    size_t counters = (size_t)(5 * threads) * sizeof(sf_counter);
    size_t work_at = sf_reserve(&first, (size_t)count * counters);
    for (int64_t i = 0; i < count; i++) {
        layer_step step = {.w = w[i], .kv = kv[i], .outputs = i == count - 1 ? outputs : NULL};
        size_t needed = place_step(&step, rows, batch, threads, first, NULL);
        if (needed > end) end = needed;
    }
    if (sf_grow(context, end)) return SF_NO_MEMORY;
    uint8_t *memory = context->memory;
    layer_step *steps = (layer_step *)(memory + steps_at);
    for (int64_t i = 0; i < count; i++) {
        steps[i].w = w[i], steps[i].kv = kv[i];
        steps[i].outputs = i == count - 1 ? outputs : NULL;
        steps[i].work = (sf_counter *)(memory + work_at + (size_t)i * counters);
        place_step(&steps[i], rows, batch, threads, first, memory);
    }
    memset(memory + work_at, 0, (size_t)count * counters);
    layers_job job = {steps, count, batch, inputs, index, capture, x,
                      (float *)(memory + buffers_at), {0, 0, 0}};
    sf_run(threads, layers_task, &job);
    return SF_OK;
}

typedef struct {
    const sf_layer_weights *w;
    const sf_batch *batch;
    const sf_kv *kv;
    float *projected;
    int64_t stride;
} store_job;

static void store_task(void *argument) {
    store_job *j = argument;
    prepare_heads(j->w, j->batch, j->kv, j->projected, j->stride);
}

/* Keys and values of the rows, and nothing else of a layer: k is normed and rotated in `projected`
 * [rows, stride], where v follows it. w has no query heads. */
SF_EXPORT void sf_store_keys(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                             float *projected, int64_t stride, int threads) {
    store_job job = {w, batch, kv, projected, stride};
    if (batch->rows < STORE_ROWS) threads = 1;
    sf_run(threads, store_task, &job);
}

typedef struct {
    const float *norm;
    float eps;
    const sf_linear *linear;
    const float *x;
    sf_out out;
    float *buffers;
    sf_input input;
    sf_counter *work; /* by thread */
    sf_barrier barrier;
} head_job;

static void head_task(void *argument) {
    head_job *j = argument;
    float *buffer = j->buffers + (int64_t)sf_me * (j->linear->inputs + 16);
    if (j->norm)
        norm_rows(j->x, j->norm, j->eps, &j->input, buffer);
    else
        put_rows(j->x, j->linear->inputs, 0, &j->input);
    await_input(&j->input, &j->barrier);
    sf_acts acts = own_acts(&j->input);
    sf_gemm(j->linear, &acts, j->out, j->work);
}

/* The largest outputs, each thread's own at first, in the order of the columns. */
static void choose_best(const sf_best *best, int64_t rows, int threads, int64_t *columns) {
    for (int64_t row = 0; row < rows; row++) {
        sf_best first = best[row];
        for (int t = 1; t < threads; t++) {
            sf_best other = best[t * rows + row];
            int better = other.value > first.value ||
                         (other.value == first.value && other.column < first.column);
            if (other.column >= 0 && (first.column < 0 || better)) first = other;
        }
        columns[row] = first.column;
    }
}

/* logits [rows, outputs] = linear(rms_norm(x)); without `norm` the linear alone. With `columns`
 * [rows] instead of logits: the column of each row's largest, the first among equals. */
SF_EXPORT int sf_head(sf_context *context, const float *norm, float eps, const sf_linear *linear,
                      const float *x, int64_t rows, float *logits, int64_t *columns, int threads) {
    if (rows == 0) return SF_OK;
    if (multiplications(linear, rows) < context->serial_below) threads = 1;
    size_t cursor = 0, place[2], best_at = 0, scratch_at = 0;
    sf_input input = reserve_input(&cursor, linear, rows, threads, place);
    size_t counters = (size_t)threads * sizeof(sf_counter);
    size_t work_at = sf_reserve(&cursor, counters);
    size_t buffers_at = sf_reserve(&cursor, (size_t)threads * (size_t)(linear->inputs + 16) * 4);
    int64_t cells = threads * rows;
    if (columns) {
        best_at = sf_reserve(&cursor, (size_t)cells * sizeof(sf_best));
        scratch_at = sf_reserve(&cursor, (size_t)cells * SF_MOST_PANELS * 16 * 4);
    }
    if (sf_grow(context, cursor)) return SF_NO_MEMORY;
    uint8_t *memory = context->memory;
    sf_place_acts(&input.acts, memory, place);
    memset(memory + work_at, 0, counters);
    sf_out out = {logits, linear->outputs, 0, NULL};
    if (columns) {
        out = (sf_out){(float *)(memory + scratch_at), 0, 0, (sf_best *)(memory + best_at)};
        for (int64_t i = 0; i < cells; i++) out.best[i] = (sf_best){-__builtin_inff(), -1};
    }
    head_job job = {norm, eps, linear, x, out, (float *)(memory + buffers_at), input,
                    (sf_counter *)(memory + work_at), {0, 0, 0}};
    sf_run(threads, head_task, &job);
    if (columns) choose_best(out.best, rows, threads, columns);
    return SF_OK;
}

/* A target's pass over `tokens` [batch->rows]: x becomes their embeddings, then the output of the
 * layers, as of sf_layers; `columns` [rows] the likeliest tokens behind, as of sf_head. */
SF_EXPORT int sf_target(sf_context *context, const sf_segment *table, const int64_t *tokens,
                        const sf_layer_weights *const *w, int64_t count, const sf_batch *batch,
                        const sf_kv *const *kv, float *x, const sf_capture *capture,
                        const float *norm, float eps, const sf_linear *head, int64_t *columns,
                        int threads) {
    int code = sf_embed(table, tokens, batch->rows, x, threads);
    if (code) return code;
    code = sf_layers(context, w, count, batch, kv, NULL, x, NULL, NULL, capture, threads);
    if (code) return code;
    return sf_head(context, norm, eps, head, x, batch->rows, NULL, columns, threads);
}
