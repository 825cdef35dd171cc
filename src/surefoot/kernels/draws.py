"""What sampling kernels are told about M rows of logits: the parameters of their slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens M rows may take, by slot: the j-th row of a span those of the slot's entry j, or
    of its last one."""

    bits: torch.Tensor
    """int32 [slots * entries, ceil(vocab / 32)]: bit t % 32 of word t // 32 stands for token t. In
    the host's memory, where a GPU can read it."""
    entries: int
    """Of each slot."""
    slots: torch.Tensor
    """int64 [M]: whose a row is."""
    first: torch.Tensor
    """int64 [B], rising, from 0 on: each span's first row; one that has none begins where the next
    one does."""
    masked: torch.Tensor
    """int64 [slots]: above 0 where there are masks; else rows may take any token."""

    @property
    def row(self) -> torch.Tensor:
        """int64 [M]: each row's row of ``bits``; -1 for one that may take any token."""
        index = torch.arange(len(self.slots), device=self.first.device)
        owner = torch.searchsorted(self.first, index, right=True) - 1
        place = (index - self.first[owner]).clamp(0, self.entries - 1)
        return torch.where(self.masked[self.slots] > 0, self.slots * self.entries + place, -1)


UNREAD, READ, CHANGED = 0, 1, 2
"""What becomes of a request's logits: only which is the largest is asked; they are drawn from, or
told; or masked or adjusted before that."""


class Maxima(NamedTuple):
    """Of M rows of logits, as they were before anything changed them, the largest one of each tile
    of neighbouring columns."""

    values: torch.Tensor
    """float32 [M, tiles]."""
    columns: torch.Tensor
    """int32 [M, tiles]: the lowest of equals."""


@dataclass(frozen=True)
class Draws:
    """Who draws a token, and how: M rows, each with the parameters of its slot."""

    slots: torch.Tensor
    """int64 [M]: the row of the tensors below, all [slots]."""
    positions: torch.Tensor
    """int64 [M]: position of the token to be drawn."""
    temperature: torch.Tensor
    """float32; 0 takes the largest logit."""
    min_p: torch.Tensor
    """float32; 0 filters nothing."""
    top_p: torch.Tensor
    """float32; 1 filters nothing."""
    top_k: torch.Tensor
    """int64; the size of the vocabulary or more filters nothing."""
    seed: torch.Tensor
    """int64."""
    choice: torch.Tensor
    """int64."""
    use: torch.Tensor
    """int64: ``UNREAD``, ``READ`` or ``CHANGED``."""
    noise: bool = True
    """Whether anybody has a temperature above 0."""
    changed: bool = True
    """Whether the logits of anybody who is ``CHANGED`` were."""
    maxima: Maxima | None = None
    """If given, the logits of rows that are ``UNREAD`` may be anything."""


@dataclass(frozen=True)
class Adjustments:
    """What changes the logits of M rows before a token is drawn, stage by stage. A stage that is
    off reads none of its tensors."""

    slots: torch.Tensor
    """int64 [M]: the row of the tensors by slot below."""
    positions: torch.Tensor
    """int64 [M]: position of the token to be drawn; those before it are its history."""
    penalties: bool
    """Whether repetition, presence and frequency apply."""
    biased: bool
    """Whether ``bias`` applies."""
    min_tokens: bool
    """Whether ends are masked below ``min_length``."""
    history: torch.Tensor
    """int64 [slots, width], of which the first ``max_history`` columns are read."""
    max_history: int
    prompt_length: torch.Tensor
    """int64 [slots]."""
    repetition: torch.Tensor
    """float32 [slots], as are ``presence`` and ``frequency``."""
    presence: torch.Tensor
    frequency: torch.Tensor
    bias_ids: torch.Tensor
    """int64 [slots, n], padded with -1."""
    bias: torch.Tensor
    """float32 [slots, n]."""
    stop_ids: torch.Tensor
    """int64 [slots, n], padded with -1."""
    min_length: torch.Tensor
    """int64 [slots]."""
    columns: torch.Tensor | None = None
    """int32 [vocab]: where in a row a token's logit stands, -1: nowhere; None: at its id."""

    @property
    def adjusts(self) -> bool:
        """Whether any stage is on."""
        return self.penalties or self.biased or self.min_tokens


def mask_tokens(logits: torch.Tensor, masks: TokenMasks) -> None:
    """float32 logits [M, vocab], in place: -inf where ``masks`` forbid a token."""
    vocab = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    # Only the rows' own: there are masks for every row that any request may have.
    row = masks.row
    bits = masks.bits.to(row.device)[row.clamp(min=0)].unsqueeze(2)
    allowed = ((bits >> places) & 1).flatten(1)[:, :vocab].bool()
    free = (row < 0).unsqueeze(1)
    logits.masked_fill_(~(free | allowed), float("-inf"))
