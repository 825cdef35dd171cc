/* Search for the latest tokens earlier in the text, one request at a time. */
#include <stdint.h>

#define SF_EXPORT __attribute__((visibility("default")))

/* Prompt lookup for `count` slots (the twin of surefoot.kernels.lookup.ngram_lookup):
 * of the earlier places in the last `window` tokens where the text's last tokens stand, the one
 * with the longest common suffix (up to max_ngram), the latest among equals. `tokens`
 * [count][drafts] get what followed, periodically, `lengths` drafts, or 0 where the suffix is below
 * min_ngram, `confidence` [count][drafts] its size as a part of max_ngram + 1. */
SF_EXPORT void sf_ngram(const int64_t *history, int64_t width, const int64_t *length,
                        const int64_t *slots, int64_t count, int64_t min_ngram, int64_t max_ngram,
                        int64_t window, int64_t drafts, int64_t *tokens, int64_t *lengths,
                        float *confidence) {
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
        if (best < min_ngram) best = 0;
        lengths[i] = best ? drafts : 0;
        const int64_t period = end - 1 - best_end;
        for (int64_t j = 0; j < drafts; j++) {
            tokens[i * drafts + j] = best ? text[best_end + 1 + j % period] : 0;
            confidence[i * drafts + j] = (float)best / (float)(max_ngram + 1);
        }
    }
}
