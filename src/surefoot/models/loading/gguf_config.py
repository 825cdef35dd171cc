"""Metadata of a GGUF file -> ``ModelConfig``, with llama.cpp's meaning of each key."""

from __future__ import annotations

import math
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.models.architecture import Presence
from surefoot.models.config import (
    LARGEST,
    MOST_LAYERS,
    NORM_EPSILON,
    NUMBERS,
    ROPE_NUMBERS,
    ROPE_THETA,
    ModelConfig,
    Range,
    RopeScaling,
)
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.registry import by_gguf_name

DEFAULT_THETA = 10000.0
CONTROL, USER_DEFINED = 3, 4
NO_TOKEN = (0xFFFFFFFF, -1)
"""How llama.cpp writes that there is none."""
# Texts of tokens that end a turn, the list of llama.cpp's end-of-generation tokens less its
# fill-in-the-middle ones (which a chat model may write inside code).
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "</s>",
)
# Keys that change the results in a way not implemented, and their harmless values.
REFUSED_KEYS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0,),
}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The config of a file of architecture llama, qwen2 or qwen3. Raises SurefootError naming
    the key that is missing, mistyped or asks for something unsupported."""
    reader = Metadata(file)
    architecture = by_gguf_name(reader.name)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise SurefootError(
            "model",
            f"{file.path} is one part of a split GGUF file",
            "merge the parts first (llama-gguf-split --merge)",
        )
    for key, harmless in REFUSED_KEYS.items():
        if reader.find(key) is not None and reader.find(key) not in harmless:
            raise reader.refuse(key, f"is {reader.find(key)}, which is not supported")
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    kv_heads = reader.integer("attention.head_count_kv", heads)
    head_dim = reader.integer("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise reader.refuse("attention.key_length", f"is {head_dim}, expected an even number")
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.integer(key, head_dim) != head_dim:
            raise reader.refuse(key, f"differs from the head size of {head_dim}")
    if heads % kv_heads:
        raise reader.refuse("attention.head_count_kv", f"does not divide {heads} heads")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.broken("it has no token_embd.weight")
    vocab_size = embedding.shape[0]
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=reader.integer("feed_forward_length"),
        layers=reader.integer("block_count", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=reader.integer("context_length"),
        norm_eps=reader.number("attention.layer_norm_rms_epsilon", within=NORM_EPSILON),
        rope_theta=reader.number("rope.freq_base", DEFAULT_THETA, ROPE_THETA),
        rope_scaling=_read_scaling(file, reader, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias=_has_bias(file, architecture.qkv_bias, "attn_q"),
        output_bias=_has_bias(file, architecture.output_bias, "attn_output"),
        mlp_bias=_has_bias(file, architecture.mlp_bias, "ffn_gate"),
        qk_norm=architecture.qk_norm,
        bos_token_id=reader.token("bos_token_id", vocab_size),
        eos_token_ids=_end_tokens(file, reader, vocab_size),
    )


def _read_scaling(file: GgufFile, reader: Metadata, head_dim: int) -> RopeScaling:
    factors: tuple[float, ...] = ()
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is not None:
        if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
            raise file.broken(f"rope_freqs.weight is {tensor.kind} of shape {tensor.shape}")
        factors = tuple(file.raw(tensor).flatten().clone().view(torch.float32).tolist())
        if not all(ROPE_NUMBERS[0] <= factor <= ROPE_NUMBERS[1] for factor in factors):
            raise file.broken(
                "rope_freqs.weight holds {:g} to {:g}, expected {:g} to {:g}".format(
                    min(factors), max(factors), *ROPE_NUMBERS
                )
            )
    factor = reader.number("rope.scaling.factor", 0.0)
    # llama.cpp takes a factor without a type for linear scaling.
    kind = reader.find("rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeScaling(frequency_factors=factors)
    if kind not in ("linear", "yarn"):
        raise reader.refuse("rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn")
    factor = reader.number("rope.scaling.factor", within=ROPE_NUMBERS)
    if kind == "linear":
        return RopeScaling("linear", factor=factor, frequency_factors=factors)
    if reader.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise reader.refuse("rope.scaling.yarn_log_multiplier", "is set, which is not supported")
    attention = reader.number("rope.scaling.attn_factor", 1.0, ROPE_NUMBERS)
    attention *= reader.number("rope.scaling.yarn_attn_factor", 1.0, ROPE_NUMBERS)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_positions=reader.integer(
            "rope.scaling.original_context_length", reader.integer("context_length")
        ),
        # Here the file's factor multiplies YaRN's own; Hugging Face's replaces it.
        attention_factor=attention * (1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0),
        beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0, ROPE_NUMBERS),
        beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0, ROPE_NUMBERS),
        frequency_factors=factors,
    )


def _has_bias(file: GgufFile, presence: Presence, part: str) -> bool:
    stored = f"blk.0.{part}.bias" in file.tensors
    if presence is Presence.NEVER and stored:
        raise SurefootError("model", f"{file.path} has {part} biases, which are not supported")
    return stored if presence is Presence.CONFIG else presence is Presence.ALWAYS


def _end_tokens(file: GgufFile, reader: Metadata, vocab_size: int) -> tuple[int, ...]:
    """eos, eot and eom of the metadata, then special tokens whose text ends a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [reader.token(key, vocab_size) for key in keys]
    ids = [token for token in named if token is not None]
    types, texts = (file.items(f"tokenizer.ggml.{key}") for key in ("token_type", "tokens"))
    for token, (text, kind) in enumerate(zip(texts[:vocab_size], types, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and text in END_TEXTS:
            ids.append(token)
    return tuple(dict.fromkeys(ids))


class Metadata:
    """Typed reads of the keys under the file's architecture, ``name``."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise file.broken("it has no general.architecture")
        self.name, self.prefix = name, name + "."

    def find(self, key: str) -> Any:
        return self.file.metadata.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            shown = "a list: it differs by layer" if isinstance(value, list) else repr(value)[:80]
            raise self.refuse(key, f"is {shown}, expected a positive integer of at most {most}")
        return value

    def number(self, key: str, default: float | None = None, within: Range = NUMBERS) -> float:
        value = self._get(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not within[0] <= value <= within[1]:
            expected = f"a number from {within[0]:g} to {within[1]:g}"
            raise self.refuse(key, f"is {repr(value)[:80]}, expected {expected}")
        return float(value)

    def token(self, key: str, vocab_size: int) -> int | None:
        name = f"tokenizer.ggml.{key}"
        value = self.file.metadata.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value in NO_TOKEN:
            return None
        if not 0 <= value < vocab_size:
            raise self.file.broken(f"{name} is {value}, beyond its vocabulary of {vocab_size}")
        return value

    def refuse(self, key: str, problem: str) -> SurefootError:
        return SurefootError("model", f"{self.prefix}{key} of {self.file.path} {problem}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.find(key)
        if value is None and default is None:
            raise self.refuse(key, "is missing")
        return default if value is None else value
