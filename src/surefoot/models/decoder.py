"""The decoder that Llama, Qwen2 and Qwen3 share: embedding, blocks, norm and head.

Architectures differ by flags in ``ModelConfig`` (biases, q/k norms); their files map a
checkpoint's tensor names and settle the flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import (
    AttentionShape,
    Backend,
    FlatBatch,
    LayerWeights,
    OutputRows,
    Weight,
)
from surefoot.kernels.draws import Maxima
from surefoot.kernels.quant import dense
from surefoot.models.config import ModelConfig
from surefoot.models.rope import rope_table

POOLED_ROWS = 256
"""Rows that are there in float64 at once."""
MOST_NAMED = 10
"""Tensors in an error."""


class ForwardResult(NamedTuple):
    """``hidden`` [N, hidden] before the final norm, or [M, hidden] of the rows that were wanted;
    ``features`` [N, captured * hidden]: the residual stream entering each captured layer, side by
    side, in the order asked for."""

    hidden: torch.Tensor
    features: torch.Tensor
    tokens: torch.Tensor | None = None
    """int64 [N]: the likeliest behind each row, where they were wanted and cost nothing extra."""


class Decoder:
    """A target model on a backend.

    ``weights`` maps Hugging Face tensor names (``model.layers.0.self_attn.q_proj.weight``) to
    dense tensors or GGUF blocks. Missing and misshapen tensors are named in one error.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        backend: Backend,
        max_positions: int | None = None,
    ) -> None:
        check_tensors(config, weights)
        self.config = config
        self.backend = backend
        self.shape = AttentionShape(
            config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self.rope = rope_table(config, max_positions or config.max_positions, backend.device)
        embedding = weights["model.embed_tokens.weight"]
        self.table, self.head_linear = backend.pack_embedding(embedding)
        if not config.tied_embeddings:
            self.head_linear = backend.pack_linear([weights["lm_head.weight"]])
        self.norm = backend.pack_norm(dense(weights["model.norm.weight"]))
        self.layers = [
            pack_layer(backend, weights, f"model.layers.{index}.", config, self.shape)
            for index in range(config.layers)
        ]

    def forward(
        self,
        batch: FlatBatch,
        kv: Sequence[Any],
        capture: Sequence[int] = (),
        outputs: OutputRows | None = None,
        likeliest: bool = False,
    ) -> ForwardResult:
        """Run every block over the flat batch, writing its KV. ``capture``: layer indices l whose
        *entering* residual stream is kept (l = 0: the embeddings; l = layers: the last output),
        the convention of Hugging Face's ``hidden_states[l]`` for l < layers. ``outputs``: the rows
        whose last hidden states are wanted; None: all. ``likeliest``: so are the tokens behind all
        rows, if the backend finds them along the way."""
        head = (self.norm, self.config.norm_eps, self.head_linear) if likeliest else None
        return ForwardResult(
            *self.backend.target(
                self.table, self.layers, batch, kv, self.rope, capture, outputs, head
            )
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of selected rows [M, hidden] -> float32 logits [M, vocab]."""
        return self.backend.head(self.norm, self.config.norm_eps, self.head_linear, hidden)

    def logits_where_used(
        self, hidden: torch.Tensor, slots: torch.Tensor, use: torch.Tensor
    ) -> tuple[torch.Tensor, Maxima | None]:
        """``logits`` for a sampler, as ``Backend.head_where_used`` has them."""
        norm = self.norm, self.config.norm_eps, self.head_linear
        return self.backend.head_where_used(*norm, hidden, slots, use)

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of selected rows [M, hidden] -> the sum of the normed ones, float64
        [hidden]."""
        total = torch.zeros(hidden.shape[1], dtype=torch.float64, device=hidden.device)
        for rows in hidden.split(POOLED_ROWS):
            total += (
                self.backend.rms_norm(rows, self.norm, self.config.norm_eps).double().sum(dim=0)
            )
        return total

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely token of each of the rows [M, hidden], int64 [M]; the lowest id among
        equals."""
        return self.backend.greedy(self.norm, self.config.norm_eps, self.head_linear, hidden)


def pack_layer(
    backend: Backend,
    weights: Mapping[str, Weight],
    prefix: str,
    config: ModelConfig,
    shape: AttentionShape,
    normed_inputs: bool = True,
    keys_again: bool = False,
) -> LayerWeights:
    """Pack the block whose tensors' names begin with ``prefix``. ``normed_inputs``: its attention
    reads the normed residual stream. ``keys_again``: for ``Drafting.write_keys`` too, which takes
    the keys' and values' part of the projections a second time."""

    def linear(*names: str) -> Any:
        parts = [weights[f"{prefix}{name}.weight"] for name in names]
        biases = [weights.get(f"{prefix}{name}.bias") for name in names]
        known = [dense(bias) for bias in biases if bias is not None]
        return backend.pack_linear(parts, torch.cat(known) if known else None)

    def norm(name: str) -> torch.Tensor:
        return backend.pack_norm(dense(weights[f"{prefix}{name}.weight"]))

    keys = ("self_attn.k_proj", "self_attn.v_proj")
    return LayerWeights(
        input_norm=norm("input_layernorm") if normed_inputs else None,
        qkv=linear("self_attn.q_proj", *keys),
        o=linear("self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        eps=config.norm_eps,
        shape=shape,
        kv=linear(*keys) if keys_again else None,
    )


def layer_shapes(
    config: ModelConfig, prefix: str, inputs: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The tensors of one block. ``inputs``: width of what its attention reads, if not the residual
    stream's."""
    hidden, inner = config.hidden_size, config.intermediate_size
    inputs = inputs or hidden
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, inputs, config.attention_bias),
        "self_attn.k_proj": (kv_size, inputs, config.attention_bias),
        "self_attn.v_proj": (kv_size, inputs, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }
    for name, (outputs, width, bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (outputs, width)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold, by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.layers):
        shapes |= layer_shapes(config, f"model.layers.{index}.")
    return shapes


def check_tensors(config: ModelConfig, weights: Mapping[str, Weight]) -> None:
    """Refuse a checkpoint with missing or misshapen tensors, naming the first ten of them."""
    # Weights read from files on demand know their shapes without converting anything.
    shape_of = getattr(weights, "shape_of", lambda name: weights[name].shape)
    problems = []
    for name, shape in expected_shapes(config).items():
        if name not in weights:
            problems.append(f"{name} is missing")
        elif (found := tuple(shape_of(name))) != shape:
            problems.append(f"{name} is {found}, expected {shape}")
    if problems:
        raise SurefootError(
            "model",
            f"the checkpoint does not fit its config: {'; '.join(problems[:MOST_NAMED])}"
            + (f"; and {len(problems) - MOST_NAMED} more" * (len(problems) > MOST_NAMED)),
        )
