"""The rows of one forward, and the spans that they form."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SpanTable:
    """Where each span's rows lie: for kernels that work span by span.

    The rows of a span are neighbours, in the order of their keys.
    """

    first_row: torch.Tensor
    """int64 [B]."""
    rows: torch.Tensor
    """int64 [B]; 0 for an unused entry."""
    slot: torch.Tensor
    """int64 [B]: unspecified where ``rows`` is 0."""
    max_rows: int
    """Host-side upper bound of ``rows``."""


@dataclass(frozen=True)
class FlatBatch:
    """The rows of one forward: prefill chunks, spans and single tokens alike, N in all.

    Row r belongs to request ``row_slot[r]`` and sees the keys of that request whose index is
    below ``span_start[row_slot[r]]``, and of the span's own rows those that ``mask`` allows:
    bit j of ``mask[r]`` stands for the key j places on, the span's row j (a tree; all of the
    span's own bits for no mask at all). Without ``mask``, and where it is -1, the row is causal:
    it sees keys 0 .. ``key_index[r]``.
    The rows of a span are a tree's, or all of them are causal: its first row says which. Unless
    ``all_masked``, a tree's row has the bits that it has where the keys it sees are a chain.
    All keys of the batch are written before any is read.
    """

    tokens: torch.Tensor
    """int64 [N]: token ids."""
    positions: torch.Tensor
    """int64 [N]: RoPE positions."""
    key_index: torch.Tensor
    """int64 [N]: the row's index among its request's keys (equals ``positions`` for chains)."""
    row_slot: torch.Tensor
    """int64 [N]: row of ``block_tables`` and ``span_start``; -1 for padding, which writes nothing
    and whose output is unspecified."""
    block_tables: torch.Tensor
    """int32 [slots, max_blocks]: block id of each ``block_size`` consecutive keys."""
    span_start: torch.Tensor
    """int64 [slots]: index of the first key that this forward writes."""
    max_keys: int
    """Host-side upper bound of ``key_index`` + 1, for backends that need a static extent."""
    mask: torch.Tensor | None = None
    """int64 [N] or None."""
    first_key: int = 0
    """0, or 1 where key 0 of every request holds nothing and nobody sees it."""
    oldest: torch.Tensor | None = None
    """int64 [N]: index of the first key that each row sees, a window's; None: ``first_key``. Only
    where every row has a mask of its own."""
    tree_rows: int = 64
    """Host-side upper bound of the rows of a span that has masks."""
    all_masked: bool = False
    """Known on the host: no row is causal for want of a mask. They are a drafter's, and rows of a
    tree need not be computed as chains are."""
    both_ways: bool = False
    """Known on the host: every row sees all of its span, and all before it. ``mask`` says so, too.
    """
    spans: SpanTable | None = None
    """The same rows by span, or None: backends that need it work it out from ``row_slot``."""

    @property
    def has_paths(self) -> bool:
        """Whether some rows may be a target's trees, whose results are those of chains."""
        return self.mask is not None and not self.all_masked


@dataclass(frozen=True)
class OutputRows:
    """The rows of a forward whose results are wanted; of the others, keys and values are."""

    index: torch.Tensor
    """int64 [M]: which rows of the forward's batch, in rising order; where the last is repeated, as
    padding, the result is unspecified."""
    batch: FlatBatch
    """They as a batch of their own, of the same keys. Each span's are its last."""


@dataclass(frozen=True)
class AcceptedPaths:
    """What was accepted of B requests' trees, and where their keys lie."""

    tables: torch.Tensor
    """int32 [slots, blocks]: as ``FlatBatch.block_tables``."""
    slots: torch.Tensor
    """int64 [B]: whose the trees are."""
    start: torch.Tensor
    """int64 [slots]: key index of each tree's root."""
    rows: torch.Tensor
    """int64 [B, K + 1]: a tree's row at each depth of its path, rising from 0, the root's."""
    lengths: torch.Tensor
    """int64 [B]: how deep it is."""
