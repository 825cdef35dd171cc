"""What drafts without a network are worth: each token's most frequent successor."""

from __future__ import annotations

import numpy as np

from surefoot.train.corpus import Corpus
from surefoot.train.measure import Walk, generated_runs


def frequent_successors(corpus: Corpus, documents: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: the generated token that follows each token most often in ``documents``
    (the lowest id among equals), -1 where none does."""
    chosen = np.zeros(len(corpus), dtype=bool)
    chosen[documents] = True
    counted = (corpus.generated & np.repeat(chosen, np.diff(corpus.starts)))[1:]
    # A document's first token follows nothing.
    counted[corpus.starts[1:-1] - 1] = False
    places = counted.nonzero()[0]
    before, after = (corpus.ids[places + shift].astype(np.int64) for shift in (0, 1))
    pairs, counts = np.unique(before * vocab_size + after, return_counts=True)
    order = np.lexsort((pairs % vocab_size, -counts, pairs // vocab_size))
    first = pairs[order] // vocab_size
    best = np.append(True, first[1:] != first[:-1]) if len(first) else np.zeros(0, dtype=bool)
    found = np.full(vocab_size, -1, dtype=np.int64)
    found[first[best]] = pairs[order][best] % vocab_size
    return found


def successor_length(
    corpus: Corpus, train: np.ndarray, held_out: np.ndarray, vocab_size: int, depth: int
) -> float | None:
    """The accepted length of chains of ``depth`` such drafts on greedy ``held_out`` documents; None
    where there are none. ``train``: whose pairs are counted."""
    table, walk = frequent_successors(corpus, train, vocab_size), Walk(depth)
    for document in held_out[corpus.temperature[held_out] == 0]:
        piece = slice(corpus.starts[document], corpus.starts[document + 1])
        ids = corpus.ids[piece].astype(np.int64)
        for first, last in generated_runs(corpus.generated[piece]):
            if first == 0:
                continue
            text = ids[first:last]
            drafts = np.empty((len(text) - 1, depth), dtype=np.int64)
            token = text[:-1]
            for step in range(depth):
                token = np.where(token < 0, -1, table[token])
                drafts[:, step] = token
            walk.span(drafts, text)
    return walk.accepted_length if walk.rounds else None
