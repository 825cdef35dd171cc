/* The tables of the book-keeping around a round; `SlotState`, `Controller`, `OfferRecords`, `Offers`
 * and `BookKeeping` of surefoot.speculation say what each holds. `BooksStruct` in structs.py is this
 * structure as ctypes sees it. */
#ifndef SF_BOOKS_H
#define SF_BOOKS_H
#include <stdint.h>

#define SF_EXPORT __attribute__((visibility("default")))
#define SF_MOST_DRAFTS 64
#define SF_MOST_CELLS 2048 /* bins times drafts */

typedef struct {
    /* slots */
    int64_t *history; /* [slots][width] */
    int64_t *length, *computed, *limit, *alive, *draft_limit; /* [slots] */
    /* offers of each proposer: [proposers][slots][drafts], lengths and permissions without drafts */
    int64_t *tokens, *lengths;
    float *confidence;
    int64_t *parents; /* null where all offer chains, as are the other parents then */
    uint8_t *allowed;
    /* what is in view of them, and what was learnt: hits and trials [proposers][slots][bins][drafts],
     * seen [proposers][4][bins][drafts]: trials, hits, agreement and its weight, of all requests;
     * bins by confidence, and by what else is on offer where there is more than one proposer */
    int64_t *watched, *watched_bins, *watched_parents, *watched_length, *watched_start;
    float *hits, *trials, *seen;
    /* each request's best offer: [slots][drafts], the lengths and whose they are [slots] */
    int64_t *best_tokens, *best_lengths, *best_proposer, *best_parents;
    float *best_chances;
    int32_t *report; /* [count][columns] */
    int64_t width, slots, nobody, proposers, drafts, bins, sure_bins, vocab, columns;
    float slot_decay, global_decay, least_prior, largest_prior, least_chance;
} sf_books;

static inline int64_t sf_least(int64_t a, int64_t b) { return a < b ? a : b; }
#endif
