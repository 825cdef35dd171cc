/* Linear layers: threads do runs of panels, and each run meets all row tiles while its weights are
 * in cache. */
#include "act.h"
#include "gemm_kernels.h"
#include "team.h"

#define EXPECTED 16384 /* bytes of a thread's weights that are asked for before it is their turn */

typedef struct {
    sf_out out;
    const float *bias;
    int64_t row;
    int origin; /* column where y starts */
} tile_target;

/* Rows [R][P] of sums to columns col .. col + 16 P, of which `left` exist. */
SF_INLINE void store_tile(const int R, const int P, const vf *acc, const tile_target *to, int col,
                          int left) {
    SF_UNROLL for (int p = 0; p < P; p++) {
        int n = left - 16 * p < 16 ? left - 16 * p : 16;
        vf bias = to->bias ? sf_load_upto(to->bias + col + 16 * p, n) : vf_zero();
        SF_UNROLL for (int r = 0; r < R; r++) {
            float *y = to->out.y + (to->row + r) * to->out.ld + (col - to->origin) + 16 * p;
            vf value = acc[r * P + p];
            if (to->bias) value = vf_add(value, bias);
            if (to->out.add) value = vf_add(sf_load_upto(y, n), value);
            sf_store_upto(y, value, n);
        }
    }
}

typedef void panel_run(const sf_segment *s, const uint8_t *panel, const void *x,
                       const tile_target *to, int col, int left);

/* One row tile against P panels; x is the tile. */
#define DENSE_RUN(NAME, TILE, R, P)                                                                \
    static void NAME##_##R##_##P(const sf_segment *s, const uint8_t *panel, const void *x,         \
                                 const tile_target *to, int col, int left) {                       \
        vf acc[(R) * (P)];                                                                         \
        TILE(R, P, panel, s->panel_bytes, (const float *)x, s->inputs, acc);                       \
        store_tile(R, P, acc, to, col, left);                                                      \
    }

#define QUANT_RUN(NAME, KIND, R, P)                                                                \
    static void NAME##_##R##_##P(const sf_segment *s, const uint8_t *panel, const void *x,         \
                                 const tile_target *to, int col, int left) {                       \
        vf acc[(R) * (P)];                                                                         \
        sf_tile_quant(KIND, R, P, panel, s->panel_bytes, (const int8_t *)x, s->inputs / SF_BLOCK,  \
                      acc);                                                                        \
        store_tile(R, P, acc, to, col, left);                                                      \
    }

/* Several panels at once: an input value that is loaded serves each of them, and a single row's
 * sums do not wait for each other. A dense tile has registers for three, an int8 tile for two. */
#define DENSE_RUNS(R, P) DENSE_RUN(f32, sf_tile_f32, R, P) DENSE_RUN(bf16, sf_tile_bf16, R, P)
#define QUANT_RUNS(R, P)                \
    QUANT_RUN(q4_0, SF_Q4_0, R, P)      \
    QUANT_RUN(q4_1, SF_Q4_1, R, P)      \
    QUANT_RUN(q8_0, SF_Q8_0, R, P)
#define RUNS(R) \
    DENSE_RUNS(R, 1) DENSE_RUNS(R, 2) DENSE_RUNS(R, 3) QUANT_RUNS(R, 1) QUANT_RUNS(R, 2)

#if SF_MAX_ROWS == 8
RUNS(1) RUNS(2) RUNS(3) RUNS(4) RUNS(5) RUNS(6) RUNS(7) RUNS(8)
#define ROWS(N, P)                                                                            \
    {0, N##_1_##P, N##_2_##P, N##_3_##P, N##_4_##P, N##_5_##P, N##_6_##P, N##_7_##P, N##_8_##P}
#else
RUNS(1) RUNS(2) RUNS(3) RUNS(4)
#define ROWS(N, P) {0, N##_1_##P, N##_2_##P, N##_3_##P, N##_4_##P}
#endif
#define DENSE_TABLE(N) {ROWS(N, 1), ROWS(N, 2), ROWS(N, 3)}
#define QUANT_TABLE(N) {ROWS(N, 1), ROWS(N, 2)}

static panel_run *const runs[5][SF_MAX_PANELS][SF_MAX_ROWS + 1] = {
    DENSE_TABLE(f32), DENSE_TABLE(bf16), QUANT_TABLE(q4_0), QUANT_TABLE(q4_1), QUANT_TABLE(q8_0)};

/* Of a register tile. */
static int panels_at_once(const sf_segment *s) { return s->kind <= SF_BF16 ? 3 : 2; }

static void run_panels(const sf_linear *linear, const sf_segment *s, int first, int count, int col,
                       const sf_acts *acts, sf_out out, int origin) {
    for (int done = 0, step; done < count; done += step) {
        const uint8_t *panel = s->data + (first + done) * s->panel_bytes;
        int at = 16 * (first + done);
        step = panels_at_once(s);
        if (step > count - done) step = count - done;
        for (int64_t row = 0, R; row < acts->rows; row += R) {
            R = (s->kind <= SF_BF16 ? sf_float_tile : sf_int8_tile)(row, acts->rows).rows;
            tile_target to = {out, linear->bias, row, origin};
            const void *x = s->kind <= SF_BF16
                ? (const void *)(acts->f + row * sf_even(s->inputs))
                : (const void *)(acts->q + row * (s->inputs / SF_BLOCK) * SF_ACT_BYTES);
            runs[s->kind][step - 1][R](s, panel, x, &to, col + at, s->outputs - at);
        }
    }
}

/* Let the outputs [rows][n] of columns col .. col + n compete; the first of equals wins. */
static void keep_best(const float *y, int64_t ld, int64_t rows, int col, int n, sf_best *best) {
    for (int64_t row = 0; row < rows; row++, y += ld, best++) {
        vf highest = vf_set1(-__builtin_inff());
        int i = 0;
        for (; i + 16 <= n; i += 16) highest = vf_max(highest, vf_load(y + i));
        float top = vf_hmax(highest);
        for (int j = i; j < n; j++) top = y[j] > top ? y[j] : top;
        int wins = top > best->value || (top == best->value && col < best->column);
        if (!wins && best->column >= 0) continue;
        for (i = 0; i < n - 1 && y[i] != top; i++)
            ;
        *best = (sf_best){top, col + i};
    }
}

/* Panels [first, first + count) of a segment, whose outputs begin at `column`; `left` are all that
 * are left of a thread's part, from the first of these on. */
typedef struct {
    const sf_segment *segment;
    int64_t first, count, column, left;
} run;

/* Where a thread's part of a segment begins; register tiles stay whole. */
static int64_t part_of(const sf_segment *s, int thread) {
    return thread == sf_team ? s->panels : s->panels * thread / sf_team / 2 * 2;
}

/* What is left of a thread's part when `done` panels of it are, as far as it lies in one segment:
 * a part is an even share of each. The count is 0 where nothing is left. */
static run what_is_left(const sf_linear *linear, int thread, int64_t done) {
    run found = {linear->segment, 0, 0, 0, 0};
    int64_t column = 0;
    for (int i = 0; i < linear->segments; i++) {
        const sf_segment *s = &linear->segment[i];
        int64_t first = part_of(s, thread), count = part_of(s, thread + 1) - first;
        if (done < count && !found.count)
            found = (run){s, first + done, count - done, column, 0};
        if (found.count) found.left += found.segment == s ? found.count : count;
        done -= count;
        column += s->outputs;
    }
    return found;
}

void sf_expect(const sf_linear *linear, const sf_counter *work) {
    run first = what_is_left(linear, sf_me, 0);
    const uint8_t *at = first.segment->data + first.first * first.segment->panel_bytes;
    int64_t bytes = first.count * first.segment->panel_bytes;
    if (bytes > EXPECTED) bytes = EXPECTED;
    __builtin_prefetch(&work[sf_me], 1);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

void sf_gemm(const sf_linear *linear, const sf_acts *acts, sf_out out, sf_counter *work) {
    /* Each thread begins with its own part, which lies in one piece: weights can be asked for
     * ahead, and what it wrote is still at hand when it goes on with it. Then it helps others with
     * theirs. Runs shrink towards a part's end so that all finish together. */
    for (int turn = 0, thread; (thread = sf_turn(turn)) >= 0; turn++) {
        int64_t next = __atomic_load_n(&work[thread].next, __ATOMIC_RELAXED);
        for (run r; (r = what_is_left(linear, thread, next)).count;) {
            const sf_segment *s = r.segment;
            int64_t count = r.left / 2, most = SF_MOST_PANELS, tile = panels_at_once(s);
            /* Where several row tiles pass, a run's weights should stay in a second-level cache
             * meanwhile. */
            if (acts->rows > SF_MAX_ROWS && most > 524288 / s->panel_bytes)
                most = 524288 / s->panel_bytes;
            if (count > most) count = most;
            count = count < tile ? tile : count - count % tile;
            if (count > r.count) count = r.count;
            if (!__atomic_compare_exchange_n(&work[thread].next, &next, next + count, 0,
                                             __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                continue;
            next += count;
            if (!out.best) {
                run_panels(linear, s, (int)r.first, (int)count, (int)r.column, acts, out, 0);
                continue;
            }
            sf_out own = out;
            int at = (int)(r.column + 16 * r.first), left = (int)(s->outputs - 16 * r.first);
            own.ld = SF_MOST_PANELS * 16;
            own.y += sf_me * acts->rows * own.ld;
            run_panels(linear, s, (int)r.first, (int)count, (int)r.column, acts, own, at);
            keep_best(own.y, own.ld, acts->rows, at, left < 16 * count ? left : 16 * (int)count,
                      out.best + sf_me * acts->rows);
        }
    }
}
