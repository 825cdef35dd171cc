"""The draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

import numpy as np
import torch

from surefoot.train.corpus import Corpus


def choose_vocabulary(
    corpus: Corpus, documents: np.ndarray, vocab_size: int, size: int
) -> tuple[np.ndarray, float]:
    """(ids int64 [size] ascending, the share of the generated tokens that they cover): the most
    frequent among the generated tokens of ``documents``; equals and unused ones by lowest id."""
    chosen = np.zeros(len(corpus), dtype=bool)
    chosen[documents] = True
    counted = corpus.generated & np.repeat(chosen, np.diff(corpus.starts))
    counts = np.bincount(corpus.ids[counted], minlength=vocab_size)
    size = min(size, vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)
    return ids, float(counts[ids].sum() / max(1, counts.sum()))


def places_of(ids: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Where the token ids ``ids`` are in the rising ``known``, int64; -1: they are not."""
    places = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    return torch.where(known[places] == ids, places, -1)
