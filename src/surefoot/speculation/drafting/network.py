"""A drafter's network on a backend, bound to a target whose embedding and head it may share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from surefoot.kernels.backend import AttentionShape, FlatBatch, Weight
from surefoot.kernels.quant import dense
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.rope import rope_table

_EMBEDDING_CHUNK = 4096
_PROBES = 8
_ROOM = 64
"""Drafts reach that far beyond the last position."""


class Network(ABC):
    """Holds weights, and no state of requests.

    Its *features* [N, hidden] are what a draft is made from beside the token: hidden states of the
    target or of the step before. A network that reads tokens alone takes None and ignores what
    ``step`` is given.
    """

    first_key: ClassVar[int] = 0
    """1 where key 0 of every request stays empty (``FlatBatch.first_key``)."""
    behind: ClassVar[int] = 0
    """How far RoPE positions are behind key indices."""
    captured_layers: tuple[int, ...] = ()
    """As ``Needs.captured_layers``."""
    weight_bytes: int

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Weight],
        target_ids: torch.Tensor,
        target: Decoder,
    ) -> None:
        """``config``: of the layers, its vocabulary the target's. ``tensors`` may hold
        ``embed_tokens.weight`` and ``lm_head.weight``; what is missing is the target's, the head's
        rows those of the draft vocabulary.
        ``target_ids`` int64 [draft vocabulary]: the target's id of each draft id."""
        self.backend = backend = target.backend
        self.drafting = backend.drafting
        self.layers = config.layers
        self.max_positions = config.max_positions
        self.shape = AttentionShape(
            config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5
        )
        positions = min(config.max_positions, target.rope.cos.shape[0]) + _ROOM
        self.rope = rope_table(config, positions, backend.device)
        identity = torch.equal(target_ids, torch.arange(config.vocab_size))
        own = None if identity else target_ids
        self.table, self.head = _embedding(tensors, target), _head(tensors, own, target)
        kept = {name: self.bytes_of(item) for name, item in tensors.items()}
        if self.table is target.table:
            kept.pop("embed_tokens.weight", None)
        if self.head is target.head_linear:
            kept.pop("lm_head.weight", None)
        elif "lm_head.weight" not in kept:
            kept["lm_head.weight"] = len(target_ids) * config.hidden_size * backend.dtype.itemsize
        self.weight_bytes = sum(kept.values())
        self.target_ids = None if own is None else own.to(backend.device)
        """int64 [draft vocabulary]: the target's ids; None where both vocabularies are one."""

    def bytes_of(self, weight: Weight) -> int:
        """What keeping it takes at most."""
        if isinstance(weight, torch.Tensor) and not weight.is_floating_point():
            return 0
        return math.prod(weight.shape) * self.backend.dtype.itemsize

    @property
    def last_position(self) -> int:
        """Largest RoPE position. Nothing is offered beyond the drafter's context, and there any
        position does."""
        return self.rope.cos.shape[0] - 1

    @abstractmethod
    def step(
        self, features: torch.Tensor | None, batch: FlatBatch, kv: Sequence[Any]
    ) -> torch.Tensor:
        """Run rows, whose keys it writes into ``kv``, a pool for each layer -> hidden states [N,
        hidden]. May overwrite ``features``."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [M, hidden] -> float32 logits [M, draft vocabulary]."""

    def draft(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: FlatBatch,
        kv: Sequence[Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``step`` of ``tokens`` int64 [N] (not the batch's) and ``logits`` of what comes out."""
        hidden = self.step(features, replace(batch, tokens=tokens), kv)
        return hidden, self.logits(hidden)

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """The features that a step's hidden states are for the step after it."""
        return hidden


def _embedding(tensors: Mapping[str, Weight], target: Decoder) -> Any:
    """The drafter's own embedding, or the target's where it has none or just the same."""
    own = tensors.get("embed_tokens.weight")
    backend, config = target.backend, target.config
    if own is None:
        return target.table
    if own.shape == (config.vocab_size, config.hidden_size):
        known = dense(own)
        for ids in torch.arange(len(known)).split(_EMBEDDING_CHUNK):
            rows = backend.embed(target.table, ids.to(backend.device))
            if not torch.equal(rows, known[ids].to(backend.device, backend.dtype).to(rows.dtype)):
                break
        else:
            return target.table
    return backend.pack_embedding(own)[0]


def _head(tensors: Mapping[str, Weight], ids: torch.Tensor | None, target: Decoder) -> Any:
    """The drafter's own head, or the target's (its rows ``ids``) where it has none or just the
    same: a copy gives the same bits, whatever it is multiplied with."""
    own, backend = tensors.get("lm_head.weight"), target.backend
    if own is None:
        return target.head_linear if ids is None else backend.take_rows(target.table, ids)
    packed = backend.pack_linear([own])
    if own.shape != (target.config.vocab_size, target.config.hidden_size):
        return packed
    probe = torch.randn((_PROBES, own.shape[1]), generator=torch.Generator().manual_seed(7))
    one = torch.zeros(1, dtype=torch.int64, device=backend.device)
    probe = probe.to(backend.device, backend.embed(target.table, one).dtype)
    found, expected = (backend.linear(each, probe) for each in (packed, target.head_linear))
    return target.head_linear if torch.equal(found, expected) else packed
