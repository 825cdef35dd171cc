"""The EAGLE-3 network on a backend (Li et al., 2025).

One entry of its KV cache is made of a token and the feature of the position *before* it, and is
kept under the token's own key index: entry p belongs to token p and depends on nothing after it,
so that it can be shared as the target's own keys are. Position 0 has no feature before it; its
key stays empty (``FlatBatch.first_key``). RoPE positions are the feature's: p - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.drafter_parts import EntryWeights
from surefoot.kernels.quant import dense
from surefoot.models.decoder import Decoder, pack_layer
from surefoot.speculation.drafting.checkpoints import interface
from surefoot.speculation.drafting.fit import misfits, refuse_misfits
from surefoot.speculation.drafting.folders import errors_about
from surefoot.speculation.drafting.network import Network
from surefoot.speculation.proposers.eagle3.checkpoint import (
    LAYER,
    OPTION,
    Eagle3Checkpoint,
)


class Eagle3Drafter(Network):
    first_key = 1
    behind = 1

    def __init__(self, checkpoint: Eagle3Checkpoint, target: Decoder) -> None:
        self.config = config = checkpoint.config
        touching, tensors = interface(checkpoint, target.config), checkpoint.tensors
        with errors_about(OPTION):
            refuse_misfits(misfits(touching, target.config), checkpoint.folder, config.verifier)
        super().__init__(config.layer, tensors, checkpoint.target_ids, target)
        backend = self.backend
        self.captured_layers = touching.captured_layers
        # The keys' and values' part of the layer is kept a second time, by itself.
        again = (tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in ("k", "v"))
        self.weight_bytes += sum(map(self.bytes_of, again))
        self.fc = backend.pack_linear([tensors["fc.weight"]])
        self.layer = pack_layer(
            backend, tensors, LAYER, config.layer, self.shape, normed_inputs=False, keys_again=True
        )

        def norm(name: str) -> torch.Tensor:
            return backend.pack_norm(dense(tensors[f"{name}.weight"]))

        self.entry = EntryWeights(
            self.table,
            norm(f"{LAYER}input_layernorm"),
            norm(f"{LAYER}hidden_norm"),
            self.eps,
        )
        self.norm = norm("norm")
        self.feature_norm = norm("input_norm") if config.norm_before_fc else None
        parts = range(config.captured if config.fc_norm else 0)
        self.part_norms = [norm(f"fc_norm.{index}") for index in parts]

    @property
    def eps(self) -> float:
        return self.config.layer.norm_eps

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Captured layers [N, captured * target hidden] -> features [N, hidden]."""
        if self.feature_norm is not None:
            features = self.backend.rms_norm(features, self.feature_norm, self.eps)
        elif self.part_norms:
            parts = features.chunk(len(self.part_norms), dim=1)
            normed = [
                self.backend.rms_norm(part, weight, self.eps)
                for part, weight in zip(parts, self.part_norms, strict=True)
            ]
            features = torch.cat(normed, dim=1)
        return self.backend.linear(self.fc, features)

    def write_keys(self, features: torch.Tensor, batch: FlatBatch, kv: Sequence[Any]) -> None:
        """Write the entries of the batch's rows: ``features`` [N, hidden] of the positions before
        theirs. Attention, MLP and head are left out: nothing but keys and values outlives the
        pass, and those depend on the inputs alone."""
        inputs, _ = self._inputs(features, batch.tokens)
        self.drafting.write_keys(self.layer, inputs, batch, kv[0], self.rope)

    def step(
        self, features: torch.Tensor | None, batch: FlatBatch, kv: Sequence[Any]
    ) -> torch.Tensor:
        """As the base class; ``features`` are those of the positions before, of the target or of an
        earlier step."""
        inputs, residual = self._inputs(features, batch.tokens)
        return self.backend.layer(self.layer, residual, batch, kv[0], self.rope, inputs)

    def draft(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: FlatBatch,
        kv: Sequence[Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, residual = self._inputs(features, tokens)
        if self.config.norm_before_head:
            hidden, logits = self.drafting.layer_and_head(
                self.layer, residual, batch, kv[0], self.rope, inputs, self.norm, self.head
            )
            return hidden, self._scaled(logits)
        hidden = self.backend.layer(self.layer, residual, batch, kv[0], self.rope, inputs)
        return hidden, self.logits(hidden)

    def _inputs(
        self, features: torch.Tensor | None, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads [N, 2 * hidden], and the residual stream [N, hidden]."""
        assert features is not None
        inputs = self.drafting.entry_inputs(self.entry, tokens, features)
        if self.config.norm_before_residual:
            return inputs, inputs[:, features.shape[1] :].contiguous()
        return inputs, features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_head:
            logits = self.backend.head(self.norm, self.eps, self.head, hidden)
        else:
            logits = self.backend.linear(self.head, hidden).float()
        return self._scaled(logits)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        scale = self.config.logit_scale
        return logits if scale == 1 else logits * scale

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.norm_fed_back:
            return self.backend.rms_norm(hidden, self.norm, self.eps)
        return hidden
