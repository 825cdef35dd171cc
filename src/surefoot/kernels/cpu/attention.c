/* Span attention over paged keys. A unit of work is a few adjacent rows of one request with the heads
 * that share a kv head: all of their vectors meet a tile of keys while it is in the first-level
 * cache, and a bf16 tile is widened once for all of them.
 *
 * A row's result depends on the sequence of its visible keys alone (attend.h): not on the unit, on
 * the paging, on the batch, or on the siblings that stand between its ancestors in a tree, which
 * add exact zeros.
 */
#include "attend.h"
#include "team.h"

#define MOST_VECTORS 48   /* of a unit */
#define SCORES (1 << 18)  /* floats of scores that a unit should not exceed */
#define MIXED_TILES 4     /* that pass a mix together; their values stay in the nearest cache */
#define READING 15        /* vectors that take as long as reading a unit's keys, and as */
#define WIDENING 12       /* widening them */

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

/* Of one layer: keys and values from `source` to `target` [count][moves], request by request. A
 * row's targets rise and are not above their sources, so that no source is overwritten too soon. */
SF_EXPORT void sf_move_keys(const sf_kv *kv, int64_t kv_heads, int64_t head_dim, int64_t bytes,
                            const int32_t *tables, int64_t stride, const int64_t *source,
                            const int64_t *target, int64_t count, int64_t moves) {
    const int64_t half = SF_LANES * head_dim * bytes;
    for (int64_t i = 0; i < count * moves; i++) {
        if (source[i] == target[i]) continue;
        const int64_t end[2] = {source[i], target[i]};
        for (int64_t head = 0; head < kv_heads; head++) {
            uint8_t *tile[2];
            int64_t lane[2];
            for (int e = 0; e < 2; e++) {
                const int64_t offset = end[e] % kv->block_size;
                const int64_t id = tables[i / moves * stride + end[e] / kv->block_size];
                tile[e] = kv->data +
                          ((id * kv_heads + head) * kv->tiles + offset / SF_LANES) * 2 * half;
                lane[e] = offset % SF_LANES;
            }
            for (int64_t d = 0; d < head_dim; d++) {
                int64_t k[2], v[2];
                for (int e = 0; e < 2; e++) {
                    k[e] = bytes == 2 ? d / 2 * 32 + lane[e] * 2 + (d & 1) : d * 16 + lane[e];
                    v[e] = bytes == 2
                               ? d / 16 * 256 + lane[e] / 2 * 32 + d % 16 * 2 + (lane[e] & 1)
                               : d / 16 * 256 + lane[e] * 16 + d % 16;
                }
                memcpy(tile[1] + k[1] * bytes, tile[0] + k[0] * bytes, (size_t)bytes);
                memcpy(tile[1] + half + v[1] * bytes, tile[0] + half + v[0] * bytes,
                       (size_t)bytes);
            }
        }
    }
}

/* What one row sees. */
typedef struct {
    int64_t limit; /* keys from here on are invisible */
    int64_t start; /* first key of the span; limit without a mask */
    uint64_t mask;
    int64_t first; /* keys before this one are invisible */
} row_view;

static row_view view_of(const sf_batch *batch, int64_t row) {
    uint64_t mask = batch->mask ? (uint64_t)batch->mask[row] : ~0ull;
    row_view view = {batch->key_index[row] + 1, batch->key_index[row] + 1, 0, batch->first_key};
    if (batch->oldest && batch->oldest[row] > view.first) view.first = batch->oldest[row];
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

/* The keys that a unit reads. */
typedef struct {
    const uint8_t **tile;
    int32_t *size; /* keys of each tile below the limit */
    int64_t tiles;
    int64_t whole; /* leading tiles of 16 keys */
} tile_list;

/* Vectors that pass through the inner loops together. */
typedef struct {
    int M;
    const float *q; /* [head_dim][M] */
    float *scores;  /* [tiles][M][16] */
    float *out[SF_GROUP];
    row_view view[SF_GROUP];
    float total[SF_GROUP];
} group;

typedef void score_run(const float *q, const uint8_t *const *tile, const uint8_t *const *ahead,
                       int n, float *s);
typedef void mix_run(const group *g, const uint8_t *const *tile, const uint8_t *const *ahead,
                     const int32_t *size, int64_t tiles, int64_t first, int64_t offset, int n);
typedef void total_run(group *g, int64_t tiles);
typedef void peak_run(const float *s, int64_t tiles, vf *largest);
typedef void power_run(float *s, int64_t tiles, const vf *largest);

#define SCORE(NAME, M, T, BF16)                                                                    \
    static void NAME(const float *q, const uint8_t *const *tile, const uint8_t *const *ahead,      \
                     int n, float *s) {                                                            \
        sf_score(M, T, BF16, q, tile, ahead, n, s);                                                \
    }
/* Over all columns of V, as many at once as the registers hold. */
#define MIX(NAME, M, BF16)                                                                         \
    static void NAME(const group *g, const uint8_t *const *tile, const uint8_t *const *ahead,      \
                     const int32_t *size, int64_t tiles, int64_t first, int64_t offset, int n) {   \
        const int64_t panel = SF_LANES * 16 * ((BF16) ? 2 : 4);                                    \
        const int D = 4 * (M) <= SF_ACCUMULATORS ? 4 : 2 * (M) <= SF_ACCUMULATORS ? 2 : 1;         \
        const float *s = g->scores + first * (M) * 16;                                             \
        int d = 0;                                                                                 \
        for (; d + 16 * D <= n; d += 16 * D)                                                       \
            sf_mix(M, D, BF16, tile, ahead, size, tiles, offset + d / 16 * panel, s, g->out, d);   \
        for (; d < n; d += 16)                                                                     \
            sf_mix(M, 1, BF16, tile, ahead, size, tiles, offset + d / 16 * panel, s, g->out, d);   \
    }
#define RUNS(M)                                                                                    \
    SCORE(score_f32_##M, M, 1, 0)                                                                  \
    SCORE(score_bf16_##M, M, 1, 1)                                                                 \
    SCORE(scores_f32_##M, M, SF_TILES, 0)                                                          \
    SCORE(scores_bf16_##M, M, SF_TILES, 1)                                                         \
    MIX(mix_f32_##M, M, 0)                                                                         \
    MIX(mix_bf16_##M, M, 1)                                                                        \
    static void total_##M(group *g, int64_t tiles) { sf_total(M, g->scores, tiles, g->total); }    \
    static void peaks_##M(const float *s, int64_t tiles, vf *v) { sf_peaks(M, s, tiles, v); }       \
    static void powers_##M(float *s, int64_t tiles, const vf *v) { sf_powers(M, s, tiles, v); }
SF_EACH_M(RUNS)

#define ONE_F32(M) score_f32_##M,
#define ONE_BF16(M) score_bf16_##M,
#define SEVERAL_F32(M) scores_f32_##M,
#define SEVERAL_BF16(M) scores_bf16_##M,
#define MIX_F32(M) mix_f32_##M,
#define MIX_BF16(M) mix_bf16_##M,
#define TOTAL(M) total_##M,
#define PEAKS(M) peaks_##M,
#define POWERS(M) powers_##M,
static score_run *const score_tile[2][SF_GROUP + 1] = {{0, SF_EACH_M(ONE_F32)},
                                                       {0, SF_EACH_M(ONE_BF16)}};
static score_run *const score_tiles[2][SF_GROUP + 1] = {{0, SF_EACH_M(SEVERAL_F32)},
                                                        {0, SF_EACH_M(SEVERAL_BF16)}};
static mix_run *const mix_tiles[2][SF_GROUP + 1] = {{0, SF_EACH_M(MIX_F32)},
                                                    {0, SF_EACH_M(MIX_BF16)}};
static total_run *const add_up[SF_GROUP + 1] = {0, SF_EACH_M(TOTAL)};
static peak_run *const find_peaks[SF_GROUP + 1] = {0, SF_EACH_M(PEAKS)};
static power_run *const raise_all[SF_GROUP + 1] = {0, SF_EACH_M(POWERS)};

/* The scores of all keys before `first` become `value`. */
static void hide(float *s, int64_t stride, const tile_list *list, int64_t first, float value) {
    for (int64_t t = 0, key = 0; t < list->tiles && key < first; key += list->size[t++])
        for (int64_t i = 0; i < list->size[t] && key + i < first; i++) s[t * stride + i] = value;
}

/* The softmax's numerators of a group in place; invisible keys get 0. Tiles that all of its vectors
 * see whole come first, of all vectors at once: none waits for what comes of another's. */
static void exponentiate(group *g, const tile_list *list) {
    const int64_t stride = 16 * g->M;
    int64_t whole = list->whole;
    vf largest[SF_GROUP];
    for (int m = 0; m < g->M; m++) {
        hide(g->scores + 16 * m, stride, list, g->view[m].first, -__builtin_inff());
        if (g->view[m].start / SF_LANES < whole) whole = g->view[m].start / SF_LANES;
    }
    find_peaks[g->M](g->scores, whole, largest);
    for (int m = 0; m < g->M; m++) {
        const float *s = g->scores + 16 * m;
        vf low = vf_set1(-__builtin_inff()), best = largest[m];
        for (int64_t t = whole, key = whole * SF_LANES; t < list->tiles; key += list->size[t++]) {
            uint32_t seen = visible16(&g->view[m], key) & ((1u << list->size[t]) - 1);
            best = vf_max(best, vf_select(seen, vf_load(s + t * stride), low));
        }
        largest[m] = vf_set1(vf_hmax(best));
    }
    raise_all[g->M](g->scores, whole, largest);
    for (int m = 0; m < g->M; m++) {
        float *s = g->scores + 16 * m;
        for (int64_t t = whole, key = whole * SF_LANES; t < list->tiles; key += list->size[t++]) {
            uint32_t seen = visible16(&g->view[m], key) & ((1u << list->size[t]) - 1);
            vf p = vf_exp(vf_sub(vf_load(s + t * stride), largest[m]));
            vf_store(s + t * stride, vf_select(seen, p, vf_zero()));
        }
        hide(s, stride, list, g->view[m].first, 0.0f);
    }
}

typedef struct {
    group groups[MOST_VECTORS];
    int count, head_dim, bf16;
    tile_list list;
    float *q, *scores;
    float *wide; /* MIXED_TILES tiles of K or V in float32 */
} unit;

/* Which tiles pass the inner loops together, and what should come into the cache meanwhile. */
typedef struct {
    const uint8_t *wide[MIXED_TILES], *ahead[MIXED_TILES];
    const uint8_t *const *tile;
} block;

/* K (offset 0) or V of tiles [first, first + count), widened where several groups read them. */
static void open_block(const unit *u, int64_t first, int64_t count, int64_t offset, block *b) {
    const tile_list *list = &u->list;
    b->tile = list->tile + first;
    for (int64_t t = 0; t < count; t++) {
        int64_t next = first + count + t < list->tiles ? first + count + t : first + t;
        b->ahead[t] = list->tile[next] + offset;
        if (!u->bf16 || u->count == 1) continue;
        float *to = u->wide + t * SF_LANES * u->head_dim;
        sf_widen(list->tile[first + t] + offset, u->head_dim, to);
        b->wide[t] = (const uint8_t *)to;
        b->tile = b->wide;
    }
}

static void score_keys(const unit *u) {
    const int64_t tiles = u->list.tiles;
    block b;
    for (int64_t t = 0, step; t < tiles; t += step) {
        step = tiles - t >= SF_TILES ? SF_TILES : 1;
        open_block(u, t, step, 0, &b);
        for (int i = 0; i < u->count; i++) {
            const group *g = &u->groups[i];
            (step == SF_TILES ? score_tiles : score_tile)[u->bf16 && u->count == 1][g->M](
                g->q, b.tile, b.ahead, u->head_dim, g->scores + t * g->M * 16);
        }
    }
}

static void mix_values(const unit *u) {
    const tile_list *list = &u->list;
    const int64_t offset = SF_LANES * u->head_dim * (u->bf16 ? 2 : 4);
    const int direct = u->bf16 && u->count == 1;
    block b;
    for (int64_t t = 0, step; t < list->tiles; t += step) {
        step = list->tiles - t < MIXED_TILES ? list->tiles - t : MIXED_TILES;
        open_block(u, t, step, offset, &b);
        for (int i = 0; i < u->count; i++)
            mix_tiles[direct][u->groups[i].M](&u->groups[i], b.tile, b.ahead, list->size + t, step,
                                              t, u->bf16 && !direct ? 0 : offset, u->head_dim);
    }
}

static void attend_unit(unit *u) {
    score_keys(u);
    for (int i = 0; i < u->count; i++) {
        group *g = &u->groups[i];
        exponentiate(g, &u->list);
        for (int m = 0; m < g->M; m++) memset(g->out[m], 0, (size_t)u->head_dim * 4);
        add_up[g->M](g, u->list.tiles);
    }
    mix_values(u);
    for (int i = 0; i < u->count; i++)
        for (int m = 0; m < u->groups[i].M; m++) {
            float *out = u->groups[i].out[m];
            vf total = vf_set1(u->groups[i].total[m]);
            for (int d = 0; d < u->head_dim; d += 16)
                vf_store(out + d, vf_div(vf_load(out + d), total));
        }
}

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

/* Most vectors of a unit: their scores should stay in a second-level cache. */
static int64_t vectors_for(int64_t tiles) {
    int64_t vectors = SCORES / (tiles * SF_LANES + 1);
    return vectors < SF_GROUP ? SF_GROUP : vectors > MOST_VECTORS ? MOST_VECTORS : vectors;
}

static int64_t lists_bytes(int64_t tiles) { return (tiles * 12 + 63) / 64 * 64; }

/* Bytes that each thread needs. */
size_t sf_attention_scratch(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv) {
    int64_t tiles = tiles_for(kv, key_limit(batch, 0, batch->rows)), n = w->head_dim;
    int64_t floats = vectors_for(tiles) * tiles * SF_LANES + MOST_VECTORS * n;
    return (size_t)(lists_bytes(tiles) + 4 * (floats + MIXED_TILES * SF_LANES * n) + 64) / 64 * 64;
}

static void list_tiles(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                       int64_t slot, int kv_head, int64_t limit, tile_list *list) {
    list->tiles = list->whole = 0;
    for (int64_t key = 0; key < limit; key += kv->block_size)
        for (int t = 0; t < kv->tiles && key + t * SF_LANES < limit; t++) {
            int64_t size = kv->block_size - t * SF_LANES, left = limit - key - t * SF_LANES;
            if (size > SF_LANES) size = SF_LANES;
            if (size > left) size = left;
            list->whole += size == SF_LANES && list->whole == list->tiles;
            list->size[list->tiles] = (int32_t)size;
            list->tile[list->tiles++] =
                find_tile(w, batch, kv, slot, key / kv->block_size, t, kv_head);
        }
}

/* Adjacent rows of one request, cut into `pieces` as even as can be. */
typedef struct {
    int64_t row, rows, pieces;
} segment;

static segment segment_at(const sf_batch *batch, int64_t row, int64_t most) {
    segment s = {row, 1, 0};
    while (row + s.rows < batch->rows && batch->row_slot[row + s.rows] == batch->row_slot[row])
        s.rows++;
    s.pieces = (s.rows + most - 1) / most;
    return s;
}

/* How all rows are cut for one part of the heads: into `pieces` of at most so many `rows`, of which
 * the dearest costs so much. The rows of a unit share what it costs to read the keys, and more than
 * a group also what it costs to widen them. */
typedef struct {
    int64_t rows, pieces, cost;
} cut;

static cut cut_rows(const sf_batch *batch, int64_t rows, int64_t heads) {
    cut found = {rows, 0, 0};
    int64_t longest = 0;
    for (segment s = {0, 0, 0}; s.row + s.rows < batch->rows; found.pieces += s.pieces) {
        s = segment_at(batch, s.row + s.rows, rows);
        int64_t own = (s.rows + s.pieces - 1) / s.pieces;
        if (own > longest) longest = own;
    }
    int64_t vectors = longest * heads;
    found.cost = READING + vectors + (vectors > SF_GROUP ? WIDENING : 0);
    return found;
}

/* What it costs until all threads are done that share so many parts. */
static int64_t cost_of_sharing(const cut *c, int64_t parts) {
    return (c->pieces * parts + sf_team - 1) / sf_team * c->cost;
}

/* What lets all threads finish first: each does `own` parts of the heads, cut coarsely, and all share
 * the other ones, cut as finely as it takes. */
typedef struct {
    int64_t own, others;
    cut coarse, fine;
} plan;

static plan plan_units(const sf_batch *batch, int64_t most, int64_t parts, int64_t heads) {
    const int64_t own = parts / sf_team, others = parts % sf_team;
    cut cuts[8]; /* MOST_VECTORS rows at most, halved until there is one */
    int count = 0;
    for (int64_t rows = most; rows; rows = rows > 1 ? (rows + 1) / 2 : 0)
        cuts[count++] = cut_rows(batch, rows, heads);
    plan best = {0, parts, cuts[0], cuts[0]};
    int64_t least = INT64_MAX;
    for (int i = 0; i < count; i++) {
        int64_t cost = cost_of_sharing(&cuts[i], parts);
        if (cost < least) least = cost, best.coarse = best.fine = cuts[i];
    }
    if (!own || !others) return best;
    least -= least / 16; /* these are estimates */
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) {
            int64_t cost = own * cuts[i].pieces * cuts[i].cost + cost_of_sharing(&cuts[j], others);
            if (cost < least) least = cost, best = (plan){own, others, cuts[i], cuts[j]};
        }
    return best;
}

/* Rows of one request that a unit has. */
typedef struct {
    int64_t row, rows;
} piece;

/* A segment, and the pieces of those before it. */
typedef struct {
    segment s;
    int64_t before;
} place;

/* Piece number `index` of a batch that is cut into pieces of so many rows, from the place of the
 * last one on: of long prompts, to begin anew for each would take longer than to attend. */
static piece piece_at(const sf_batch *batch, int64_t most, int64_t index, place *at) {
    if (index < at->before) *at = (place){segment_at(batch, 0, most), 0};
    while (index >= at->before + at->s.pieces) {
        at->before += at->s.pieces;
        at->s = segment_at(batch, at->s.row + at->s.rows, most);
    }
    int64_t own = index - at->before, first = at->s.rows * own / at->s.pieces;
    return (piece){at->s.row + first, at->s.rows * (own + 1) / at->s.pieces - first};
}

/* Vectors of `rows` rows from `row` on, each with the same `heads` heads from `head` on. */
static void gather_vectors(unit *u, const sf_batch *batch, int64_t row, int64_t rows, int head,
                           int heads, const float *q, int64_t q_stride, float *out,
                           int64_t out_stride) {
    int vectors = (int)rows * heads, n = u->head_dim;
    u->count = (vectors + SF_GROUP - 1) / SF_GROUP;
    for (int i = 0; i < u->count; i++) {
        group *g = &u->groups[i];
        int first = vectors * i / u->count;
        float *packed = u->q + first * n;
        g->M = vectors * (i + 1) / u->count - first;
        g->q = packed;
        g->scores = u->scores + first * u->list.tiles * SF_LANES;
        for (int m = 0; m < g->M; m++) {
            int64_t at = row + (first + m) / heads;
            int64_t column = (int64_t)(head + (first + m) % heads) * n;
            const float *from = q + at * q_stride + column;
            float *to = packed + m;
            for (int d = 0, M = g->M; d < n; d++, to += M) *to = from[d];
            g->out[m] = out + at * out_stride + column;
            g->view[m] = view_of(batch, at);
        }
    }
}

/* Which of the parts is number `i` of those that all threads share: evenly among the rest. */
static int64_t other_part(int64_t i, const plan *todo, int64_t parts) {
    return (i + 1) * parts / (todo->others + 1);
}

/* q [rows][heads * head_dim], already rotated and scaled -> out, the same shape. Called by every
 * thread of the team, with a zeroed counter for each; scratch is the thread's own. */
void sf_attend(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv, const float *q,
               int64_t q_stride, float *out, int64_t out_stride, uint8_t *scratch,
               sf_counter *work) {
    int64_t tiles = tiles_for(kv, key_limit(batch, 0, batch->rows)), most = vectors_for(tiles);
    int shared = w->heads / w->kv_heads; /* heads of a kv head */
    int chunk = shared < most ? shared : (int)most, chunks = (shared + chunk - 1) / chunk;
    int64_t parts = (int64_t)w->kv_heads * chunks;
    const plan todo = plan_units(batch, most / chunk, parts, chunk);
    unit u = {.head_dim = w->head_dim, .bf16 = w->kv_kind == SF_BF16};
    u.list.tile = (const uint8_t **)scratch;
    u.list.size = (int32_t *)(scratch + 8 * tiles);
    u.q = (float *)(scratch + lists_bytes(tiles));
    u.wide = u.q + MOST_VECTORS * w->head_dim;
    u.scores = u.wide + MIXED_TILES * SF_LANES * w->head_dim;

    /* In the order of the heads: each thread begins with those whose vectors it has computed, about,
     * and whose keys it has written. Those that all share lie between. */
    place coarse = {segment_at(batch, 0, todo.coarse.rows), 0};
    place fine = {segment_at(batch, 0, todo.fine.rows), 0};
    const int64_t whole = todo.own * todo.coarse.pieces, rest = todo.others * todo.fine.pieces;
    for (int turn = 0, thread; (thread = sf_turn(turn)) >= 0; turn++) {
        int64_t first = rest * thread / sf_team, mine;
        int64_t end = whole + rest * (thread + 1) / sf_team - first;
        while ((mine = __atomic_fetch_add(&work[thread].next, 1, __ATOMIC_RELAXED)) < end) {
            int64_t part;
            piece p;
            if (mine < whole) {
                p = piece_at(batch, todo.coarse.rows, mine % todo.coarse.pieces, &coarse);
                part = todo.own * thread + mine / todo.coarse.pieces;
                for (int64_t i = 0; i < todo.others; i++) part += other_part(i, &todo, parts) <= part;
            } else {
                mine += first - whole;
                p = piece_at(batch, todo.fine.rows, mine % todo.fine.pieces, &fine);
                part = other_part(mine / todo.fine.pieces, &todo, parts);
            }
            int64_t slot = batch->row_slot[p.row];
            int kv_head = (int)(part / chunks), skip = (int)(part % chunks) * chunk;
            int head = kv_head * shared + skip;
            int heads = shared - skip < chunk ? shared - skip : chunk;
            if (slot < 0) {
                for (int64_t row = p.row; row < p.row + p.rows; row++)
                    memset(out + row * out_stride + (int64_t)head * w->head_dim, 0,
                           (size_t)(heads * w->head_dim) * 4);
                continue;
            }
            list_tiles(w, batch, kv, slot, kv_head, key_limit(batch, p.row, p.rows), &u.list);
            gather_vectors(&u, batch, p.row, p.rows, head, heads, q, q_stride, out, out_stride);
            attend_unit(&u);
        }
    }
}
