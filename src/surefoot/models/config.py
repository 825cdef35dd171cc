"""What a decoder is made of, however its checkpoint spelled it."""

from __future__ import annotations

from dataclasses import dataclass, field

# What is taken from a file: far beyond what models have, and far from what hangs or overflows.
LARGEST = 1 << 24
"""Of any size, count or position; beyond, float32 does not tell one position from the next."""
MOST_LAYERS = 1000
Range = tuple[float, float]
NUMBERS: Range = (0.0, 1e15)
NORM_EPSILON: Range = (1e-12, 1.0)
ROPE_THETA: Range = (2.0, 1e15)
ROPE_NUMBERS: Range = (0.01, 1e4)
"""Factors, and YaRN's and Llama 3's other constants."""


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling, with the keys of Hugging Face's ``rope_scaling``.

    ``kind`` is ``default``, ``linear``, ``llama3`` or ``yarn``; anything else is refused when the
    checkpoint is read.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()
    """Divisors of the unscaled frequencies, one per pair (``rope_freqs`` of a GGUF file), applied
    before ``kind``; empty for none."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a dense decoder (Llama, Qwen2, Qwen3)."""

    architecture: str
    """A name of ``surefoot.models.registry``: ``llama``, ``qwen2``, ``qwen3``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tied_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k and v."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before RoPE."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
