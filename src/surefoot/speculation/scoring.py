"""Logprobs of the tokens that a round commits, and of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from surefoot.kernels.logprobs import ScoredSpans
from surefoot.kernels.rounds import RoundLayout
from surefoot.models.decoder import Decoder
from surefoot.sampling.logprobs import WIDTHS
from surefoot.speculation.size import Size
from surefoot.speculation.state import SlotState

if TYPE_CHECKING:
    from surefoot.speculation.trees import Paths

PROMPT_ROWS = 64
"""Rows of prompts whose logits are there at once."""


@dataclass(frozen=True)
class PromptReads:
    """What is wanted of the prompts' rows in a round."""

    scored: torch.Tensor | None = None
    """int64 [R]: the flat rows whose next token's logprobs are wanted."""
    pooled: tuple[tuple[int, int], ...] = ()
    """(First flat row, rows) of the chunks whose hidden states are to be summed up."""


class PromptScores(NamedTuple):
    """``logprobs``: int32 [rows, columns] each, as ``kernels.logprobs`` has them; ``pooled``:
    float64 [hidden] for each chunk."""

    logprobs: list[torch.Tensor]
    pooled: list[torch.Tensor]


class TokenScores:
    """Scores as ``kernels.logprobs`` has them, for the spans of a round that want them."""

    def __init__(self, decoder: Decoder, state: SlotState, spans: int) -> None:
        """``spans``: the most requests of a round."""
        self.decoder = decoder
        self.state = state
        columns = 2 + 2 * min(WIDTHS[-1], state.vocab_size)
        most = spans * (state.max_drafts + 1) * columns
        self.table = torch.zeros(most, dtype=torch.int32, device=state.device)
        """int32, of the last round whose size asked for them."""

    def shape(self, size: Size) -> tuple[int, int, int]:
        """(Scored spans, tokens, columns) of a round of ``size`` that asks for logprobs."""
        assert size.logprobs is not None
        rows = self.state.max_drafts + 1 if size.verifies else 1
        return size.scored, rows, 2 + 2 * min(size.logprobs, self.state.vocab_size)

    def part(self, size: Size) -> torch.Tensor | None:
        """What a round of ``size`` writes, by ``shape``: the first of the table, so that one copy
        brings it to the host."""
        if size.logprobs is None:
            return None
        shape = self.shape(size)
        return self.table[: math.prod(shape)].view(shape)

    def of_tokens(
        self,
        size: Size,
        layout: RoundLayout,
        logits: torch.Tensor,
        sampled: torch.Tensor,
        places: torch.Tensor,
        paths: Paths | None,
    ) -> None:
        """Of the spans at ``places`` int64 [n]: their rows of float32 logits [M, vocab] and
        ``sampled`` tokens int64 [M], or in trees those of the accepted paths."""
        table = self.part(size)
        if table is None or size.logprobs is None:
            return
        steps = None if paths is None else paths.rows
        count = table.shape[1] if steps is None else min(table.shape[1], steps.shape[1])
        spans = ScoredSpans(layout.first_sample, places, count, steps)
        packed = self.decoder.backend.span_logprobs(logits, sampled, spans, size.logprobs)
        table[:, :count] = packed.unflatten(0, (-1, count))

    def of_prompt(
        self,
        size: Size,
        layout: RoundLayout,
        hidden: torch.Tensor,
        reads: PromptReads | None,
    ) -> PromptScores:
        """What ``reads`` asks for, logprobs of prompt tokens each under the row before it and a few
        rows at a time. ``hidden`` [N, hidden] of all rows."""
        scores = PromptScores([], [])
        if reads is None:
            return scores
        for first, count in reads.pooled:
            scores.pooled.append(self.decoder.pooled(hidden[first : first + count]))
        if reads.scored is None or size.prompt_logprobs is None:
            return scores
        batch, backend = layout.batch, self.decoder.backend
        for rows in reads.scored.split(PROMPT_ROWS):
            following = self.state.history[batch.row_slot[rows], batch.positions[rows] + 1]
            logits = self.decoder.logits(hidden[rows])
            packed = backend.row_logprobs(logits, following, size.prompt_logprobs)
            scores.logprobs.append(packed)
        return scores
