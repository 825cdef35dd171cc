/* Linear layers: work is handed out in runs of panels, and each run meets all row tiles while its
 * weights are in cache. */
#include "act.h"
#include "gemm_kernels.h"
#include "team.h"

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

static void run_panels(const sf_linear *linear, const sf_segment *s, int first, int count, int col,
                       const sf_acts *acts, sf_out out, int origin) {
    for (int done = 0, step; done < count; done += step) {
        const uint8_t *panel = s->data + (first + done) * s->panel_bytes;
        int at = 16 * (first + done);
        step = s->kind <= SF_BF16 ? 3 : 2;
        if (step > count - done) step = count - done;
        for (int64_t row = 0; row < acts->rows; row += SF_MAX_ROWS) {
            int R = sf_tile_rows(acts->rows - row);
            tile_target to = {out, linear->bias, row, origin};
            const void *x = s->kind <= SF_BF16
                ? (const void *)(acts->f + row * sf_even(s->inputs))
                : (const void *)(acts->q + row * (s->inputs / SF_BLOCK) * SF_ACT_BYTES);
            runs[s->kind][step - 1][R](s, panel, x, &to, col + at, s->outputs - at);
        }
    }
}

/* Let the outputs [rows][n] of columns col .. col + n compete. */
static void keep_best(const float *y, int64_t ld, int64_t rows, int col, int n, sf_best *best) {
    for (int64_t row = 0; row < rows; row++, y += ld, best++) {
        vf highest = vf_set1(-__builtin_inff());
        int i = 0;
        for (; i + 16 <= n; i += 16) highest = vf_max(highest, vf_load(y + i));
        float top = vf_hmax(highest);
        for (int j = i; j < n; j++) top = y[j] > top ? y[j] : top;
        if (!(top > best->value) && best->column >= 0) continue;
        /* A thread's runs come in rising order of columns: the first of equals stays. */
        for (i = 0; i < n - 1 && y[i] != top; i++)
            ;
        *best = (sf_best){top, col + i};
    }
}

void sf_gemm(const sf_linear *linear, const sf_acts *acts, sf_out out, sf_counter *work,
             int threads) {
    int64_t total = 0;
    for (int i = 0; i < linear->segments; i++) total += linear->segment[i].panels;
    int64_t next = __atomic_load_n(&work->next, __ATOMIC_RELAXED);
    while (next < total) {
        int64_t first = next, col = 0;
        const sf_segment *s = linear->segment;
        while (first >= s->panels) {
            first -= s->panels;
            col += s->outputs;
            s++;
        }
        /* Runs shrink towards the end so that the threads finish together. Where several row tiles
         * pass, a run's weights should stay in a second-level cache meanwhile. */
        int64_t count = (total - next) / (2 * threads), most = SF_MOST_PANELS;
        if (acts->rows > SF_MAX_ROWS && most > 524288 / s->panel_bytes)
            most = 524288 / s->panel_bytes;
        if (most < 3) most = 3;
        if (count > most) count = most;
        if (count > 6) count -= count % 6; /* whole register tiles */
        if (count < 1) count = 1;
        if (count > s->panels - first) count = s->panels - first;
        if (!__atomic_compare_exchange_n(&work->next, &next, next + count, 0, __ATOMIC_RELAXED,
                                         __ATOMIC_RELAXED))
            continue;
        if (!out.best) {
            run_panels(linear, s, (int)first, (int)count, (int)col, acts, out, 0);
        } else {
            sf_out own = out;
            int at = (int)(col + 16 * first), left = (int)(s->outputs - 16 * first);
            own.ld = SF_MOST_PANELS * 16;
            own.y += sf_me * acts->rows * own.ld;
            run_panels(linear, s, (int)first, (int)count, (int)col, acts, own, at);
            keep_best(own.y, own.ld, acts->rows, at, left < 16 * count ? left : 16 * (int)count,
                      out.best + sf_me * acts->rows);
        }
        next = __atomic_load_n(&work->next, __ATOMIC_RELAXED);
    }
}
