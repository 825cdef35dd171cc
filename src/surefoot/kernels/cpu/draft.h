/* What draft.c and block.c share, and what they call of the other files. */
#ifndef SF_DRAFT_H
#define SF_DRAFT_H

#include "native.h"

typedef struct {
    const int64_t *history, *length; /* by slot */
    const int32_t *tables;
    int64_t width, blocks; /* of a row of these */
    int64_t first, own, block_size, pages; /* of drafts' own blocks: see Scratch */
    int64_t steps, behind, last_position;
} sf_live;

/* draft.c */
void sf_live_rows(const sf_live *l, const int64_t *slots, int64_t n, int64_t *tokens,
                  int64_t *keys, int64_t *positions, int32_t *tables);
void sf_block_rows(const int64_t *tokens, const int64_t *keys, const int64_t *positions, int64_t n,
                   int64_t rows, int64_t filler, int64_t *out, int64_t *spans);
void sf_norm(const float *x, int64_t rows, int64_t n, const float *weight, float eps, float *y);
void sf_likeliest(const float *x, int64_t rows, int64_t n, const int64_t *ids, int64_t *tokens,
                  int64_t token_stride, float *chances, int64_t chance_stride);
int sf_markov(sf_context *context, const sf_segment *before, const sf_linear *after,
              const int64_t *current, const int64_t *ids, float *logits, int64_t steps,
              int64_t rows, int64_t *tokens, int threads);

/* layer.c */
int sf_layers(sf_context *context, const sf_layer_weights *const *w, int64_t count,
              const sf_batch *batch, const sf_kv *const *kv, const float *inputs, float *x,
              const sf_batch *outputs, const int64_t *index, const sf_capture *capture,
              int threads);
int sf_head(sf_context *context, const float *norm, float eps, const sf_linear *linear,
            const float *x, int64_t rows, float *logits, int64_t *columns, int threads);
void sf_store_keys(const sf_layer_weights *w, const sf_batch *batch, const sf_kv *kv,
                   float *projected, int64_t stride, int threads);

/* ops.c */
int sf_embed(const sf_segment *table, const int64_t *tokens, int64_t rows, float *out, int threads);

#endif
