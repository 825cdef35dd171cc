"""The DFlash backbone on a backend (Chen et al., 2026).

Context: every position of the text has an entry in each layer's keys and values, made of the
target's feature at that position and of nothing else; so it is kept under the position's own key
index, and can be shared as the target's own keys are. Block: the current token and masks behind it
run together over the context and over each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.block_drafting import RowsSeen
from surefoot.kernels.drafter_parts import ContextWeights, FeatureWeights
from surefoot.kernels.quant import dense
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder, pack_layer
from surefoot.speculation.drafting.checkpoints import interface
from surefoot.speculation.drafting.fit import refuse_misfits
from surefoot.speculation.drafting.folders import errors_about
from surefoot.speculation.drafting.network import Network
from surefoot.speculation.proposers.dflash.checkpoint import (
    MASK,
    OPTION,
    DFlashCheckpoint,
    misfits,
)
from surefoot.speculation.proposers.dflash.config import Visibility


@dataclass(frozen=True)
class Convolution:
    """The convolutions before and after a sublayer."""

    base: torch.Tensor
    """[2, taps, hidden]."""
    dynamic: Any
    """Packed linear: from the sublayer's normed inputs, coefficients [2, taps, groups]."""


class DFlashNetwork(Network):
    def __init__(self, checkpoint: DFlashCheckpoint, target: Decoder) -> None:
        self.config = config = checkpoint.config
        touching, tensors = interface(checkpoint, target.config), checkpoint.tensors
        with errors_about(OPTION):
            problems = misfits(touching, target.config)
            refuse_misfits(problems, checkpoint.folder, config.verifier)
        super().__init__(config.layer, tensors, checkpoint.target_ids, target)
        backend = self.backend
        self.captured_layers = touching.captured_layers
        self.eps, self.block = config.layer.norm_eps, config.block_size
        self.norm = backend.pack_norm(dense(tensors["norm.weight"]))
        one = torch.zeros(1, dtype=torch.int64, device=backend.device)
        self.activations = backend.embed(self.table, one).dtype
        self.stack = [
            pack_layer(backend, tensors, f"layers.{index}.", config.layer, self.shape)
            for index in range(self.layers)
        ]
        context, again = self._pack_context(tensors)
        self.features = FeatureWeights(
            backend.pack_linear([tensors["fc.weight"]]),
            backend.pack_norm(dense(tensors["hidden_norm.weight"])),
            context,
        )
        # The keys' and values' parts of the layers are kept a second time, side by side.
        self.weight_bytes += again
        self.convolutions = [
            self._pack_convolutions(tensors, f"layers.{index}.")
            for index in range(self.layers if config.convolutions else 0)
        ]
        self.mask_embedding = None
        if MASK in tensors:
            self.mask_embedding = dense(tensors[MASK]).to(backend.device, self.activations)
        self._masks = {
            each: [_mask_bits(each, rows).to(backend.device) for rows in range(self.block + 1)]
            for each in set(config.layers)
        }
        """By kind of layer and rows of a block."""
        self._repeated: dict[tuple[Visibility, int, int], torch.Tensor] = {}
        kinds = itertools.groupby(enumerate(config.layers), key=lambda item: item[1])
        self._runs = [(kind, [index for index, _ in members]) for kind, members in kinds]

    def _pack_context(self, tensors: Any) -> tuple[ContextWeights, int]:
        """And the bytes that they take."""
        names = [
            f"layers.{index}.self_attn.{part}_proj"
            for index in range(self.layers)
            for part in ("k", "v")
        ]
        weights = [tensors[f"{name}.weight"] for name in names]
        bias = None
        if self.config.layer.attention_bias:
            bias = torch.cat([dense(tensors[f"{name}.bias"]) for name in names])
        stacked = ContextWeights(
            kv=self.backend.pack_linear(weights, bias),
            k_norms=[layer.k_norm for layer in self.stack],
            eps=self.eps,
            shape=self.shape,
        )
        return stacked, sum(map(self.bytes_of, weights))

    def _pack_convolutions(self, tensors: Any, prefix: str) -> tuple[Convolution, Convolution]:
        backend = self.backend

        def packed(name: str) -> Convolution:
            base = dense(tensors[f"{prefix}{name}.base_kernel"]).to(
                backend.device, self.activations
            )
            dynamic = tensors[f"{prefix}{name}.kernel_projection.weight"]
            return Convolution(base, backend.pack_linear([dynamic]))

        return packed("attention_conv"), packed("mlp_conv")

    # --- context ------------------------------------------------------------------------------

    def write_context(
        self,
        features: torch.Tensor,
        batch: FlatBatch,
        kv: Sequence[Any],
        served: torch.Tensor | None = None,
        settled: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Write the entries of the batch's rows into every layer's pool, from captured layers [N,
        captured * target hidden]; of ``served`` slots as in ``Commits``, and at least of the rows
        that are ``settled``, as in ``Drafting.write_features``."""
        self.drafting.write_features(
            self.features, features, batch, served, self.last_position, kv, self.rope, settled
        )

    # --- block --------------------------------------------------------------------------------

    def step(
        self, features: torch.Tensor | None, batch: FlatBatch, kv: Sequence[Any]
    ) -> torch.Tensor:
        """Run blocks, whose rows are neighbours, without final norm. Needs no ``features``."""
        blocks = batch.span_start.shape[0]
        rows = batch.tokens.shape[0] // blocks
        x = self.backend.embed(self.table, batch.tokens)
        if self.mask_embedding is not None:
            x.view(blocks, rows, -1)[:, 1:] = self.mask_embedding
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        batches = {each: self._visible(batch, each, blocks, rows) for each in self._masks}
        for kind, indices in self._runs:
            if self.convolutions:
                for index in indices:
                    x = self._convolved(index, x, batches[kind], kv[index], rows)
                continue
            layers, pools = [self.stack[i] for i in indices], [kv[i] for i in indices]
            x, _ = self.backend.layers(layers, x, batches[kind], pools, self.rope, ())
        return x

    def _visible(self, batch: FlatBatch, kind: Visibility, blocks: int, rows: int) -> FlatBatch:
        oldest = None
        if kind.window:
            if kind.from_anchor:
                oldest = batch.span_start.repeat_interleave(rows, output_size=blocks * rows)
                oldest = oldest - kind.window
            else:
                oldest = batch.key_index - (kind.window - 1)
            oldest = oldest.clamp(min=self.first_key)
        mask = self._repeated_mask(kind, rows, blocks)
        return replace(
            batch, mask=mask, oldest=oldest, all_masked=True,
            both_ways=not kind.causal and oldest is None,
        )  # fmt: skip

    def _repeated_mask(self, kind: Visibility, rows: int, blocks: int) -> torch.Tensor:
        """For so many blocks; kept, for rounds come in few sizes."""
        found = self._repeated.get((kind, rows, blocks))
        if found is None:
            found = self._repeated[kind, rows, blocks] = self._masks[kind][rows].repeat(blocks)
        return found

    def _convolved(
        self, index: int, x: torch.Tensor, batch: FlatBatch, pool: Any, rows: int
    ) -> torch.Tensor:
        """A layer with convolutions before and after each of its sublayers."""
        backend, layer, drafting = self.backend, self.stack[index], self.drafting
        attention, mlp = self.convolutions[index]
        assert layer.input_norm is not None
        inputs = backend.rms_norm(x, layer.input_norm, self.eps)
        before, after = self._coefficients(attention, inputs)
        mixed = drafting.convolve(inputs, attention.base[0], before, rows)
        mixed = drafting.attention(layer, mixed, batch, pool, self.rope)
        x = x + drafting.convolve(mixed, attention.base[1], after, rows)
        inputs = backend.rms_norm(x, layer.post_norm, self.eps)
        before, after = self._coefficients(mlp, inputs)
        mixed = drafting.convolve(inputs, mlp.base[0], before, rows)
        mixed = drafting.mlp(layer, mixed)
        return x + drafting.convolve(mixed, mlp.base[1], after, rows)

    def _coefficients(
        self, convolution: Convolution, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both sides, [N, taps, groups] each: they belong to the rows that are made."""
        taps = convolution.base.shape[1]
        found = self.backend.linear(convolution.dynamic, inputs).view(len(inputs), 2, taps, -1)
        return found[:, 0], found[:, 1]

    @property
    def seen(self) -> list[RowsSeen]:
        """What the rows of a block see, by layer."""
        return [
            RowsSeen(self._masks[kind][1:], kind.window, kind.from_anchor)
            for kind in self.config.layers
        ]

    # --- head ---------------------------------------------------------------------------------

    @property
    def bare_logits(self) -> bool:
        """Whether logits are what the head gives, as it is."""
        return self.config.logit_scale == 1 and not self.config.logit_cap

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self.backend.head(self.norm, self.eps, self.head, hidden)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_cap:
            logits = config.logit_cap * (logits / config.logit_cap).tanh()
        return logits

    def likeliest(self, hidden: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of each of the rows [B, n, hidden], by the target's ids, int64 [B,
        n], and its chance, float32 [B, n]; for bare logits, ``most`` rows of them at a time."""
        tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        chances = torch.empty(hidden.shape[:2], device=hidden.device)
        self.drafting.likeliest_by_head(
            self.norm, self.eps, self.head, hidden, self.target_ids,
            tokens.view(-1), chances.view(-1), most,
        )  # fmt: skip
        return tokens, chances

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states as heads read them, after the final norm."""
        return self.backend.rms_norm(hidden, self.norm, self.eps)


def _mask_bits(kind: Visibility, rows: int) -> torch.Tensor:
    """Which rows of a block each row sees: int64 [rows], as ``FlatBatch.mask``."""
    index = torch.arange(rows)
    seen = torch.ones(rows, rows, dtype=torch.bool)
    if kind.causal:
        seen = seen.tril()
    elif kind.window and not kind.from_anchor:
        seen &= index - index.unsqueeze(1) < kind.window
    return (seen.long() << index).sum(dim=1)


def layer_bytes(layer: ModelConfig, rows: int, itemsize: int) -> int:
    """Activations of ``rows`` rows that one layer holds at once, at most."""
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    attention = 2 * q + 2 * kv
    mlp = 3 * layer.intermediate_size
    return rows * itemsize * (3 * layer.hidden_size + max(attention, mlp))
