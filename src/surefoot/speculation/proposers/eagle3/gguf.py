"""EAGLE-3 drafters as GGUF files (llama.cpp's architecture ``eagle3``).

A file without a head means the target's rows of the draft vocabulary. Rows of q and k come in the
order of Llama's GGUF files.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.kernels.backend import Weight
from surefoot.models.config import NORM_EPSILON, ROPE_THETA, ModelConfig
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.speculation.drafting import gguf
from surefoot.speculation.proposers.eagle3.config import Eagle3Config

ARCHITECTURE = "eagle3"
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"),
    *("rope.dimension_count", "rope.scaling.type", gguf.TAPS, "target_hidden_size"),
    *("norm_before_residual", "norm_before_fc"),
}
NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {"attn_norm_2.weight": "hidden_norm.weight"}


def open_gguf(path: Path) -> GgufFile:
    """SurefootError for a file that holds no EAGLE-3 drafter."""
    return gguf.open_gguf(path, ARCHITECTURE)


def read_gguf_config(file: GgufFile) -> Eagle3Config:
    """The config of a file. SurefootError, naming key and file, for what is missing, mistyped or
    unknown."""
    reader = gguf.open_metadata(file, _KNOWN)
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    if reader.integer("block_count", 1) != 1:
        raise reader.refuse("block_count", "is not 1")
    vocab, taps = gguf.read_vocabulary(file, reader), gguf.read_taps(reader)
    ids = file.tensors.get(gguf.IDS)
    layer = ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=reader.integer("feed_forward_length"),
        layers=1,
        heads=heads,
        kv_heads=reader.integer("attention.head_count_kv", heads),
        head_dim=gguf.read_head_dim(reader, hidden, heads),
        max_positions=reader.integer("context_length"),
        norm_eps=reader.number("attention.layer_norm_rms_epsilon", within=NORM_EPSILON),
        rope_theta=reader.number("rope.freq_base", within=ROPE_THETA),
    )
    return Eagle3Config(
        layout="gguf",
        layer=layer,
        draft_vocab_size=vocab if ids is None else ids.shape[0],
        target_hidden_size=reader.integer("target_hidden_size", hidden),
        captured=len(taps),
        layer_ids=taps,
        ids_are_outputs=False,
        norm_before_residual=gguf.read_flag(reader, "norm_before_residual", False),
        norm_before_fc=gguf.read_flag(reader, "norm_before_fc", False),
        fc_norm=False,
        norm_before_head=True,
        norm_fed_back=False,
        logit_scale=1.0,
        verifier=None,
    )


def read_gguf_tensors(file: GgufFile, config: Eagle3Config) -> dict[str, Weight]:
    """All tensors, as ``drafting.gguf`` reads them."""

    def heads_of(name: str) -> int:
        layer = config.layer
        return layer.heads if ".q_proj." in name else layer.kv_heads if ".k_proj." in name else 0

    return gguf.read_gguf_tensors(file, NAMES, BLOCK_NAMES, heads_of)
