/* Book-keeping of a round over the slot tensors, one request at a time. */
#include <stdint.h>

#define SF_EXPORT __attribute__((visibility("default")))

/* Prompt lookup for `count` slots (the twin of surefoot.kernels.lookup.ngram_lookup):
 * of the earlier places in the last `window` tokens where the text's last tokens stand, the one
 * with the longest common suffix (up to max_ngram), the latest among equals. `size` gets that
 * suffix's length, 0 below min_ngram; `tokens` [count][drafts] what followed, periodically. */
SF_EXPORT void sf_ngram(const int64_t *history, int64_t width, const int64_t *length,
                        const int64_t *slots, int64_t count, int64_t min_ngram, int64_t max_ngram,
                        int64_t window, int64_t drafts, int64_t *tokens, int64_t *size) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t *text = history + slots[i] * width;
        const int64_t end = length[slots[i]];
        const int64_t start = end > window ? end - window : 0;
        int64_t best = 0, best_end = end - 2;
        for (int64_t e = end - 2; e >= start && best < max_ngram; e--) {
            if (text[e] != text[end - 1]) continue;
            int64_t same = 1;
            while (same < max_ngram && e - same >= start && text[e - same] == text[end - 1 - same])
                same++;
            if (same > best) best = same, best_end = e;
        }
        size[i] = best >= min_ngram ? best : 0;
        const int64_t period = end - 1 - best_end;
        for (int64_t j = 0; j < drafts; j++)
            tokens[i * drafts + j] = size[i] ? text[best_end + 1 + j % period] : 0;
    }
}

#define SF_MOST_CELLS 1024 /* bins times drafts */

/* The twin of AcceptanceEstimator.learn_reference: judge each slot's watched offer by the text.
 * `seen` [4][bins][drafts]: trials, hits, agreement and its weight, of all requests. */
SF_EXPORT void sf_learn(const int64_t *history, int64_t width, const int64_t *length,
                        const int64_t *slots, int64_t count, const int64_t *watched,
                        const int64_t *watched_bins, int64_t *watched_length,
                        const int64_t *watched_start, int64_t drafts, int64_t bins, float *hits,
                        float *trials, float *seen, float slot_decay, float global_decay) {
    const int64_t cells = bins * drafts;
    float new[4 * SF_MOST_CELLS] = {0};
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], offered = watched_length[slot];
        if (!offered) continue;
        const int64_t *text = history + slot * width + watched_start[slot];
        const int64_t *offer = watched + slot * drafts, *bin = watched_bins + slot * drafts;
        int64_t known = length[slot] - watched_start[slot], run = 0;
        if (known > offered) known = offered;
        while (run < known && text[run] == offer[run]) run++;
        if (run >= known && known < offered) continue;
        for (int64_t j = 0; j < known && j <= run; j++) {
            const int64_t cell = bin[j] * drafts + j;
            const float hit = j < run ? 1.0f : 0.0f;
            float *own_hits = hits + slot * cells + cell, *own_trials = trials + slot * cells + cell;
            const float mean = seen[cells + cell] / seen[cell];
            new[cell] += 1.0f;
            new[cells + cell] += hit;
            new[2 * cells + cell] += (hit - mean) * (*own_hits - *own_trials * mean);
            new[3 * cells + cell] += *own_trials;
            *own_trials = *own_trials * slot_decay + 1.0f;
            *own_hits = *own_hits * slot_decay + hit;
        }
        watched_length[slot] = 0;
    }
    for (int64_t cell = 0; cell < cells; cell++) {
        float forget = 1.0f;
        for (float left = new[cell]; left > 0; left -= 1.0f) forget *= global_decay;
        for (int64_t at = cell; at < 4 * cells; at += cells) seen[at] = seen[at] * forget + new[at];
    }
}

/* The twin of AcceptanceEstimator.watch_reference: take offers in view where there is none. */
SF_EXPORT void sf_watch(const int64_t *length, const int64_t *slots, int64_t count,
                        const int64_t *tokens, const int64_t *lengths, const float *confidence,
                        int64_t drafts, int64_t bins, int64_t *watched, int64_t *watched_bins,
                        int64_t *watched_length, int64_t *watched_start) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i];
        if (watched_length[slot] || lengths[i] <= 0) continue;
        for (int64_t j = 0; j < drafts; j++) {
            int64_t bin = (int64_t)(confidence[i * drafts + j] * (float)bins);
            watched[slot * drafts + j] = tokens[i * drafts + j];
            watched_bins[slot * drafts + j] = bin < 0 ? 0 : bin >= bins ? bins - 1 : bin;
        }
        watched_length[slot] = lengths[i];
        watched_start[slot] = length[slot];
    }
}
