/* A round's rows: which there are, what stands in them, what is accepted. Twins of the methods of
 * surefoot.speculation.torch_books, one request after the other. */
#include "books.h"

/* Drafts [count][drafts] go behind the committed tokens. */
SF_EXPORT void sf_write_drafts(const sf_books *books, const int64_t *slots, int64_t count,
                               const int64_t *tokens, int64_t drafts) {
    for (int64_t i = 0; i < count; i++) {
        int64_t *text = books->history + slots[i] * books->width + books->length[slots[i]];
        for (int64_t j = 0; j < drafts; j++) text[j] = tokens[i * drafts + j];
    }
}

typedef struct {
    int64_t *tokens, *positions, *row_slot; /* [rows] */
    int64_t *first_row;                     /* [count] */
    int64_t *sample_index, *sample_slots, *sample_positions; /* [sampled_rows] */
    int64_t *first_sample;                                   /* [count] */
} layout;

SF_EXPORT void sf_lay_out(const sf_books *books, const int64_t *slots, const int64_t *known,
                          const int64_t *drafts, const int64_t *samples, int64_t count,
                          int64_t rows, int64_t sampled_rows, const layout *out) {
    int64_t row = 0, sample = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], start = books->computed[slot];
        const int64_t size = known[i] ? known[i] + drafts[i] : 0;
        const int64_t *text = books->history + slot * books->width + start;
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
SF_EXPORT void sf_judge(const sf_books *books, const int64_t *slots, const int64_t *known,
                        const int64_t *drafts, const int64_t *samples, int64_t count,
                        const int64_t *sampled, int64_t sampled_rows, const int64_t *first_sample,
                        const int64_t *stop_ids, int64_t stop_width, int64_t *tokens,
                        int64_t *accepted, int64_t *counts, int64_t *ends, int64_t *settled,
                        int64_t *going) {
    const int64_t most_drafts = books->drafts;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], length = books->length[slot];
        const int64_t computed = books->computed[slot];
        int64_t *text = books->history + slot * books->width + length;
        int64_t *token = tokens + i * (most_drafts + 1);
        for (int64_t j = 0; j <= most_drafts; j++)
            token[j] = sampled[sf_least(first_sample[i] + j, sampled_rows - 1)];
        accepted[i] = counts[i] = ends[i] = settled[i] = 0;
        going[i] = books->nobody;
        if (!known[i]) continue;
        settled[i] = known[i];
        if (samples[i]) {
            int64_t right = 0;
            while (right < sf_least(drafts[i], most_drafts) && token[right] == text[right]) right++;
            const int64_t room = books->limit[slot] - length, most = sf_least(right + 1, room);
            int64_t kept = 0, stopped = 0;
            while (kept < most && !stopped)
                stopped = contains(stop_ids + slot * stop_width, stop_width, token[kept++]);
            accepted[i] = right;
            counts[i] = kept;
            ends[i] = stopped ? 1 : kept >= room ? 2 : 0;
            for (int64_t j = 0; j < kept; j++) text[j] = token[j];
            if (kept) settled[i] = length + kept - 1 - computed;
            if (kept && !ends[i]) going[i] = slot;
        }
        books->length[slot] = length + counts[i];
        books->computed[slot] = computed + settled[i];
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
 * likeliest of the best offers of requests that have only their current token to run. Chances
 * never rise along a row, so the best drafts are found by merging the rows. Drafts go behind the
 * committed tokens. `scratch` [count], `mine` [count][drafts]. */
SF_EXPORT void sf_split(const sf_books *books, const int64_t *slots, const int64_t *quota,
                        int64_t count, int64_t rows, int64_t sampled_rows, int64_t verifies,
                        int64_t *known, int64_t *taken, int64_t *samples, int64_t *scratch,
                        float *mine) {
    const int64_t drafts = books->drafts;
    int64_t room = rows, sampling = sampled_rows;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], missing = books->length[slot] - books->computed[slot];
        known[i] = sf_least(quota[i], missing) * books->alive[slot];
        samples[i] = known[i] > 0 && known[i] == missing;
        taken[i] = 0;
        room -= known[i];
        sampling -= samples[i];
        if (!verifies) continue;
        const int drafting = samples[i] && missing == 1;
        int64_t *text = books->history + slot * books->width + books->length[slot];
        for (int64_t j = 0; j < drafts; j++) {
            mine[i * drafts + j] = drafting ? books->best_chances[slot * drafts + j] : 0.0f;
            text[j] = books->best_tokens[slot * drafts + j];
        }
    }
    if (!verifies) return;
    sf_queue queue = {mine, drafts, 0, taken, scratch};
    sf_fill(&queue, count);
    float chance;
    for (int64_t left = sf_least(room, sampling); left > 0; left--)
        if (sf_take(&queue, &chance) < 0) break;
}
