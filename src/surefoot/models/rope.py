"""Rotary tables: default, linear, llama3 and YaRN frequencies, as in Hugging Face's
``modeling_rope_utils``."""

from __future__ import annotations

import math

import torch

from surefoot.kernels.backend import RopeTable
from surefoot.models.config import ModelConfig, RopeScaling


def rope_table(
    config: ModelConfig, max_positions: int, device: torch.device | str = "cpu"
) -> RopeTable:
    """cos and sin of every position below ``max_positions``, float32, times YaRN's attention
    factor where there is one (which scales scores by its square, as in transformers)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    periods = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling.frequency_factors:
        periods = periods * torch.tensor(scaling.frequency_factors, dtype=torch.float32)
    inverse = 1.0 / periods
    magnitude = 1.0
    if scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling.kind == "llama3":
        inverse = _llama3(inverse, scaling)
    elif scaling.kind == "yarn":
        inverse, magnitude = _yarn(periods, config, scaling)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse
    return RopeTable(
        (angles.cos() * magnitude).to(device).contiguous(),
        (angles.sin() * magnitude).to(device).contiguous(),
    )


def _llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    ratio = scaling.original_max_positions / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (ratio - low) / (high - low)
    blended = (1 - blend) * inverse / scaling.factor + blend * inverse
    stretched = torch.where(ratio < low, inverse / scaling.factor, inverse)
    between = (ratio >= low) & (ratio <= high)
    return torch.where(between, blended, stretched)


def _yarn(
    periods: torch.Tensor, config: ModelConfig, scaling: RopeScaling
) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate low frequencies, keep high ones, ramp between."""

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    def dimension(rotations: float) -> float:
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    factor = scaling.factor
    attention = scaling.attention_factor
    if attention is None and scaling.mscale and scaling.mscale_all_dim:
        attention = magnitude(factor, scaling.mscale) / magnitude(factor, scaling.mscale_all_dim)
    elif attention is None:
        attention = magnitude(factor)
    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(config.head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    # Rounded as transformers rounds it, so that the tables are equal to the bit.
    kept = 1 - ramp
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, attention
