/* Span attention over paged keys, for up to 8 query vectors that share a kv head: the heads of one
 * group, and adjacent rows of one request.
 *
 * Every sum runs over the keys one by one from key 0, and an invisible key adds an exact zero. A
 * row's result therefore depends on the sequence of its visible keys alone: not on the paging, on
 * the batch, or on the siblings that stand between its ancestors in a tree.
 */
#include "vmath.h"

#define MAX_VECTORS 8
#define EACH_M(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define UNROLL _Pragma("GCC unroll 32")

static size_t element_bytes(const sf_layer_weights *w) { return w->kv_kind == SF_BF16 ? 2 : 4; }

/* Bytes of one tile, keys and values. */
static size_t tile_bytes(const sf_layer_weights *w) {
    return 2 * SF_LANES * (size_t)w->head_dim * element_bytes(w);
}

static const uint8_t *find_tile(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                                int64_t slot, int64_t block, int tile, int kv_head) {
    int64_t id = batch->tables[slot * batch->table_stride + block];
    return kv->data + ((id * w->kv_heads + kv_head) * kv->tiles + tile) * tile_bytes(w);
}

void sf_write_row(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv, int64_t row,
                  int kv_head, const float *k, const float *v) {
    int64_t key = batch->key_index[row], offset = key % kv->block_size;
    int lane = (int)(offset % SF_LANES), n = w->head_dim;
    uint8_t *tile = (uint8_t *)find_tile(w, batch, kv, batch->row_slot[row], key / kv->block_size,
                                         (int)(offset / SF_LANES), kv_head);
    if (w->kv_kind == SF_BF16) {
        uint16_t *keys = (uint16_t *)tile, *values = keys + SF_LANES * n;
        uint16_t *column = values + (lane / 2) * 32 + (lane & 1);
        for (int d = 0; d < n; d++) {
            if (k) keys[(d / 2) * 32 + lane * 2 + (d & 1)] = sf_float_to_bf16(k[d]);
            if (v) column[(d / 16) * 256 + (d % 16) * 2] = sf_float_to_bf16(v[d]);
        }
    } else {
        float *keys = (float *)tile, *values = keys + SF_LANES * n;
        for (int d = 0; d < n; d++) {
            if (k) keys[d * SF_LANES + lane] = k[d];
            if (v) values[(d / 16) * 256 + lane * 16 + d % 16] = v[d];
        }
    }
}

/* What one row sees. */
typedef struct {
    int64_t limit; /* keys from here on are invisible */
    int64_t start; /* first key of the span; limit without a mask */
    uint64_t mask;
} row_view;

static row_view view_of(const sf_batch *batch, int64_t row) {
    uint64_t mask = batch->mask ? (uint64_t)batch->mask[row] : ~0ull;
    row_view view = {batch->key_index[row] + 1, batch->key_index[row] + 1, 0};
    if (mask == ~0ull) return view; /* no mask: causal */
    view.start = batch->span_start[batch->row_slot[row]];
    view.mask = mask;
    view.limit = view.start + (mask ? 64 - __builtin_clzll(mask) : 0);
    return view;
}

/* Bit i: key first + i is visible. */
static uint32_t visible16(const row_view *view, int64_t first) {
    int64_t before = view->start - first;
    if (before >= 16) return 0xffff;
    if (before > 0) return (((1u << before) - 1u) | (uint32_t)(view->mask << before)) & 0xffff;
    return -before < 64 ? (uint32_t)(view->mask >> -before) & 0xffff : 0;
}

/* Raw scores of 16 keys for M query vectors: s[m * stride .. + 16]. */
SF_INLINE void score_tile(const int M, const int bf16, const float *const *q, const uint8_t *tile,
                          int n, float *s, int64_t stride) {
    vf acc[MAX_VECTORS];
    UNROLL for (int m = 0; m < M; m++) acc[m] = vf_zero();
    for (int d = 0; d < n; d += 2) {
        vf even, odd;
        if (bf16) {
            vi pair = vb_load((const uint16_t *)tile + d * SF_LANES);
            even = vb_even(pair);
            odd = vb_odd(pair);
        } else {
            even = vf_load((const float *)tile + d * SF_LANES);
            odd = vf_load((const float *)tile + (d + 1) * SF_LANES);
        }
        UNROLL for (int m = 0; m < M; m++) {
            acc[m] = vf_fma(vf_set1(q[m][d]), even, acc[m]);
            acc[m] = vf_fma(vf_set1(q[m][d + 1]), odd, acc[m]);
        }
    }
    UNROLL for (int m = 0; m < M; m++) vf_store(s + m * stride, acc[m]);
}

/* The keys that a unit of work reads. */
typedef struct {
    const uint8_t **tile;
    int32_t *size; /* keys of each tile below the limit */
    int64_t tiles;
} tile_list;

/* out[m][16 D] = sum over keys of p[m][key] * V[key][16 D], and with `total` the sums of p too. */
SF_INLINE void mix(const int M, const int D, const int bf16, const int with_total,
                   const tile_list *list, int64_t offset, const float *p, int64_t stride,
                   float *const *out, int column, vf *total) {
    vf acc[MAX_VECTORS * 2];
    UNROLL for (int i = 0; i < M * D; i++) acc[i] = vf_zero();
    if (with_total) UNROLL for (int m = 0; m < M; m++) total[m] = vf_zero();
    for (int64_t t = 0; t < list->tiles; t++) {
        const uint8_t *values = list->tile[t] + offset;
        int size = list->size[t];
        for (int j = 0; j < size; j += 1 + bf16) {
            vf v[4];
            UNROLL for (int c = 0; c < D; c++) {
                if (bf16) {
                    vi pair = vb_load((const uint16_t *)values + c * 256 + j * 16);
                    v[c] = vb_even(pair);
                    v[D + c] = vb_odd(pair);
                } else {
                    v[c] = vf_load((const float *)values + c * 256 + j * 16);
                }
            }
            UNROLL for (int half = 0; half < 1 + bf16; half++) {
                /* A key past the end is skipped, not weighted by zero: it may hold anything. */
                if (half && j + 1 >= size) break;
                UNROLL for (int m = 0; m < M; m++) {
                    vf weight = vf_set1(p[m * stride + j + half]);
                    UNROLL for (int c = 0; c < D; c++)
                        acc[m * D + c] = vf_fma(weight, v[half * D + c], acc[m * D + c]);
                    if (with_total) total[m] = vf_add(total[m], weight);
                }
            }
        }
        p += size;
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int c = 0; c < D; c++)
            vf_store(out[m] + column + 16 * c, vf_div(acc[m * D + c], total[m]));
}

/* The softmax's numerators over keys [0, limit) of one vector, in place; invisible keys get 0. */
static void exponentiate(float *s, int64_t limit, const row_view *view) {
    vf low = vf_set1(-__builtin_inff()), best = low;
    for (int64_t k = 0; k < limit; k += 16)
        best = vf_max(best, vf_select(visible16(view, k), vf_load(s + k), low));
    vf largest = vf_set1(vf_hmax(best));
    for (int64_t k = 0; k < limit; k += 16) {
        vf p = vf_exp(vf_sub(vf_load(s + k), largest));
        vf_store(s + k, vf_select(visible16(view, k), p, vf_zero()));
    }
}

typedef struct {
    const float *q[MAX_VECTORS];
    float *out[MAX_VECTORS];
    row_view view[MAX_VECTORS];
    tile_list list;
    float *scores;
    int64_t stride, limit;
    int head_dim;
} unit;

#define ATTEND(NAME, M, BF16)                                                                      \
    static void NAME##_##M(const unit *u) {                                                        \
        const int n = u->head_dim;                                                                 \
        const int64_t width = (BF16) ? 2 : 4, panel = SF_LANES * 16 * width;                       \
        const int64_t offset = SF_LANES * n * width;                                               \
        float *s = u->scores;                                                                      \
        for (int64_t t = 0; t < u->list.tiles; s += u->list.size[t++])                             \
            score_tile(M, BF16, u->q, u->list.tile[t], n, s, u->stride);                           \
        for (int m = 0; m < M; m++)                                                                \
            exponentiate(u->scores + m * u->stride, u->limit, &u->view[m]);                        \
        vf total[MAX_VECTORS]; \
        int d = n >= 32 ? 32 : 16;                                                                 \
        if (n >= 32)                                                                               \
            mix(M, 2, BF16, 1, &u->list, offset, u->scores, u->stride, u->out, 0, total);          \
        else                                                                                       \
            mix(M, 1, BF16, 1, &u->list, offset, u->scores, u->stride, u->out, 0, total);          \
        for (; d + 32 <= n; d += 32)                                                               \
            mix(M, 2, BF16, 0, &u->list, offset + d / 16 * panel, u->scores, u->stride, u->out, d, \
                total);                                                                            \
        if (d < n)                                                                                 \
            mix(M, 1, BF16, 0, &u->list, offset + d / 16 * panel, u->scores, u->stride, u->out, d, \
                total);                                                                            \
    }
#define ATTEND_F32(M) ATTEND(attend_f32, M, 0)
#define ATTEND_BF16(M) ATTEND(attend_bf16, M, 1)
EACH_M(ATTEND_F32)
EACH_M(ATTEND_BF16)

#define NAME_F32(M) attend_f32_##M,
#define NAME_BF16(M) attend_bf16_##M,
static void (*const attend_unit[2][MAX_VECTORS + 1])(const unit *) = {
    {0, EACH_M(NAME_F32)}, {0, EACH_M(NAME_BF16)}};

static int64_t key_limit(const sf_batch *batch, int64_t first, int64_t count) {
    int64_t limit = 0;
    for (int64_t row = first; row < first + count; row++) {
        if (batch->row_slot[row] < 0) continue;
        int64_t own = view_of(batch, row).limit;
        if (own > limit) limit = own;
    }
    return limit;
}

static int64_t tiles_for(const sf_kv *kv, int64_t keys) {
    return (keys + kv->block_size - 1) / kv->block_size * kv->tiles;
}

static int64_t score_stride(int64_t keys) { return (keys + 15) / 16 * 16 + 32; }

/* Bytes that each thread needs. */
size_t sf_attention_scratch(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv) {
    (void)w;
    int64_t keys = key_limit(batch, 0, batch->rows);
    int64_t bytes = MAX_VECTORS * score_stride(keys) * 4 + tiles_for(kv, keys) * 12;
    return (size_t)(bytes + 127) / 64 * 64;
}

static void list_tiles(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                       int64_t slot, int kv_head, int64_t limit, tile_list *list) {
    list->tiles = 0;
    for (int64_t key = 0; key < limit; key += kv->block_size)
        for (int t = 0; t < kv->tiles && key + t * SF_LANES < limit; t++) {
            int64_t size = kv->block_size - t * SF_LANES, left = limit - key - t * SF_LANES;
            if (size > SF_LANES) size = SF_LANES;
            if (size > left) size = left;
            list->size[list->tiles] = (int32_t)size;
            list->tile[list->tiles++] =
                find_tile(w, batch, kv, slot, key / kv->block_size, t, kv_head);
        }
}

/* q [rows][heads * head_dim], already rotated and scaled -> out, the same shape. Called by every
 * thread of the team; scratch is the thread's own. */
void sf_attend(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv, const float *q,
               int64_t q_stride, float *out, int64_t out_stride, uint8_t *scratch,
               sf_counter *work) {
    int group = w->heads / w->kv_heads;
    int chunk = group < MAX_VECTORS ? group : MAX_VECTORS; /* heads of a unit */
    int chunks = (group + chunk - 1) / chunk, rows_per_unit = MAX_VECTORS / chunk;
    int64_t units_per_run = (int64_t)w->kv_heads * chunks;
    int64_t keys = key_limit(batch, 0, batch->rows);
    unit u = {.stride = score_stride(keys), .head_dim = w->head_dim};
    u.list.tile = (const uint8_t **)scratch;
    u.list.size = (int32_t *)(scratch + 8 * tiles_for(kv, keys));
    u.scores = (float *)(scratch + (12 * tiles_for(kv, keys) + 63) / 64 * 64);

    /* A run is a few adjacent rows of one request; each thread walks them in order. */
    int64_t run = 0, row = 0, count = 0, mine;
    for (;;) {
        mine = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        for (;;) {
            for (count = 1; count < rows_per_unit && row + count < batch->rows; count++)
                if (batch->row_slot[row + count] != batch->row_slot[row]) break;
            if (row >= batch->rows || run == mine / units_per_run) break;
            row += count;
            run++;
        }
        if (row >= batch->rows) return;
        int part = (int)(mine % units_per_run), kv_head = part / chunks;
        int first = kv_head * group + part % chunks * chunk;
        int heads = group - part % chunks * chunk < chunk ? group - part % chunks * chunk : chunk;
        int M = (int)count * heads;
        for (int m = 0; m < M; m++) {
            int64_t at = row + m / heads, column = (int64_t)(first + m % heads) * w->head_dim;
            u.q[m] = q + at * q_stride + column;
            u.out[m] = out + at * out_stride + column;
            if (batch->row_slot[row] < 0)
                memset(u.out[m], 0, (size_t)w->head_dim * 4);
            else
                u.view[m] = view_of(batch, at);
        }
        if (batch->row_slot[row] < 0) continue;
        u.limit = key_limit(batch, row, count);
        list_tiles(w, batch, kv, batch->row_slot[row], kv_head, u.limit, &u.list);
        attend_unit[w->kv_kind == SF_BF16][M](&u);
    }
}
