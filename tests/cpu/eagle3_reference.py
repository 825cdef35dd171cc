"""EAGLE-3 by its formulas, in float64, the whole text at once: no cache, no paging, no batching.

Written from the papers' and projects' formulas alone, as an oracle for the drafter in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from surefoot.models.decoder import Decoder


@dataclass
class Flags:
    """Sizes and variants of a checkpoint; as in ``random_checkpoint``."""

    hidden: int = 32
    target_hidden: int = 32
    inner: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 48
    draft_vocab: int = 48
    theta: float = 10000.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    own_embedding: bool = False
    nested: bool = True
    prefix: str = ""
    positions: int = 256
    extra: dict[str, Any] = field(default_factory=dict)


def random_tensors(flags: Flags, seed: int = 0, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Tensors under the canonical names of speculators."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    h, q, kv = flags.hidden, flags.heads * flags.head_dim, flags.kv_heads * flags.head_dim
    tensors = {
        "fc.weight": matrix(h, 3 * flags.target_hidden),
        "layers.0.input_layernorm.weight": norm(h),
        "layers.0.hidden_norm.weight": norm(h),
        "layers.0.post_attention_layernorm.weight": norm(h),
        "layers.0.self_attn.q_proj.weight": matrix(q, 2 * h),
        "layers.0.self_attn.k_proj.weight": matrix(kv, 2 * h),
        "layers.0.self_attn.v_proj.weight": matrix(kv, 2 * h),
        "layers.0.self_attn.o_proj.weight": matrix(h, q),
        "layers.0.mlp.gate_proj.weight": matrix(flags.inner, h),
        "layers.0.mlp.up_proj.weight": matrix(flags.inner, h),
        "layers.0.mlp.down_proj.weight": matrix(h, flags.inner),
        "norm.weight": norm(h),
        "lm_head.weight": matrix(flags.draft_vocab, h),
    }
    if flags.qk_norm:
        tensors["layers.0.self_attn.q_norm.weight"] = norm(flags.head_dim)
        tensors["layers.0.self_attn.k_norm.weight"] = norm(flags.head_dim)
    if flags.attention_bias:
        for name, size in (("q", q), ("k", kv), ("v", kv), ("o", h)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = matrix(size)
    if flags.norm_before_fc:
        tensors["input_norm.weight"] = norm(3 * flags.target_hidden)
    if flags.fc_norm:
        for index in range(3):
            tensors[f"fc_norm.{index}.weight"] = norm(flags.target_hidden)
    if flags.own_embedding:
        tensors["embed_tokens.weight"] = matrix(flags.vocab, h)
    if flags.draft_vocab < flags.vocab:
        ids = torch.randperm(flags.vocab, generator=generator)[: flags.draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(flags.draft_vocab)
        tensors["t2d"] = torch.zeros(flags.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def config_of(flags: Flags) -> dict[str, Any]:
    layer = {
        "model_type": "llama",
        "hidden_size": flags.hidden,
        "intermediate_size": flags.inner,
        "num_attention_heads": flags.heads,
        "num_key_value_heads": flags.kv_heads,
        "head_dim": flags.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": flags.vocab,
        "max_position_embeddings": flags.positions,
        "rms_norm_eps": flags.eps,
        "rope_theta": flags.theta,
        "attention_bias": flags.attention_bias,
        "hidden_act": "silu",
    }
    own = {
        "draft_vocab_size": flags.draft_vocab,
        "target_hidden_size": flags.target_hidden,
        "norm_before_residual": flags.norm_before_residual,
        "norm_before_fc": flags.norm_before_fc,
        "fc_norm": flags.fc_norm,
        **flags.extra,
    }
    if not flags.nested:
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "norm_output": flags.norm_output,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        **own,
    }


def random_checkpoint(
    folder: Path,
    flags: Flags,
    tensors: dict[str, torch.Tensor] | None = None,
    pickled: bool = False,
) -> dict[str, torch.Tensor]:
    """Write a drafter's folder; returns its tensors under their canonical names."""
    import json

    tensors = random_tensors(flags) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(flags)))
    layer = "layers.0." if flags.nested else "midlayer."
    stored = {
        flags.prefix + name.replace("layers.0.", layer): tensor.contiguous()
        for name, tensor in tensors.items()
    }
    if pickled:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    return tensors


class Reference:
    """The drafter of ``flags`` and ``tensors`` with the target's embedding [vocab, hidden]."""

    def __init__(
        self, flags: Flags, tensors: dict[str, torch.Tensor], embedding: torch.Tensor
    ) -> None:
        self.flags = flags
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding = self.t.get("embed_tokens.weight", embedding.double())
        offsets = tensors.get("d2t")
        index = torch.arange(flags.draft_vocab)
        self.target_ids = index if offsets is None else index + offsets

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.flags.eps)
        return x * scale * self.t[name]

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """[S, 3 * target hidden] -> g [S, hidden]."""
        captured = captured.double()
        if self.flags.norm_before_fc:
            captured = self.norm(captured, "input_norm.weight")
        if self.flags.fc_norm:
            parts = captured.chunk(3, dim=1)
            captured = torch.cat(
                [self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=1
            )
        return captured @ self.t["fc.weight"].T

    def layer(self, g: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Slot i: feature g_i [S, hidden] with token i + 1 -> y [S, hidden]."""
        flags, t = self.flags, self.t
        normed = self.norm(g, "layers.0.hidden_norm.weight")
        embedded = self.norm(self.embedding[tokens], "layers.0.input_layernorm.weight")
        a = torch.cat((embedded, normed), dim=1)
        size = len(tokens)

        def project(name: str, heads: int) -> torch.Tensor:
            x = a @ t[f"layers.0.self_attn.{name}_proj.weight"].T
            x = x + t.get(f"layers.0.self_attn.{name}_proj.bias", torch.zeros(1).double())
            return x.view(size, heads, flags.head_dim)

        q, k = project("q", flags.heads), project("k", flags.kv_heads)
        v = project("v", flags.kv_heads)
        if flags.qk_norm:
            q = self.norm(q, "layers.0.self_attn.q_norm.weight")
            k = self.norm(k, "layers.0.self_attn.k_norm.weight")
        half = flags.head_dim // 2
        powers = torch.arange(half).double() * 2 / flags.head_dim
        angles = torch.arange(size).double()[:, None] / flags.theta**powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            first, second = x[..., :half], x[..., half:]
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        q, k = rotate(q), rotate(k)
        group = flags.heads // flags.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / flags.head_dim**0.5
        future = torch.ones(size, size, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(size, -1)
        out = attended @ t["layers.0.self_attn.o_proj.weight"].T
        out = out + t.get("layers.0.self_attn.o_proj.bias", torch.zeros(1).double())
        u = (normed if flags.norm_before_residual else g) + out
        z = self.norm(u, "layers.0.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(z @ t["layers.0.mlp.gate_proj.weight"].T)
        inner = gate * (z @ t["layers.0.mlp.up_proj.weight"].T)
        return u + inner @ t["layers.0.mlp.down_proj.weight"].T

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        return self.norm(y, "norm.weight") @ self.t["lm_head.weight"].T

    def draft(self, captured: torch.Tensor, text: list[int], count: int) -> list[int]:
        """Greedy drafts after ``text``, all but whose last token the target has run:
        ``captured`` [len(text) - 1, 3 * target hidden]."""
        g, tokens, drafts = self.fuse(captured), torch.tensor(text[1:]), []
        for _ in range(count):
            y = self.layer(g, tokens)[-1:]
            drafts.append(int(self.target_ids[self.logits(y).argmax()]))
            back = self.norm(y, "norm.weight") if self.flags.norm_output else y
            g, tokens = torch.cat((g, back)), torch.cat((tokens, torch.tensor(drafts[-1:])))
        return drafts


def captured_layers(decoder: Decoder, text: list[int], ids: tuple[int, ...]) -> torch.Tensor:
    """The target's features of a text, prefilled in one go: [len(text), 3 * hidden]."""
    from surefoot.kernels.backend import FlatBatch

    count, layers = len(text), decoder.config.layers
    kv = decoder.backend.allocate_kv(layers, 2, -(-count // 16) * 16, decoder.shape)
    index = torch.arange(count)
    batch = FlatBatch(
        torch.tensor(text), index, index, index * 0, torch.ones((1, 1), dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64), count,
    )  # fmt: skip
    return decoder.forward(batch, kv, ids).features
