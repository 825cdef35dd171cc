"""Drafters of the DFlash family as GGUF files (llama.cpp's architecture ``dflash``).

A file without a head means the target's: what its converter dropped was a copy of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.kernels.backend import Weight
from surefoot.models.config import MOST_LAYERS, NORM_EPSILON, ROPE_THETA, ModelConfig
from surefoot.models.loading.gguf_config import Metadata
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.speculation.drafting import gguf
from surefoot.speculation.drafting.gguf import TAPS, read_flag
from surefoot.speculation.proposers.dflash.config import (
    MOST_BLOCK_ROWS,
    Convolutions,
    DFlashConfig,
    MarkovShape,
    Selector,
    Visibility,
)

ARCHITECTURE = "dflash"
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base"),
    *("rope.dimension_count", "rope.dimension_sections", "rope.scaling.type", "block_size"),
    *(TAPS, "sample_from_anchor", "has_confidence_head", "embedding_scale"),
    *("logit_scale", "final_logit_softcapping", "conv_kernel_size", "conv_group_size"),
    *("selector_rank", "selector_top_k"),
}
NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
BLOCK_NAMES = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


def open_gguf(path: Path) -> GgufFile:
    """SurefootError for a file that is none of this family."""
    return gguf.open_gguf(path, ARCHITECTURE)


def read_gguf_config(file: GgufFile) -> DFlashConfig:
    """The config of a file. SurefootError, naming key and file, for what is missing, mistyped or
    unknown."""
    reader = gguf.open_metadata(file, _KNOWN)
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    head_dim = gguf.read_head_dim(reader, hidden, heads)
    if reader.find("rope.dimension_sections") not in (None, [head_dim // 2, 0, 0, 0]):
        raise reader.refuse("rope.dimension_sections", "tells positions of images apart")
    vocab = gguf.read_vocabulary(file, reader)
    layers = reader.integer("block_count", most=MOST_LAYERS)
    bias = "blk.0.attn_q.bias" in file.tensors
    layer = ModelConfig(
        architecture="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=reader.integer("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=reader.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=reader.integer("context_length"),
        norm_eps=reader.number("attention.layer_norm_rms_epsilon", within=NORM_EPSILON),
        rope_theta=reader.number("rope.freq_base", within=ROPE_THETA),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
    markov, selector = None, None
    if "markov_w1.weight" in file.tensors:
        markov = MarkovShape("vanilla", file.tensors["markov_w1.weight"].shape[1])
    if "selector_hidden.weight" in file.tensors:
        selector = Selector(reader.integer("selector_rank"), reader.integer("selector_top_k"))
    block = reader.integer("block_size", most=MOST_BLOCK_ROWS)
    mask = reader.token("mask_token_id", vocab)
    if mask is None:
        raise file.broken("it has no tokenizer.ggml.mask_token_id")
    head = file.tensors.get("output.weight") or file.tensors.get("markov_w2.weight")
    fused = file.tensors.get("fc.weight")
    taps = gguf.read_taps(reader)
    return DFlashConfig(
        layout="gguf",
        layer=layer,
        draft_vocab_size=head.shape[0] if head is not None and gguf.IDS in file.tensors else vocab,
        target_hidden_size=fused.shape[1] // len(taps) if fused is not None else hidden,
        block_size=block,
        layer_ids=taps,
        mask_token_id=mask,
        anchor_predicts=read_flag(reader, "sample_from_anchor", markov is not None),
        layers=_visibilities(reader, layers),
        markov=markov,
        confidence=read_flag(reader, "has_confidence_head", "conf_proj.weight" in file.tensors),
        confidence_with_markov=markov is not None,
        convolutions=None
        if selector is None
        else Convolutions(reader.integer("conv_kernel_size"), reader.integer("conv_group_size")),
        selector=selector,
        embedding_scale=reader.number("embedding_scale", 0.0) or 1.0,
        logit_scale=reader.number("logit_scale", 0.0) or 1.0,
        logit_cap=reader.number("final_logit_softcapping", 0.0),
    )


def _visibilities(reader: Metadata, layers: int) -> tuple[Visibility, ...]:
    """A file that does not say which way sliding layers see means what z-lab's configs mean: the
    converter writes only what they say."""
    window, causal = reader.find("attention.sliding_window"), reader.find("attention.causal")
    pattern: list[Any] = [bool(window)] * layers
    if reader.find("attention.sliding_window_pattern") is not None:
        pattern = reader.file.items(f"{reader.prefix}attention.sliding_window_pattern", bool)
    if len(pattern) < layers:
        raise reader.refuse("attention.sliding_window_pattern", f"has not {layers} entries")
    width = reader.integer("attention.sliding_window") if window else 0
    return tuple(
        Visibility(
            slides if causal is None else read_flag(reader, "attention.causal", False),
            width if slides else 0,
        )
        for slides in pattern[:layers]
    )


def read_gguf_tensors(file: GgufFile) -> dict[str, Weight]:
    """All tensors, as ``drafting.gguf`` reads them."""
    return gguf.read_gguf_tensors(file, NAMES, BLOCK_NAMES)
