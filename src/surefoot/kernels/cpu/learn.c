/* What offers are worth: judged by the text, taken in, weighed against each other, reported. Twins
 * of the methods of surefoot.speculation.torch_books and AcceptanceEstimator. A draft's parent comes
 * before it, -1 is the committed text; a chain's parents count up. */
#include <string.h>

#include "books.h"

static int64_t parent_of(const int64_t *parents, int64_t draft) {
    return parents ? parents[draft] : draft - 1;
}

static int64_t bin_of(const sf_books *books, float confidence) {
    const int64_t bins = books->sure_bins, bin = (int64_t)(confidence * (float)bins);
    return bin < 0 ? 0 : bin >= bins ? bins - 1 : bin;
}

/* Judge the offer of a proposer that is in view for a slot, and add to `new` [4][cells] what all
 * requests learn from it. */
static void judge(const sf_books *books, int64_t index, int64_t slot, float *new) {
    const int64_t drafts = books->drafts, cells = books->bins * drafts;
    const int64_t place = index * books->slots + slot, offered = books->watched_length[place];
    if (!offered) return;
    const int64_t start = books->watched_start[place], known = books->length[slot] - start;
    const int64_t *text = books->history + slot * books->width + start;
    const int64_t *token = books->watched + place * drafts;
    const int64_t *bin = books->watched_bins + place * drafts;
    const int64_t *parents = books->watched_parents;
    if (parents) parents += place * drafts;
    int64_t depth[SF_MOST_DRAFTS], reached = 0, deepest = 0;
    uint8_t tried[SF_MOST_DRAFTS], right[SF_MOST_DRAFTS];
    for (int64_t j = 0; j < offered; j++) {
        const int64_t up = parent_of(parents, j);
        depth[j] = up < 0 ? 1 : depth[up] + 1;
        tried[j] = (up < 0 || right[up]) && depth[j] <= known;
        right[j] = tried[j] && text[depth[j] - 1] == token[j];
        if (right[j] && depth[j] > reached) reached = depth[j];
        if (depth[j] > deepest) deepest = depth[j];
    }
    if (known <= reached && reached < deepest) return;
    books->watched_length[place] = 0;
    for (int64_t j = 0; j < offered; j++) {
        if (!tried[j]) continue;
        const int64_t cell = bin[j] * drafts + depth[j] - 1;
        /* Drafts of one cell are entered together: they are no earlier trials of each other. */
        float trials = 0.0f, hits = 0.0f, decay = 1.0f;
        for (int64_t other = j; other < offered; other++) {
            if (!tried[other] || bin[other] * drafts + depth[other] - 1 != cell) continue;
            trials += 1.0f;
            hits += right[other];
            decay *= books->slot_decay;
            if (other > j) tried[other] = 0;
        }
        const float *seen = books->seen + index * 4 * cells;
        float *own_hits = books->hits + place * cells + cell;
        float *own_trials = books->trials + place * cells + cell;
        const float mean = seen[cells + cell] / seen[cell];
        new[cell] += trials;
        new[cells + cell] += hits;
        new[2 * cells + cell] += (hits - trials * mean) * (*own_hits - *own_trials * mean);
        new[3 * cells + cell] += trials * *own_trials;
        *own_trials = *own_trials * decay + trials;
        *own_hits = *own_hits * decay + hits;
    }
}

/* Take in the offer of a proposer for a slot, cut to what can be verified, in rows of `width`. */
static void take(const sf_books *books, int64_t index, int64_t slot, const int64_t *tokens,
                 int64_t length, const float *confidence, const int64_t *parents, int64_t width) {
    const int64_t drafts = books->drafts, place = index * books->slots + slot;
    const int64_t room = books->limit[slot] - books->length[slot] - 1;
    int64_t *own_tokens = books->tokens + place * drafts;
    int64_t *own_parents = parents ? books->parents + place * drafts : NULL;
    float *own_confidence = books->confidence + place * drafts;
    int64_t depth[SF_MOST_DRAFTS], valid = 0;
    for (int64_t j = 0; j < drafts; j++) {
        const int64_t token = j < width ? tokens[j] : -1;
        if (parents) {
            const int64_t up = j < width ? sf_least(parents[j], j - 1) : -1;
            own_parents[j] = up < -1 ? -1 : up;
        }
        const int64_t up = parent_of(own_parents, j);
        depth[j] = up < 0 ? 1 : depth[up] + 1;
        if (valid == j && token >= 0 && token < books->vocab && depth[j] <= room) valid++;
        own_tokens[j] = token < 0 ? 0 : token < books->vocab ? token : books->vocab - 1;
        own_confidence[j] = j < width ? confidence[j] : 0.0f;
    }
    length = sf_least(sf_least(length, valid), books->draft_limit[slot]);
    if (!books->allowed[place] || length < 0) length = 0;
    books->lengths[place] = length;
    if (books->watched_length[place] || !length) return;
    for (int64_t j = 0; j < drafts; j++) {
        books->watched[place * drafts + j] = own_tokens[j];
        books->watched_bins[place * drafts + j] = bin_of(books, own_confidence[j]);
        if (parents) books->watched_parents[place * drafts + j] = own_parents[j];
    }
    books->watched_length[place] = length;
    books->watched_start[place] = books->length[slot];
}

/* Judge what is in view of a proposer's offers, and take in the next ones [count][width]; null
 * `tokens`: there are none. `parents` is null where it offers chains. */
SF_EXPORT void sf_learn(const sf_books *books, int64_t index, const int64_t *slots, int64_t count,
                        const int64_t *tokens, const int64_t *lengths, const float *confidence,
                        const int64_t *parents, int64_t width) {
    const int64_t cells = books->bins * books->drafts;
    float new[4 * SF_MOST_CELLS];
    memset(new, 0, 4 * cells * sizeof *new);
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i];
        if (slot == books->nobody) continue;
        judge(books, index, slot, new);
        if (tokens)
            take(books, index, slot, tokens + i * width, lengths[i], confidence + i * width,
                 parents ? parents + i * width : NULL, width);
        else
            books->lengths[index * books->slots + slot] = 0;
    }
    float *seen = books->seen + index * 4 * cells;
    for (int64_t cell = 0; cell < cells; cell++) {
        if (new[cell] == 0.0f) continue;
        float forget = 1.0f;
        for (float left = new[cell]; left > 0; left -= 1.0f) forget *= books->global_decay;
        for (int64_t at = cell; at < 4 * cells; at += cells) seen[at] = seen[at] * forget + new[at];
    }
}

/* What other proposers offer to a slot beside this one: 0 nothing, 1 an offer that begins alike, 2
 * only others. */
static int64_t rivals_of(const sf_books *books, int64_t index, int64_t slot) {
    const int64_t *first = books->tokens + (index * books->slots + slot) * books->drafts;
    int64_t rivals = 0;
    for (int64_t other = 0; other < books->proposers; other++) {
        const int64_t place = other * books->slots + slot;
        if (other == index || !books->lengths[place]) continue;
        if (books->tokens[place * books->drafts] == *first) return 1;
        rivals = 2;
    }
    return rivals;
}

/* Chance that each draft of a proposer's offer for a slot is accepted, or less: along the row it
 * never rises. Returns their sum. */
static float weigh(const sf_books *books, int64_t index, int64_t slot, float *chances) {
    const int64_t drafts = books->drafts, cells = books->bins * drafts;
    const int64_t place = index * books->slots + slot;
    const float *seen = books->seen + index * 4 * cells;
    const float *hits = books->hits + place * cells, *trials = books->trials + place * cells;
    const int64_t *parents = books->parents ? books->parents + place * drafts : NULL;
    int64_t depth[SF_MOST_DRAFTS];
    float path[SF_MOST_DRAFTS], sum = 0.0f;
    const int64_t apart = rivals_of(books, index, slot) * books->sure_bins;
    if (books->watched_start[place] == books->length[slot]) /* Taken in view just now. */
        for (int64_t j = 0; j < drafts; j++) {
            int64_t *bin = books->watched_bins + place * drafts + j;
            *bin = *bin % books->sure_bins + apart;
        }
    for (int64_t j = 0; j < drafts; j++) {
        chances[j] = 0.0f;
        if (j >= books->lengths[place]) continue;
        const int64_t up = parent_of(parents, j);
        depth[j] = up < 0 ? 1 : depth[up] + 1;
        const int64_t bin = bin_of(books, books->confidence[place * drafts + j]);
        const int64_t cell = (apart + bin) * drafts + depth[j] - 1;
        const float mean = seen[cells + cell] / seen[cell];
        const float together = seen[2 * cells + cell] / seen[3 * cells + cell];
        float prior = mean * (1.0f - mean) / (together > 1e-6f ? together : 1e-6f) - 1.0f;
        if (prior < books->least_prior) prior = books->least_prior;
        if (prior > books->largest_prior) prior = books->largest_prior;
        path[j] = (hits[cell] + prior * mean) / (trials[cell] + prior) * (up < 0 ? 1.0f : path[up]);
        chances[j] = j && chances[j - 1] < path[j] ? chances[j - 1] : path[j];
        sum += chances[j];
    }
    return sum;
}

/* Keep the offer of a slot that promises most. */
static void choose(const sf_books *books, int64_t slot) {
    const int64_t drafts = books->drafts;
    float rows[2][SF_MOST_DRAFTS], best = -1.0f;
    int64_t whose = 0;
    int free = 0; /* The row that does not hold the best so far. */
    for (int64_t index = 0; index < books->proposers; index++) {
        const float sum = weigh(books, index, slot, rows[free]);
        if (sum > best) best = sum, whose = index, free = 1 - free;
    }
    const int64_t place = whose * books->slots + slot, length = books->lengths[place];
    for (int64_t j = 0; j < drafts; j++) {
        const float chance = rows[1 - free][j];
        books->best_tokens[slot * drafts + j] = books->tokens[place * drafts + j];
        books->best_chances[slot * drafts + j] =
            j >= length ? 0.0f : chance > books->least_chance ? chance : books->least_chance;
        if (books->parents)
            books->best_parents[slot * drafts + j] = books->parents[place * drafts + j];
    }
    books->best_lengths[slot] = length;
    books->best_proposer[slot] = whose;
}

static void withdraw(const sf_books *books, int64_t slot) {
    for (int64_t index = 0; index < books->proposers; index++)
        books->lengths[index * books->slots + slot] = 0;
    books->best_lengths[slot] = 0;
    for (int64_t j = 0; j < books->drafts; j++) books->best_chances[slot * books->drafts + j] = 0.0f;
}

/* Choose the offers for the next round, or withdraw all where nobody proposed, and report; requests
 * that ended are dead from now on. The columns are those of surefoot.speculation.books. */
SF_EXPORT void sf_report(const sf_books *books, const int64_t *slots, int64_t count,
                         const int64_t *verified, const int64_t *counts, const int64_t *accepted,
                         const int64_t *ends, const int64_t *going, const int64_t *tokens,
                         int64_t proposing) {
    const int64_t drafts = books->drafts;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i];
        const int goes = going[i] != books->nobody;
        int32_t *row = books->report + i * books->columns;
        row[4] = (int32_t)books->best_proposer[slot];
        if (!proposing)
            withdraw(books, slot);
        else if (goes && books->proposers)
            choose(books, slot);
        if (ends[i]) books->alive[slot] = 0;
        row[0] = (int32_t)counts[i], row[1] = (int32_t)accepted[i], row[2] = (int32_t)ends[i];
        row[3] = (int32_t)verified[i];
        row[5] = goes ? (int32_t)books->best_lengths[slot] : 0;
        row[6] = (int32_t)books->best_proposer[slot];
        row += 7;
        for (int64_t j = 0; j <= drafts; j++) *row++ = (int32_t)tokens[i * (drafts + 1) + j];
        for (int64_t j = 0; j < drafts; j++) {
            const float chance = goes ? books->best_chances[slot * drafts + j] : 0.0f;
            memcpy(row++, &chance, sizeof chance);
        }
        for (int64_t j = 0; j < drafts; j++) *row++ = (int32_t)books->best_tokens[slot * drafts + j];
        if (books->parents)
            for (int64_t j = 0; j < drafts; j++)
                *row++ = (int32_t)books->best_parents[slot * drafts + j];
    }
}
