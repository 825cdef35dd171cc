"""How much plain decoding's own logits move with the batch that they are computed in.

The same rows are computed in several batch compositions that plain decoding meets: a whole
prompt at once, chunks of it, single rows alone, single rows of many requests together. What
differs between them is the arithmetic's noise, and no difference in text that this noise can
explain is held against speculation. Where nothing differs, the arithmetic is *bit-exact*: no
difference has an excuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from surefoot.certify.prefill import TextCache
from surefoot.models.decoder import Decoder

CANDIDATES = 32
"""Only the likeliest tokens can win, so only their noise counts."""
MARGIN = 2.0
"""The bound is this much above the largest noise seen: most rows are not calibrated on."""
LOGPROB_FLOOR = 1e-5
"""Rounding of float32 logprobs around 10, a few units in the last place."""
SCORE_FLOOR = 3e-5
"""Rounding of float32 scores with penalties, a division, and Gumbel noise up to 20 in them."""
TREES, TREE_ROWS = 8, 6
"""Stretches of a text that are computed as paths of trees, and their rows."""
PLAUSIBLE = 32
"""Noise beyond this many units of rounding of the largest logit is no rounding any more."""


@dataclass(frozen=True)
class Noise:
    """``spread``: per calibrated row, how far its candidates moved against each other (logits).
    ``regret_bound``: largest loss of log-probability that counts as a tie."""

    rows: int
    compositions: tuple[str, ...]
    largest_spread: float
    largest_logprob_change: float
    largest_logit: float
    plausible_limit: float

    @property
    def bit_exact(self) -> bool:
        """Whether no composition changed a bit of a candidate's logit."""
        return self.largest_spread == 0 == self.largest_logprob_change

    @property
    def statement(self) -> str:
        """For people."""
        measured = f"{self.rows} rows, {len(self.compositions)} compositions"
        if self.bit_exact:
            return f"Bit-exact: no logit moves with the batch ({measured}), so nothing is a tie."
        return (
            f"Noise of plain decoding: logits move by up to {self.largest_spread:.3g} with the "
            f"batch ({measured}); a tie is a regret of at most {self.regret_bound:.3g}."
        )

    @property
    def regret_bound(self) -> float:
        return MARGIN * self.largest_spread

    @property
    def logprob_tolerance(self) -> float:
        return MARGIN * self.largest_logprob_change + LOGPROB_FLOOR

    @property
    def plausible(self) -> bool:
        return self.largest_spread <= self.plausible_limit


def measure_noise(decoder: Decoder, texts: Sequence[Sequence[int]], trees: bool = False) -> Noise:
    """Compute every row of ``texts`` in each composition and compare with the whole prefill.
    ``trees``: some of them in a tree as well."""
    reference = _compose(decoder, texts, chunk=None, together=False)
    ways = {
        "single rows, alone": (1, False),
        "single rows, together": (1, True),
        "chunks of 7 rows, together": (7, True),
        "whole texts, together": (None, True),
    }
    spread = change = 0.0
    for chunk, together in ways.values():
        # Alone is slow where a pass costs the same for one row as for many.
        some = 1 if chunk == 1 and not together else len(texts)
        other = _compose(decoder, texts[:some], chunk, together)
        for left, right in zip(reference, other, strict=False):
            row_spread, row_change = _distance(left, right)
            spread, change = max(spread, row_spread), max(change, row_change)
    if trees:
        for text, whole in zip(texts, reference, strict=True):
            for at, rows in _in_trees(decoder, text):
                row_spread, row_change = _distance(whole[at : at + len(rows)], rows)
                spread, change = max(spread, row_spread), max(change, row_change)
    largest = max(float(rows.abs().max()) for rows in reference)
    unit = torch.finfo(decoder.backend.dtype).eps
    return Noise(
        rows=sum(len(text) for text in texts),
        compositions=(*ways, *(("rows of a tree",) if trees else ())),
        largest_spread=spread,
        largest_logprob_change=change,
        largest_logit=largest,
        plausible_limit=PLAUSIBLE * unit * largest,
    )


def _compose(
    decoder: Decoder, texts: Sequence[Sequence[int]], chunk: int | None, together: bool
) -> list[torch.Tensor]:
    groups = [texts] if together else [[text] for text in texts]
    rows: list[torch.Tensor] = []
    for group in groups:
        cache = TextCache(decoder, group)
        longest = max(len(text) for text in group)
        size = chunk or longest
        pieces: list[list[torch.Tensor]] = [[] for _ in group]
        for start in range(0, longest, size):
            spans = [range(min(start, len(text)), min(start + size, len(text))) for text in group]
            hidden = cache.run(spans)
            # The head runs on the rows of the forward together, as in the engine.
            logits = decoder.logits(torch.cat(hidden)).split([len(span) for span in spans])
            for piece, part in zip(pieces, logits, strict=True):
                piece.append(part.clone())
        rows += [torch.cat(piece) for piece in pieces]
    return rows


def _in_trees(decoder: Decoder, text: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """(First row, logits) of a few stretches of a text that are computed as paths of trees."""
    cache, done = TextCache(decoder, [text]), 0
    for part in range(1, TREES + 1):
        at = part * (len(text) - 2 * TREE_ROWS) // (TREES + 1)
        if at <= done:
            continue
        cache.run([range(done, at)])
        [hidden] = cache.run_trees([range(at, at + TREE_ROWS)])
        yield at, decoder.logits(hidden).clone()
        done = at


def _distance(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    best = left.topk(min(CANDIDATES, left.shape[1]), dim=1).indices
    moved = (right - left).gather(1, best)
    spread = (moved.amax(dim=1) - moved.amin(dim=1)).max()
    logprobs = right.log_softmax(dim=1) - left.log_softmax(dim=1)
    return float(spread), float(logprobs.gather(1, best).abs().max())
