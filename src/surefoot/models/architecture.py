"""What tells one dense decoder architecture from another, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Presence(Enum):
    """Whether a kind of tensor exists in an architecture."""

    NEVER = "never"
    ALWAYS = "always"
    CONFIG = "config"
    """As the checkpoint says: ``attention_bias`` / ``mlp_bias`` of a config.json, or whether the
    tensors are there in a GGUF file."""


@dataclass(frozen=True)
class Architecture:
    """One row of ``surefoot.models.registry``.

    The names are those that checkpoints use; the flags settle ``ModelConfig``.
    """

    name: str
    hf_names: tuple[str, ...]
    """Values of ``architectures`` in config.json."""
    gguf_names: tuple[str, ...]
    """Values of ``general.architecture`` in a GGUF file."""
    qkv_bias: Presence
    output_bias: Presence
    mlp_bias: Presence
    qk_norm: bool = False
    gguf_permutes_qk: bool = False
    """Whether GGUF files hold q and k rows reordered for interleaved RoPE pairs."""
    has_sliding_window: bool = False
    """Whether the Hugging Face model reads ``use_sliding_window``."""
    default_head_dim: int | None = None
    """``head_dim`` where config.json has none; ``None``: hidden size / heads."""
