"""A drafter of blocks as a whole, for devices that draft a block in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from surefoot.kernels.backend import LayerWeights, RopeTable
    from surefoot.kernels.drafter_parts import Scratch


class RowsSeen(NamedTuple):
    """What the rows of a block see in a layer."""

    masks: Sequence[torch.Tensor]
    """By rows of the block, int64 [rows] each, as ``FlatBatch.mask``."""
    window: int
    """Keys that a row sees to its left, itself included; 0: all."""
    from_anchor: bool
    """The window bounds the context alone, and is the block's first row's for all of them."""


@dataclass(frozen=True)
class BlockWeights:
    """All of a drafter whose blocks' rows are picked along a Markov chain."""

    table: Any
    mask_embedding: torch.Tensor | None
    """[hidden]: in place of the filler's, which stands in all rows but the first."""
    embedding_scale: float
    layers: Sequence[LayerWeights]
    seen: Sequence[RowsSeen]
    """By layer."""
    rope: RopeTable
    norm: torch.Tensor
    eps: float
    head: Any
    ids: torch.Tensor | None
    before: Any
    after: Any
    """As of ``Drafting.markov``, like ``ids``."""
    of_hidden: torch.Tensor | None
    of_token: torch.Tensor | None
    """float32 [hidden] and [vocabulary]: the sigmoid of a normed row's product with the one plus
    what the other has for the token before is the chance of its draft. None: the chance is what
    its logits give it."""
    first_row: int
    """The first row that drafts."""
    filler: int
    first_key: int
    behind: int
    last_position: int
    """As of ``Drafting.live_rows``, like ``behind``."""
    most_rows: int
    """Whose logits may be there at once, but for those of one draft of every request."""


class BlockDrafter(ABC):
    """Drafts blocks as a whole: what their rows and the chain give, the likeliest tokens."""

    @abstractmethod
    def draft(
        self, slots: torch.Tensor, steps: int, scratch: Scratch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ``slots`` int64 [B] so many drafts each: tokens int64 and chances float32 [B, steps],
        which the next call may overwrite."""
