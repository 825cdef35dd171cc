"""The DFlash family by its formulas, in float64, the whole text at once: no cache, no paging, no
batching. Written from the projects' formulas alone, as an oracle for the drafter in the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass
class Flags:
    """Sizes and variants of a checkpoint. ``taps``: layer entries of the target."""

    family: str = "dflash"
    layout: str = "z-lab"
    hidden: int = 32
    target_hidden: int = 32
    inner: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    vocab: int = 48
    draft_vocab: int = 48
    block: int = 5
    taps: tuple[int, ...] = (0, 1)
    mask: int = 45
    theta: float = 10000.0
    eps: float = 1e-5
    positions: int = 256
    markov: str = "vanilla"
    rank: int = 8
    top_k: int = 6
    confidence: bool = True
    confidence_with_markov: bool = True
    anchor: bool | None = None
    """None: as the family and layout have it."""
    types: tuple[str, ...] = (FULL, FULL)
    window: int = 0
    causal: bool | None = None
    """``is_causal``; of speculators, whether sliding layers are."""
    scale: float = 1.0
    multiplier: float = 1.0
    cap: float = 0.0
    attention_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    own_mask: bool = False
    prefix: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def anchor_predicts(self) -> bool:
        if self.anchor is not None:
            return self.anchor
        return self.family == "dspark" or self.layout == "deepseek"

    @property
    def drafts(self) -> int:
        return self.block if self.anchor_predicts else self.block - 1

    def layer_is_causal(self, layer: int) -> bool:
        sliding = self.types[layer] == SLIDING
        if self.layout == "speculators":
            return sliding and self.causal is not False
        return sliding if self.causal is None else self.causal


TAPS, GROUP = 2, 8


def random_tensors(flags: Flags, seed: int = 0, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Tensors under the canonical names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    f, h, r = flags, flags.hidden, flags.rank
    q, kv = f.heads * f.head_dim, f.kv_heads * f.head_dim
    tensors = {
        "fc.weight": matrix(h, len(f.taps) * f.target_hidden),
        "hidden_norm.weight": norm(h),
        "norm.weight": norm(h),
    }
    for index in range(f.layers):
        layer = f"layers.{index}."
        tensors |= {
            f"{layer}input_layernorm.weight": norm(h),
            f"{layer}post_attention_layernorm.weight": norm(h),
            f"{layer}self_attn.q_norm.weight": norm(f.head_dim),
            f"{layer}self_attn.k_norm.weight": norm(f.head_dim),
            f"{layer}self_attn.q_proj.weight": matrix(q, h),
            f"{layer}self_attn.k_proj.weight": matrix(kv, h),
            f"{layer}self_attn.v_proj.weight": matrix(kv, h),
            f"{layer}self_attn.o_proj.weight": matrix(h, q),
            f"{layer}mlp.gate_proj.weight": matrix(f.inner, h),
            f"{layer}mlp.up_proj.weight": matrix(f.inner, h),
            f"{layer}mlp.down_proj.weight": matrix(h, f.inner),
        }
        if f.attention_bias:
            for name, size in (("q", q), ("k", kv), ("v", kv), ("o", h)):
                tensors[f"{layer}self_attn.{name}_proj.bias"] = matrix(size)
        for name in ("attention_conv", "mlp_conv") if f.family == "dflash2" else ():
            tensors[f"{layer}{name}.base_kernel"] = matrix(2, TAPS, h)
            tensors[f"{layer}{name}.kernel_projection.weight"] = matrix(2 * TAPS * h // GROUP, h)
    if f.family == "dspark":
        tensors["markov_head.markov_w1.weight"] = matrix(f.vocab, r)
        tensors["markov_head.markov_w2.weight"] = 4 * matrix(f.draft_vocab, r)
        if f.markov == "gated":
            tensors["markov_head.gate_proj.weight"] = matrix(r, h + r)
            tensors["markov_head.gate_proj.bias"] = matrix(r)
        if f.markov == "rnn":
            tensors["markov_head.joint_proj.weight"] = matrix(3 * r, 2 * r + h)
            tensors["markov_head.joint_proj.bias"] = matrix(3 * r)
        if f.confidence:
            width = h + (r if f.confidence_with_markov else 0)
            tensors["confidence_head.proj.weight"] = matrix(1, width)
            tensors["confidence_head.proj.bias"] = matrix(1)
    if f.family == "dflash2":
        tensors["candidate_selector.predecessor_codebook"] = 3 * matrix(f.vocab, r)
        tensors["candidate_selector.successor_codebook"] = matrix(f.vocab, r)
        tensors["candidate_selector.hidden_projection.weight"] = matrix(r, h)
    if f.own_embedding:
        tensors["embed_tokens.weight"] = matrix(f.vocab, h)
    if f.own_head or f.draft_vocab < f.vocab:
        tensors["lm_head.weight"] = matrix(f.draft_vocab, h)
    if f.draft_vocab < f.vocab:
        ids = torch.randperm(f.vocab, generator=generator)[: f.draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(f.draft_vocab)
        tensors["t2d"] = torch.zeros(f.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    if f.own_mask:
        tensors["mask_embedding"] = matrix(h)
    return tensors


def config_of(flags: Flags) -> dict[str, Any]:
    f = flags
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": f.hidden,
        "intermediate_size": f.inner,
        "num_attention_heads": f.heads,
        "num_key_value_heads": f.kv_heads,
        "head_dim": f.head_dim,
        "num_hidden_layers": f.layers,
        "vocab_size": f.vocab,
        "max_position_embeddings": f.positions,
        "rms_norm_eps": f.eps,
        "rope_parameters": {"rope_theta": f.theta, "rope_type": "default"},
        "attention_bias": f.attention_bias,
        "hidden_act": "silu",
        "layer_types": list(f.types),
        "use_sliding_window": f.window > 0,
        "sliding_window": f.window or None,
    }
    own: dict[str, Any] = {"mask_token_id": f.mask, "target_layer_ids": [tap - 1 for tap in f.taps]}
    if f.family == "dspark":
        own |= {"markov_rank": f.rank, "markov_head_type": f.markov}
        own |= {"enable_confidence_head": f.confidence}
        own |= {"confidence_head_with_markov": f.confidence_with_markov}
    if f.family == "dflash2":
        own |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
        own |= {"selector_rank": f.rank, "selector_top_k": f.top_k}
    if f.layout == "speculators":
        del own["target_layer_ids"]
        return {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": f.family,
            "aux_hidden_state_layer_ids": list(f.taps),
            "sample_from_anchor": f.anchor_predicts,
            "sliding_window_non_causal": f.causal is False,
            "block_size": f.block,
            "draft_vocab_size": f.draft_vocab,
            "transformer_layer_config": layer,
            "speculators_config": {"verifier": {"name_or_path": "some/target"}},
            **own,
            **f.extra,
        }
    if f.target_hidden != f.hidden:
        layer["target_hidden_size"] = f.target_hidden
    if f.draft_vocab < f.vocab:
        layer["draft_vocab_size"] = f.draft_vocab
    if f.anchor is not None:
        own["sample_from_anchor"] = f.anchor
    if f.causal is not None:
        layer["is_causal"] = f.causal
    if f.scale != 1:
        own["input_embedding_scale"] = f.scale
    if f.multiplier != 1:
        own["output_multiplier"] = f.multiplier
    if f.cap:
        own["final_logit_softcapping"] = f.cap
    if f.layout == "deepseek":
        return {
            "architectures": ["Qwen3DSparkModel"], **layer, **own, "block_size": f.block, **f.extra
        }  # fmt: skip
    if f.layout == "specforge":
        own["projector_type"] = "dspark" if f.family == "dspark" else "dflash"
    nested = {"dflash_config": own, "block_size": f.block}
    return {"architectures": ["DFlashDraftModel"], **layer, **nested, **f.extra}


def random_checkpoint(
    folder: Path, flags: Flags, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Write a drafter's folder; returns its tensors under their canonical names."""
    tensors = random_tensors(flags) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(flags)))
    stored = {flags.prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    mask = stored.pop(f"{flags.prefix}mask_embedding", None)
    if mask is not None:
        torch.save(mask, folder / "mask_embedding.pt")
    save_file(stored, folder / "model.safetensors")
    return tensors


class Reference:
    """The drafter of ``flags`` and ``tensors`` with the target's embedding and head."""

    def __init__(
        self,
        flags: Flags,
        tensors: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor | None = None,
    ) -> None:
        self.flags = flags
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding = self.t.get("embed_tokens.weight", embedding.double())
        head = embedding if head is None else head
        self.head = self.t.get("lm_head.weight", head.double())
        offsets = tensors.get("d2t")
        index = torch.arange(flags.draft_vocab)
        self.target_ids = index if offsets is None else index + offsets

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.flags.eps)
        return x * scale * self.t[name]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.flags.head_dim // 2
        powers = torch.arange(half).double() * 2 / self.flags.head_dim
        angles = positions.double()[:, None] / self.flags.theta**powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def heads(self, x: torch.Tensor, layer: str, name: str, count: int) -> torch.Tensor:
        found = x @ self.t[f"{layer}self_attn.{name}_proj.weight"].T
        bias = self.t.get(f"{layer}self_attn.{name}_proj.bias")
        return (found if bias is None else found + bias).view(len(x), count, self.flags.head_dim)

    def convolve(self, y: torch.Tensor, x: torch.Tensor, name: str, side: int) -> torch.Tensor:
        base = self.t[f"{name}.base_kernel"][side]
        dynamic = x @ self.t[f"{name}.kernel_projection.weight"].T
        dynamic = dynamic.view(len(x), 2, TAPS, -1)[:, side]
        out = torch.zeros_like(y)
        for i in range(len(y)):
            for tap in range(min(TAPS, i + 1)):
                for channel in range(y.shape[1]):
                    factor = base[tap, channel] + dynamic[i, tap, channel // GROUP]
                    out[i, channel] += factor * y[i - tap, channel]
        return out

    def visible(self, layer: int, start: int) -> torch.Tensor:
        """bool [block, start + block]."""
        f = self.flags
        seen = torch.ones(f.block, start + f.block, dtype=torch.bool)
        for i in range(f.block):
            for key in range(start + f.block):
                back = start + i - key
                if f.layer_is_causal(layer) and back < 0:
                    seen[i, key] = False
                if f.types[layer] != SLIDING or not f.window:
                    continue
                if f.layout == "speculators":
                    seen[i, key] &= key >= start - f.window
                else:
                    seen[i, key] &= -f.window < back < f.window
        return seen

    def block(self, captured: torch.Tensor, current: int) -> torch.Tensor:
        """Features [start, taps * target hidden] of all positions before the current token's ->
        hidden states of the block, after the final norm."""
        f, t, start = self.flags, self.t, len(captured)
        context = self.norm(captured.double() @ t["fc.weight"].T, "hidden_norm.weight")
        rows = torch.tensor([current] + [f.mask] * (f.block - 1))
        z = self.embedding[rows].clone()
        if "mask_embedding" in t:
            z[1:] = t["mask_embedding"]
        z = z * f.scale
        places = torch.arange(start + f.block)
        for index in range(f.layers):
            layer = f"layers.{index}."
            x = self.norm(z, f"{layer}input_layernorm.weight")
            y = x
            if f.family == "dflash2":
                y = self.convolve(x, x, f"{layer}attention_conv", 0)
            q = self.norm(self.heads(y, layer, "q", f.heads), f"{layer}self_attn.q_norm.weight")
            k = torch.cat([self.heads(part, layer, "k", f.kv_heads) for part in (context, y)])
            v = torch.cat([self.heads(part, layer, "v", f.kv_heads) for part in (context, y)])
            k = self.norm(k, f"{layer}self_attn.k_norm.weight")
            q, k = self.rotate(q, places[start:]), self.rotate(k, places)
            group = f.heads // f.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / f.head_dim**0.5
            scores = scores.masked_fill(~self.visible(index, start), float("-inf"))
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(f.block, -1)
            out = out @ t[f"{layer}self_attn.o_proj.weight"].T
            if f.attention_bias:
                out = out + t[f"{layer}self_attn.o_proj.bias"]
            if f.family == "dflash2":
                out = self.convolve(out, x, f"{layer}attention_conv", 1)
            z = z + out
            x = y = self.norm(z, f"{layer}post_attention_layernorm.weight")
            if f.family == "dflash2":
                y = self.convolve(x, x, f"{layer}mlp_conv", 0)
            inner = torch.nn.functional.silu(y @ t[f"{layer}mlp.gate_proj.weight"].T)
            out = (inner * (y @ t[f"{layer}mlp.up_proj.weight"].T)) @ t[
                f"{layer}mlp.down_proj.weight"
            ].T
            if f.family == "dflash2":
                out = self.convolve(out, x, f"{layer}mlp_conv", 1)
            z = z + out
        return self.norm(z, "norm.weight")

    def draft(self, captured: torch.Tensor, current: int) -> tuple[list[int], list[float]]:
        """Greedy drafts, and the chances that the drafter gives them."""
        f, t = self.flags, self.t
        hidden = self.block(captured, current)
        logits = hidden @ self.head.T * f.multiplier
        if f.cap:
            logits = f.cap * torch.tanh(logits / f.cap)
        state = torch.zeros(f.rank).double()
        previous, drafts, chances = current, [], []
        for i in range(0 if f.anchor_predicts else 1, f.block):
            row, confidence = logits[i], None
            if f.family == "dspark":
                e = t["markov_head.markov_w1.weight"][previous]
                fed = e
                if f.markov == "gated":
                    gate = t["markov_head.gate_proj.weight"] @ torch.cat((hidden[i], e))
                    fed = torch.sigmoid(gate + t["markov_head.gate_proj.bias"]) * e
                if f.markov == "rnn":
                    joint = t["markov_head.joint_proj.weight"] @ torch.cat((state, e, hidden[i]))
                    g, c, o = (joint + t["markov_head.joint_proj.bias"]).chunk(3)
                    fed = torch.tanh(o)
                    state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                row = row + t["markov_head.markov_w2.weight"] @ fed
                if f.confidence:
                    read = torch.cat((hidden[i], e)) if f.confidence_with_markov else hidden[i]
                    score = t["confidence_head.proj.weight"] @ read
                    confidence = float(torch.sigmoid(score + t["confidence_head.proj.bias"]))
            if f.family == "dflash2":
                unary, kept = row.topk(f.top_k)
                codes = t["candidate_selector.predecessor_codebook"][previous]
                codes = codes * (t["candidate_selector.hidden_projection.weight"] @ hidden[i])
                row = unary + t["candidate_selector.successor_codebook"][kept] @ codes
            best = int(row.argmax())
            chances.append(float(row.softmax(0)[best]) if confidence is None else confidence)
            previous = int(kept[best]) if f.family == "dflash2" else int(self.target_ids[best])
            drafts.append(previous)
        return drafts, chances
