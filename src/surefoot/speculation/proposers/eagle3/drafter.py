"""The EAGLE-3 network on a backend (Li et al., 2025).

One entry of its KV cache is made of a token and the feature of the position *before* it, and is
kept under the token's own key index: entry p belongs to token p and depends on nothing after it,
so that it can be shared as the target's own keys are. Position 0 has no feature before it; its
key stays empty (``FlatBatch.first_key``). RoPE positions are the feature's: p - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import AttentionShape, FlatBatch, LayerWeights
from surefoot.kernels.drafting import EntryWeights
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.rope import rope_table
from surefoot.speculation.proposers.eagle3.checkpoint import (
    LAYER,
    OPTION,
    Eagle3Checkpoint,
)
from surefoot.speculation.proposers.eagle3.config import Eagle3Config

_EMBEDDING_CHUNK = 4096


class Eagle3Drafter:
    """A drafter bound to its target, of which it may use the embedding and the head. Holds no
    state of requests."""

    def __init__(self, checkpoint: Eagle3Checkpoint, target: Decoder) -> None:
        check_fit(checkpoint, target.config)
        self.config = checkpoint.config
        self.backend = backend = target.backend
        layer, tensors = self.config.layer, checkpoint.tensors
        self.captured_layers = self.config.layers_of(target.config.layers)
        self.max_positions = layer.max_positions
        # The keys' and values' part of the layer is kept a second time, by itself.
        again = sum(tensors[f"{LAYER}self_attn.{name}_proj.weight"].numel() for name in ("k", "v"))
        floats = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
        self.weight_bytes = (floats + again) * backend.dtype.itemsize
        # Drafts reach beyond the last position that the target runs.
        positions = min(layer.max_positions, target.rope.cos.shape[0] + 64)
        self.rope = rope_table(layer, positions, backend.device)
        self.shape = AttentionShape(
            layer.heads, layer.kv_heads, layer.head_dim, layer.head_dim**-0.5
        )
        self.fc = backend.pack_linear([tensors["fc.weight"]])
        self.layer = _pack_layer(tensors, self.config, target, self.shape)

        def norm(name: str) -> torch.Tensor:
            return backend.pack_norm(tensors[name])

        self.entry = EntryWeights(
            _embedding(tensors, target),
            norm(f"{LAYER}input_layernorm.weight"),
            norm(f"{LAYER}hidden_norm.weight"),
            layer.norm_eps,
        )
        self.norm = norm("norm.weight")
        self.feature_norm = norm("input_norm.weight") if self.config.norm_before_fc else None
        parts = range(self.config.captured if self.config.fc_norm else 0)
        self.part_norms = [norm(f"fc_norm.{index}.weight") for index in parts]
        self.head = target.head_linear
        if "lm_head.weight" in tensors:
            self.head = backend.pack_linear([tensors["lm_head.weight"]])
        ids = checkpoint.target_ids
        identity = len(ids) == layer.vocab_size and torch.equal(ids, torch.arange(len(ids)))
        self.target_ids = None if identity else ids.to(backend.device)
        """int64 [draft vocabulary]: the target's ids; None where both vocabularies are one."""

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

    def write_keys(self, features: torch.Tensor, batch: FlatBatch, kv: object) -> None:
        """Write the entries of the batch's rows: ``features`` [N, hidden] of the positions before
        theirs. Attention, MLP and head are left out: nothing but keys and values outlives the
        pass, and those depend on the inputs alone."""
        inputs, _ = self._inputs(features, batch.tokens)
        self.backend.write_keys(self.layer, inputs, batch, kv, self.rope)

    def step(self, features: torch.Tensor, batch: FlatBatch, kv: object) -> torch.Tensor:
        """Run rows, whose entries it writes: ``features`` [N, hidden], those of the target or of
        an earlier step -> hidden states [N, hidden]. May overwrite ``features``."""
        inputs, residual = self._inputs(features, batch.tokens)
        return self.backend.layer(self.layer, residual, batch, kv, self.rope, inputs)

    def draft(
        self, tokens: torch.Tensor, features: torch.Tensor, batch: FlatBatch, kv: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``step`` of ``tokens`` int64 [N] (not the batch's) and ``logits`` of what comes out."""
        inputs, residual = self._inputs(features, tokens)
        if self.config.norm_before_head:
            backend = self.backend
            hidden, logits = backend.layer_and_head(
                self.layer, residual, batch, kv, self.rope, inputs, self.norm, self.head
            )
            return hidden, self._scaled(logits)
        hidden = self.backend.layer(self.layer, residual, batch, kv, self.rope, inputs)
        return hidden, self.logits(hidden)

    @property
    def last_position(self) -> int:
        """Largest RoPE position. Beyond the drafter's context nothing is offered, and any position
        does."""
        return self.rope.cos.shape[0] - 1

    def _inputs(
        self, features: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads [N, 2 * hidden], and the residual stream [N, hidden]."""
        inputs = self.backend.entry_inputs(self.entry, tokens, features)
        if self.config.norm_before_residual:
            return inputs, inputs[:, features.shape[1] :].contiguous()
        return inputs, features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [M, hidden] -> float32 logits [M, draft vocabulary]."""
        if self.config.norm_before_head:
            logits = self.backend.head(self.norm, self.eps, self.head, hidden)
        else:
            logits = self.backend.linear(self.head, hidden).float()
        return self._scaled(logits)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        scale = self.config.logit_scale
        return logits if scale == 1 else logits * scale

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """The features that a step's hidden states are for the step after it."""
        if self.config.norm_fed_back:
            return self.backend.rms_norm(hidden, self.norm, self.eps)
        return hidden


def misfits(checkpoint: Eagle3Checkpoint, target: ModelConfig) -> list[str]:
    """Why the drafter cannot serve this target; [] if it can."""
    config, tensors = checkpoint.config, checkpoint.tensors
    layer, problems = config.layer, []
    if config.target_hidden_size != target.hidden_size:
        problems.append(
            f"its features are {config.target_hidden_size} wide, not {target.hidden_size}"
        )
    if layer.vocab_size != target.vocab_size:
        problems.append(f"its vocabulary has {layer.vocab_size} tokens, not {target.vocab_size}")
    captured = config.layers_of(target.layers)
    if not 0 <= min(captured) <= max(captured) <= target.layers or len(set(captured)) < len(
        captured
    ):
        problems.append(f"it captures layers {list(captured)} of a target with {target.layers}")
    if "embed_tokens.weight" not in tensors and layer.hidden_size != target.hidden_size:
        problems.append("it has no embedding, and the target's is of another width")
    head = (config.draft_vocab_size, layer.hidden_size)
    if "lm_head.weight" not in tensors and head != (target.vocab_size, target.hidden_size):
        problems.append("it has no lm_head, and the target's is of another size")
    return problems


def check_fit(checkpoint: Eagle3Checkpoint, target: ModelConfig) -> None:
    """Refuse a drafter that was not made for this target."""
    problems = misfits(checkpoint, target)
    if problems:
        raise SurefootError(
            OPTION,
            f"{checkpoint.folder} does not fit the target: " + "; ".join(problems),
            f"it was made for {checkpoint.config.verifier or 'another model'}",
        )


def _embedding(tensors: Mapping[str, torch.Tensor], target: Decoder) -> object:
    """The drafter's own embedding, or the target's where it has none or just the same."""
    own = tensors.get("embed_tokens.weight")
    backend, config = target.backend, target.config
    if own is None:
        return target.table
    if own.shape == (config.vocab_size, config.hidden_size):
        for ids in torch.arange(len(own)).split(_EMBEDDING_CHUNK):
            rows = backend.embed(target.table, ids.to(backend.device))
            if not torch.equal(rows, own[ids].to(backend.device, backend.dtype).to(rows.dtype)):
                break
        else:
            return target.table
    return backend.pack_embedding(own)[0]


def _pack_layer(
    tensors: Mapping[str, torch.Tensor],
    config: Eagle3Config,
    target: Decoder,
    shape: AttentionShape,
) -> LayerWeights:
    backend = target.backend

    def linear(*names: str) -> object:
        biases = [tensors.get(f"{LAYER}{name}.bias") for name in names]
        dense = [bias for bias in biases if bias is not None]
        parts = [tensors[f"{LAYER}{name}.weight"] for name in names]
        return backend.pack_linear(parts, torch.cat(dense) if dense else None)

    def norm(name: str) -> torch.Tensor:
        return backend.pack_norm(tensors[f"{LAYER}{name}.weight"])

    qk_norm = config.layer.qk_norm
    packed = LayerWeights(
        input_norm=None,
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=linear("self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        q_norm=norm("self_attn.q_norm") if qk_norm else None,
        k_norm=norm("self_attn.k_norm") if qk_norm else None,
        eps=config.layer.norm_eps,
        shape=shape,
    )
    return replace(packed, kv=linear("self_attn.k_proj", "self_attn.v_proj"))
