/* Decoder layers, one after the other, and the final norm with the head: a single task for the team
 * each, with a barrier wherever a step reads what other threads wrote. */
#include <stdlib.h>
#include <string.h>

#include "act.h"
#include "team.h"

#define STORE_ROWS 16 /* fewer rows of keys do not pay for waking other threads */
#define COLUMNS 256 /* of a row, handed to one thread; a multiple of SF_BLOCK */

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

static void norm_rows(const float *x, const float *weight, float eps, const sf_acts *acts,
                      float *buffer) {
    int64_t row, last;
    sf_share(acts->rows, &row, &last);
    for (; row < last; row++) {
        sf_rms_norm(x + row * acts->inputs, weight, eps, acts->inputs, buffer);
        sf_acts_put(acts, row, 0, acts->inputs, buffer);
    }
}

/* Rows of `x` as the input of a linear, or of silu(gate) * up where x is [gate | up]. */
static void put_rows(const float *x, int64_t stride, int gated, const sf_acts *acts) {
    int64_t parts = (acts->inputs + COLUMNS - 1) / COLUMNS, item, last;
    sf_share(acts->rows * parts, &item, &last);
    for (; item < last; item++) {
        int64_t row = item / parts, first = item % parts * COLUMNS;
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

/* Per row and head: norms and rotation of q and k in place, and the write of k and v. */
static void prepare_heads(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                          float *qkv, int64_t stride) {
    int64_t heads = w->heads + 2 * w->kv_heads, half = w->head_dim / 2, item, last;
    sf_share(batch->rows * heads, &item, &last);
    for (; item < last; item++) {
        int64_t row = item / heads, head = item % heads;
        float *x = qkv + row * stride + head * w->head_dim;
        if (batch->row_slot[row] < 0) continue;
        if (head >= w->heads + w->kv_heads) {
            sf_write_row(w, batch, kv, row, (int)(head - w->heads - w->kv_heads), NULL, x);
            continue;
        }
        int is_q = head < w->heads;
        const float *norm = is_q ? w->q_norm : w->k_norm;
        const float *cos = w->cos + batch->positions[row] * half;
        const float *sin = w->sin + batch->positions[row] * half;
        if (norm) sf_rms_norm(x, norm, w->eps, w->head_dim, x);
        rotate(x, cos, sin, (int)half, is_q ? w->scale : 1.0f);
        if (!is_q) sf_write_row(w, batch, kv, row, (int)(head - w->heads), x, NULL);
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
    sf_acts acts[4];
    float *qkv, *attended, *inner;
    uint8_t *scratch;
    size_t per_thread;
    sf_counter work[5];
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

static void run_step(layers_job *j, layer_step *step, const float *inputs) {
    const sf_layer_weights *w = step->w;
    float *buffer = j->buffers + (int64_t)sf_me * (w->hidden + 16);
    if (inputs)
        put_rows(inputs, w->qkv.inputs, 0, &step->acts[0]);
    else
        norm_rows(j->x, w->input_norm, w->eps, &step->acts[0], buffer);
    sf_wait(&j->barrier);
    sf_gemm(&w->qkv, &step->acts[0], (sf_out){step->qkv, w->qkv.outputs, 0, NULL}, &step->work[0],
            sf_team);
    sf_wait(&j->barrier);
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
              step->scratch + step->per_thread * (size_t)sf_me, &step->work[1]);
    sf_wait(&j->barrier);
    put_rows(step->attended, w->o.inputs, 0, &step->acts[1]);
    sf_wait(&j->barrier);
    sf_gemm(&w->o, &step->acts[1], (sf_out){j->x, w->hidden, 1, NULL}, &step->work[2], sf_team);
    if (!w->gate_up.segments) return;
    sf_wait(&j->barrier);
    norm_rows(j->x, w->post_norm, w->eps, &step->acts[2], buffer);
    sf_wait(&j->barrier);
    sf_gemm(&w->gate_up, &step->acts[2], (sf_out){step->inner, w->gate_up.outputs, 0, NULL},
            &step->work[3], sf_team);
    sf_wait(&j->barrier);
    put_rows(step->inner, w->gate_up.outputs, 1, &step->acts[3]);
    sf_wait(&j->barrier);
    sf_gemm(&w->down, &step->acts[3], (sf_out){j->x, w->hidden, 1, NULL}, &step->work[4], sf_team);
}

static void layers_task(void *argument) {
    layers_job *j = argument;
    for (int64_t i = 0; i < j->count; i++) {
        if (i) sf_wait(&j->barrier);
        capture_rows(j->capture, i, j->x, j->batch->rows, j->steps[i].w->hidden);
        run_step(j, &j->steps[i], i ? NULL : j->inputs);
    }
}

/* Where a layer's scratch memory lies from `cursor` on; the first byte behind it. `memory` NULL:
 * how much it is. */
static size_t place_step(layer_step *step, int64_t rows, const sf_batch *batch, int threads,
                         size_t cursor, uint8_t *memory) {
    const sf_layer_weights *w = step->w;
    const sf_linear *linear[4] = {&w->qkv, &w->o, &w->gate_up, &w->down};
    int64_t wanted = step->outputs ? step->outputs->rows : rows;
    size_t place[4][2];
    step->per_thread = sf_attention_scratch(w, batch, step->kv);
    for (int i = 0; i < 4; i++)
        step->acts[i] = sf_reserve_acts(&cursor, linear[i], i ? wanted : rows, place[i]);
    size_t qkv_at = sf_reserve(&cursor, (size_t)(rows * w->qkv.outputs) * 4);
    size_t attended_at = sf_reserve(&cursor, (size_t)(wanted * w->o.inputs) * 4);
    size_t inner_at = sf_reserve(&cursor, (size_t)(wanted * w->gate_up.outputs) * 4);
    size_t scratch_at = sf_reserve(&cursor, step->per_thread * (size_t)threads);
    if (!memory) return cursor;
    for (int i = 0; i < 4; i++) sf_place_acts(&step->acts[i], memory, place[i]);
    step->qkv = (float *)(memory + qkv_at), step->attended = (float *)(memory + attended_at);
    step->inner = (float *)(memory + inner_at), step->scratch = memory + scratch_at;
    memset(step->work, 0, sizeof(step->work));
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
        place_step(&steps[i], rows, batch, threads, first, memory);
    }
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
    sf_acts acts;
    sf_counter work;
    sf_barrier barrier;
} head_job;

static void head_task(void *argument) {
    head_job *j = argument;
    float *buffer = j->buffers + (int64_t)sf_me * (j->linear->inputs + 16);
    if (j->norm)
        norm_rows(j->x, j->norm, j->eps, &j->acts, buffer);
    else
        put_rows(j->x, j->linear->inputs, 0, &j->acts);
    sf_wait(&j->barrier);
    sf_gemm(j->linear, &j->acts, j->out, &j->work, sf_team);
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
    sf_acts acts = sf_reserve_acts(&cursor, linear, rows, place);
    size_t buffers_at = sf_reserve(&cursor, (size_t)threads * (size_t)(linear->inputs + 16) * 4);
    int64_t cells = threads * rows;
    if (columns) {
        best_at = sf_reserve(&cursor, (size_t)cells * sizeof(sf_best));
        scratch_at = sf_reserve(&cursor, (size_t)cells * SF_MOST_PANELS * 16 * 4);
    }
    if (sf_grow(context, cursor)) return SF_NO_MEMORY;
    uint8_t *memory = context->memory;
    sf_place_acts(&acts, memory, place);
    sf_out out = {logits, linear->outputs, 0, NULL};
    if (columns) {
        out = (sf_out){(float *)(memory + scratch_at), 0, 0, (sf_best *)(memory + best_at)};
        for (int64_t i = 0; i < cells; i++) out.best[i] = (sf_best){-__builtin_inff(), -1};
    }
    head_job job = {norm, eps, linear, x, out, (float *)(memory + buffers_at), acts, {0},
                    {0, 0, 0}};
    sf_run(threads, head_task, &job);
    if (columns) choose_best(out.best, rows, threads, columns);
    return SF_OK;
}
