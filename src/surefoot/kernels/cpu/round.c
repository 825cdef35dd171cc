/* The round's operations over the slot tensors: twins of the functions of the same names in
 * surefoot.speculation, one request after the other. */
#include <stdint.h>
#include <string.h>

#define SF_EXPORT __attribute__((visibility("default")))

typedef struct {
    int64_t *history; /* [slots][width] */
    int64_t width;
    int64_t *length, *computed, *limit, *alive; /* [slots] */
} slot_state;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Drafts [count][drafts] go behind the committed tokens. */
SF_EXPORT void sf_write_drafts(const slot_state *state, const int64_t *slots, int64_t count,
                               const int64_t *tokens, int64_t drafts) {
    for (int64_t i = 0; i < count; i++) {
        int64_t *text = state->history + slots[i] * state->width + state->length[slots[i]];
        for (int64_t j = 0; j < drafts; j++) text[j] = tokens[i * drafts + j];
    }
}

typedef struct {
    int64_t *tokens, *positions, *row_slot; /* [rows] */
    int64_t *first_row;                     /* [count] */
    int64_t *sample_index, *sample_slots, *sample_positions; /* [sampled_rows] */
    int64_t *first_sample;                                   /* [count] */
} layout;

SF_EXPORT void sf_lay_out(const slot_state *state, const int64_t *slots, const int64_t *known,
                          const int64_t *drafts, const int64_t *samples, int64_t count,
                          int64_t rows, int64_t sampled_rows, const layout *out) {
    int64_t row = 0, sample = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], start = state->computed[slot];
        const int64_t size = known[i] ? known[i] + drafts[i] : 0;
        const int64_t *text = state->history + slot * state->width + start;
        out->first_row[i] = row;
        out->first_sample[i] = sample;
        for (int64_t j = 0; j < size; j++) {
            out->tokens[row + j] = text[j];
            out->positions[row + j] = start + j;
            out->row_slot[row + j] = slot;
        }
        if (size && samples[i])
            for (int64_t j = known[i] - 1; j < size; j++, sample++) {
                out->sample_index[sample] = row + j;
                out->sample_slots[sample] = slot;
                out->sample_positions[sample] = start + j + 1;
            }
        row += size;
    }
    /* Rows beyond the spans repeat the last one, and belong to nobody. */
    for (int64_t j = row; j < rows; j++) {
        out->tokens[j] = row ? out->tokens[row - 1] : 0;
        out->positions[j] = row ? out->positions[row - 1] : 0;
        out->row_slot[j] = -1;
    }
    for (int64_t j = sample; j < sampled_rows; j++) {
        out->sample_index[j] = sample ? out->sample_index[sample - 1] : 0;
        out->sample_slots[j] = sample ? out->sample_slots[sample - 1] : slots[0];
        out->sample_positions[j] = sample ? out->sample_positions[sample - 1] : 0;
    }
}

static int contains(const int64_t *ids, int64_t count, int64_t id) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return 1;
    return 0;
}

/* Accept, cut at ends, commit; an entry without known rows changes nothing. */
SF_EXPORT void sf_judge(const slot_state *state, const int64_t *slots, const int64_t *known,
                        const int64_t *drafts, const int64_t *samples, int64_t count,
                        const int64_t *sampled, int64_t sampled_rows, const int64_t *first_sample,
                        int64_t most_drafts, const int64_t *stop_ids, int64_t stop_width,
                        int64_t *tokens, int64_t *accepted, int64_t *counts, int64_t *ends,
                        int64_t *first, int64_t *settled, int64_t *going, int64_t nobody) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], length = state->length[slot];
        int64_t *text = state->history + slot * state->width + length;
        int64_t *token = tokens + i * (most_drafts + 1);
        for (int64_t j = 0; j <= most_drafts; j++)
            token[j] = sampled[least(first_sample[i] + j, sampled_rows - 1)];
        first[i] = state->computed[slot];
        accepted[i] = counts[i] = ends[i] = settled[i] = 0;
        going[i] = nobody;
        if (!known[i]) continue;
        settled[i] = known[i];
        if (samples[i]) {
            int64_t right = 0;
            while (right < least(drafts[i], most_drafts) && token[right] == text[right]) right++;
            const int64_t room = state->limit[slot] - length, most = least(right + 1, room);
            int64_t kept = 0, stopped = 0;
            while (kept < most && !stopped)
                stopped = contains(stop_ids + slot * stop_width, stop_width, token[kept++]);
            accepted[i] = right;
            counts[i] = kept;
            ends[i] = stopped ? 1 : kept >= room ? 2 : 0;
            for (int64_t j = 0; j < kept; j++) text[j] = token[j];
            if (kept) settled[i] = length + kept - 1 - first[i];
            if (kept && !ends[i]) going[i] = slot;
        }
        state->length[slot] = length + counts[i];
        state->computed[slot] = first[i] + settled[i];
    }
}

/* Offers [count][width], cut to what can be verified, as [count][drafts]. */
SF_EXPORT void sf_sanitise(const slot_state *state, const int64_t *slots, int64_t count,
                           const int64_t *tokens, const int64_t *lengths, const float *confidence,
                           int64_t width, int64_t drafts, int64_t vocab, const uint8_t *allowed,
                           const int64_t *draft_limit, int64_t *out_tokens, int64_t *out_lengths,
                           float *out_confidence) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], room = state->limit[slot] - state->length[slot] - 1;
        int64_t most = least(least(lengths[i], width), least(room, draft_limit[slot])), valid = 0;
        if (most > drafts) most = drafts;
        for (int64_t j = 0; j < drafts; j++) {
            int64_t token = j < width ? tokens[i * width + j] : -1;
            if (valid == j && token >= 0 && token < vocab) valid++;
            out_tokens[i * drafts + j] = token < 0 ? 0 : token < vocab ? token : vocab - 1;
            out_confidence[i * drafts + j] = j < width ? confidence[i * width + j] : 0.0f;
        }
        most = least(most, valid);
        out_lengths[i] = allowed[slot] && most > 0 ? most : 0;
    }
}

/* Chance that each offered draft and all before it are accepted, [count][drafts]: the twin of
 * AcceptanceEstimator.chances_reference. */
SF_EXPORT void sf_chances(const int64_t *slots, int64_t count, const int64_t *lengths,
                          const float *confidence, int64_t drafts, int64_t bins, const float *hits,
                          const float *trials, const float *seen, float least_prior,
                          float largest_prior, float *chances) {
    const int64_t part = bins * drafts;
    for (int64_t i = 0; i < count; i++) {
        const int64_t cells = slots[i] * bins * drafts;
        float chance = 1.0f;
        for (int64_t j = 0; j < drafts; j++) {
            int64_t bin = (int64_t)(confidence[i * drafts + j] * (float)bins);
            bin = bin < 0 ? 0 : bin >= bins ? bins - 1 : bin;
            const int64_t cell = bin * drafts + j;
            const float all = seen[part + cell] / seen[cell];
            const float together = seen[2 * part + cell] / seen[3 * part + cell];
            float prior = all * (1.0f - all) / (together > 1e-6f ? together : 1e-6f) - 1.0f;
            if (prior < least_prior) prior = least_prior;
            if (prior > largest_prior) prior = largest_prior;
            chance *= (hits[cells + cell] + prior * all) / (trials[cells + cell] + prior);
            if (j >= lengths[i]) chance = 0.0f;
            chances[i * drafts + j] = chance;
        }
    }
}

/* Requests by the chance of their next draft, the likeliest first, of equal ones the first. */
typedef struct {
    const float *chances;
    int64_t drafts, size;
    int64_t *counts, *heap;
} sf_queue;

static int sf_before(const sf_queue *queue, int64_t left, int64_t right) {
    const float a = queue->chances[left * queue->drafts + queue->counts[left]];
    const float b = queue->chances[right * queue->drafts + queue->counts[right]];
    return a > b || (a == b && left < right);
}

static void sf_sink(sf_queue *queue, int64_t at) {
    const int64_t moved = queue->heap[at];
    for (int64_t child; (child = 2 * at + 1) < queue->size; at = child) {
        if (child + 1 < queue->size && sf_before(queue, queue->heap[child + 1], queue->heap[child]))
            child++;
        if (!sf_before(queue, queue->heap[child], moved)) break;
        queue->heap[at] = queue->heap[child];
    }
    queue->heap[at] = moved;
}

static void sf_fill(sf_queue *queue, int64_t count) {
    queue->size = queue->drafts > 0 ? count : 0;
    for (int64_t i = 0; i < count; i++) queue->counts[i] = 0, queue->heap[i] = i;
    for (int64_t i = queue->size / 2 - 1; i >= 0; i--) sf_sink(queue, i);
}

/* Take the likeliest draft: its request, or -1 where none has a chance. */
static int64_t sf_take(sf_queue *queue, float *chance) {
    if (!queue->size) return -1;
    const int64_t owner = queue->heap[0];
    *chance = queue->chances[owner * queue->drafts + queue->counts[owner]];
    if (!(*chance > 0.0f)) return -1;
    if (++queue->counts[owner] == queue->drafts) queue->heap[0] = queue->heap[--queue->size];
    sf_sink(queue, 0);
    return owner;
}

/* The spans of a round: known rows up to each one's quota, and the rest of the rows for the
 * likeliest drafts [slots][drafts] of requests that have only their current token to run. Chances
 * never rise along a row, so the best drafts are found by merging the rows. Drafts go behind the
 * committed tokens. `scratch` [count], `mine` [count][drafts]. */
SF_EXPORT void sf_split(const slot_state *state, const int64_t *slots, const int64_t *quota,
                        int64_t count, int64_t rows, int64_t sampled_rows, const float *chances,
                        const int64_t *tokens, int64_t drafts, int64_t verifies, int64_t *known,
                        int64_t *taken, int64_t *samples, int64_t *scratch, float *mine) {
    int64_t room = rows, sampling = sampled_rows;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], missing = state->length[slot] - state->computed[slot];
        known[i] = least(quota[i], missing) * state->alive[slot];
        samples[i] = known[i] > 0 && known[i] == missing;
        taken[i] = 0;
        room -= known[i];
        sampling -= samples[i];
        if (!verifies) continue;
        const int drafting = samples[i] && missing == 1;
        int64_t *text = state->history + slot * state->width + state->length[slot];
        for (int64_t j = 0; j < drafts; j++) {
            mine[i * drafts + j] = drafting ? chances[slot * drafts + j] : 0.0f;
            text[j] = tokens[slot * drafts + j];
        }
    }
    if (!verifies) return;
    sf_queue queue = {mine, drafts, 0, taken, scratch};
    sf_fill(&queue, count);
    float chance;
    for (int64_t left = least(room, sampling); left > 0; left--)
        if (sf_take(&queue, &chance) < 0) break;
}

/* A round's report [count][columns], as surefoot.speculation.books.ReportColumns has it; requests
 * that ended are dead from now on. `kept_…`: the best offers, by slot; `parents` may be null. */
SF_EXPORT void sf_report(const slot_state *state, const int64_t *slots, int64_t count,
                         int64_t nobody, const int64_t *counts, const int64_t *accepted,
                         const int64_t *ends, const int64_t *verified, const int64_t *whose,
                         const int64_t *going, const int64_t *tokens, int64_t drafts,
                         const int64_t *kept_tokens, const float *kept_chances,
                         const int64_t *kept_lengths, const int64_t *kept_proposer,
                         const int64_t *parents, int32_t *report, int64_t columns) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i];
        const int goes = going[i] != nobody;
        int32_t *row = report + i * columns;
        if (ends[i]) state->alive[slot] = 0;
        row[0] = (int32_t)counts[i], row[1] = (int32_t)accepted[i], row[2] = (int32_t)ends[i];
        row[3] = (int32_t)verified[i], row[4] = (int32_t)whose[i];
        row[5] = goes ? (int32_t)kept_lengths[slot] : 0;
        row[6] = (int32_t)kept_proposer[slot];
        row += 7;
        for (int64_t j = 0; j <= drafts; j++) *row++ = (int32_t)tokens[i * (drafts + 1) + j];
        for (int64_t j = 0; j < drafts; j++) {
            const float chance = goes ? kept_chances[slot * drafts + j] : 0.0f;
            memcpy(row++, &chance, sizeof chance);
        }
        for (int64_t j = 0; j < drafts; j++) *row++ = (int32_t)kept_tokens[slot * drafts + j];
        if (parents)
            for (int64_t j = 0; j < drafts; j++) *row++ = (int32_t)parents[slot * drafts + j];
    }
}
