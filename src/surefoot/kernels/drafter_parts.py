"""What drafters hand to a backend's ``Drafting``: their packed weights, and where rows stand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from surefoot.kernels.backend import AttentionShape


@dataclass(frozen=True)
class EntryWeights:
    """What turns tokens and features into the inputs of attention: the embedding, as ``embed``
    wants it, and two norms [hidden], as ``pack_norm`` gave them."""

    table: Any
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    eps: float


@dataclass(frozen=True)
class ContextWeights:
    """The keys' and values' part of several layers that all read the same inputs."""

    kv: Any
    """Packed linear: keys, then values, layer by layer."""
    k_norms: Sequence[torch.Tensor | None]
    """By layer, as ``pack_norm`` gave them."""
    eps: float
    shape: AttentionShape

    @functools.cached_property
    def stacked_norms(self) -> torch.Tensor | None:
        """``k_norms`` [layers, head_dim]; None where there are none."""
        norms = [norm for norm in self.k_norms if norm is not None]
        return torch.stack(norms) if norms else None


@dataclass(frozen=True)
class FeatureWeights:
    """What turns captured layers into the keys and values of a drafter of blocks: a packed linear,
    a norm [hidden] as ``pack_norm`` gave it, and what reads the outcome."""

    fuse: Any
    norm: torch.Tensor
    context: ContextWeights


@dataclass(frozen=True)
class Scratch:
    """Where drafts' keys go that must not lie in a request's own blocks: ``blocks`` blocks for each
    slot, from block ``first`` on. ``pages``: width of the block tables that reach them."""

    first: int
    blocks: int
    block_size: int
    pages: int


@dataclass(frozen=True)
class LiveRows:
    """The current tokens of B requests, from which drafts start."""

    tokens: torch.Tensor
    """int64 [B]."""
    features: torch.Tensor | None
    """[B, hidden]: those of the positions before, for drafters that read features."""
    keys: torch.Tensor
    """int64 [steps + 1, B]: key index of the live row and of every draft after it."""
    positions: torch.Tensor
    """int64 [steps + 1, B]: their RoPE positions."""
    tables: torch.Tensor
    """int32 [B, pages]: the request's own blocks as far as they hold settled positions, then the
    slot's scratch blocks."""


class BlockRows(NamedTuple):
    """Where the rows of a block of each of B requests stand, int64 [B * rows] each, request by
    request; and the spans that they are, int64 [B] each."""

    tokens: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    owners: torch.Tensor
    first_rows: torch.Tensor
    counts: torch.Tensor
