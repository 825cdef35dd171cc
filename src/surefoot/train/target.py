"""The target while a drafter is trained: texts that it is given whole, and nothing sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from surefoot.config import EngineConfig
from surefoot.engine.build import choose_backend
from surefoot.kernels.backend import FlatBatch, SpanTable, Weight
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder, expected_shapes
from surefoot.models.loading import load_checkpoint
from surefoot.train.corpus import Batch, put
from surefoot.train.meter import Work

_BLOCK = 16
_ROWS = 8192


@dataclass(frozen=True)
class Forward:
    """What the target computes for each token of a batch, as ``Decoder.forward`` gives it."""

    features: torch.Tensor
    """[N, captured * hidden]: the residual stream entering each captured layer; not normed."""
    before_norm: torch.Tensor
    """[N, hidden]: the last layer's output *before* the final norm, which ``Target.logits``
    applies. It is never to be multiplied by the head as it is."""


class Target:
    def __init__(self, name: str, decoder: Decoder, weights: Mapping[str, Weight]) -> None:
        """``weights``: the decoder's, by their Hugging Face names."""
        self.name, self.decoder = name, decoder
        self._weights = weights
        self._kv: list[object] = []
        self._blocks = 0
        self.work = Work()
        shapes = expected_shapes(decoder.config).items()
        matrices = [shape for name, shape in shapes if ".layers." in name and len(shape) == 2]
        self._numbers = sum(map(math.prod, matrices))
        """Of the matrices of all layers."""

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.decoder.backend.device

    @property
    def dtype(self) -> torch.dtype:
        """In which dense weights are kept."""
        return self.decoder.backend.dtype

    @torch.no_grad()
    def forward(self, batch: Batch, captured: Sequence[int]) -> Forward:
        """Run all documents from their first token. ``captured`` as in ``Decoder.forward``."""
        self.work.product(len(batch), self._numbers)
        results = [
            self.decoder.forward(flat, self._kv, captured) for flat in self._flat_batches(batch)
        ]
        if len(results) == 1:
            return Forward(results[0].features, results[0].hidden)
        return Forward(
            torch.cat([result.features for result in results]),
            torch.cat([result.hidden for result in results]),
        )

    @torch.no_grad()
    def logits(self, before_norm: torch.Tensor) -> torch.Tensor:
        """Rows of ``Forward.before_norm`` [M, hidden] -> float32 logits [M, vocab], those that
        the engine samples from."""
        self.work.product(len(before_norm), self.config.vocab_size * self.config.hidden_size)
        return self.decoder.logits(before_norm)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> rows of the embedding [N, hidden], as the drafter will read them."""
        return self.decoder.backend.embed(self.decoder.table, ids)

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the head, int64 [M] on the CPU -> float32 [M, hidden] on the device."""
        tied = self.config.tied_embeddings
        weight = self._weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        return dense.cpu()[ids].float().to(self.device)

    def _flat_batches(self, batch: Batch) -> Iterator[FlatBatch]:
        """The documents in forwards of at most ``_ROWS`` rows, which is as many as rounds have; a
        longer document alone."""
        starts, first = batch.starts, 0
        while first < len(starts) - 1:
            last = int(np.searchsorted(starts, starts[first] + _ROWS, side="right")) - 1
            last = max(last, first + 1)
            yield self._flat(batch, first, last)
            first = last

    def _flat(self, batch: Batch, first: int, last: int) -> FlatBatch:
        """Documents ``first`` to ``last`` - 1."""
        starts, device = batch.starts[first : last + 1], self.device
        sizes = np.diff(starts)
        pages = -(-sizes // _BLOCK)
        begin = 1 + np.cumsum(pages) - pages
        # Entries beyond a document's last block are not read.
        inside = np.minimum(np.arange(pages.max()), pages[:, None] - 1)
        tables = put((begin[:, None] + inside).astype(np.int32), device)
        count = 1 + int(pages.sum())
        if count > self._blocks:
            self._kv = []  # The old pool goes before the new one is made.
            self._kv = self.decoder.backend.allocate_kv(
                self.config.layers, count, _BLOCK, self.decoder.shape
            )
            self._blocks = count
        rows, slots = slice(starts[0], starts[-1]), torch.arange(last - first, device=device)
        offsets = batch.offsets[first : last + 1].long()
        longest = int(sizes.max())
        return FlatBatch(
            tokens=batch.ids[rows],
            positions=batch.positions[rows],
            key_index=batch.positions[rows],
            row_slot=batch.documents[rows] - first,
            block_tables=tables,
            span_start=torch.zeros_like(slots),
            max_keys=longest,
            spans=SpanTable(offsets[:-1] - offsets[0], offsets.diff(), slots, longest),
        )


def load_target(
    config: EngineConfig, max_length: int, progress: Callable[[str, int, int], None] | None = None
) -> Target:
    """The model of an engine of this configuration, without the engine, for texts of up to
    ``max_length`` tokens."""
    threads = torch.get_num_threads()
    backend = choose_backend(config)
    # Training is torch's work, whatever is best for the target alone.
    torch.set_num_threads(config.threads or threads)
    checkpoint = load_checkpoint(
        config.model,
        dtype=backend.dtype,
        native=config.weights_on(backend.name) == "native",
        generation_config="none",
        progress=progress,
    )
    positions = min(max_length, checkpoint.config.max_positions)
    decoder = Decoder(checkpoint.config, checkpoint.weights, backend, positions)
    return Target(config.model, decoder, checkpoint.weights)
