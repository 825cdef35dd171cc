"""Rotary tables against transformers' own, for every kind that is read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from surefoot.models.config import RopeScaling
from surefoot.models.rope import rope_table
from tiny_models import tiny_config

ORIGINAL = {"original_max_position_embeddings": 512}
CASES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | ORIGINAL,
    {"rope_type": "yarn", "factor": 4.0} | ORIGINAL,
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25} | ORIGINAL,
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0} | ORIGINAL,
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707} | ORIGINAL,
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "mscale": 0.7}
    | {"mscale_all_dim": 1.0}
    | ORIGINAL,
    # So short that the ramp has no width.
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0} | ORIGINAL,
    {"rope_type": "yarn", "factor": 4.0, "truncate": False} | ORIGINAL,
    {"rope_type": "yarn", "factor": 1.0} | ORIGINAL,
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 7},
]
RENAMED: dict[str, str] = {
    "rope_type": "kind",
    "original_max_position_embeddings": "original_max_positions",
}


def reference(parameters: dict, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [512, head_dim / 2] of transformers' Llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(512)[None])
    return cos[0, :, :16], sin[0, :, :16]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("parameters", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_table_equals_transformers(parameters: dict[str, Any], theta: float) -> None:
    fields: dict[str, Any] = {RENAMED.get(key, key): parameters[key] for key in parameters}
    scaling = RopeScaling(**fields)
    config = tiny_config("llama", head_dim=32, rope_theta=theta, rope_scaling=scaling)
    table = rope_table(config, 512)
    cos, sin = reference(parameters, theta)
    assert torch.equal(table.cos, cos)
    assert torch.equal(table.sin, sin)


def test_yarn_interpolates_no_further_than_the_last_dimension() -> None:
    """So long an original context that the slow end of the ramp lies beyond the head; the fast end
    lies among the head's frequencies, so that the ramp's slope shows."""
    long = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1 << 21}
    long["beta_fast"] = 1e4
    turns = (1 << 21) / (2 * math.pi)
    assert 32 * math.log(turns) / (2 * math.log(500.0)) > 32
    scaling = RopeScaling("yarn", 4.0, 1 << 21, beta_fast=1e4)
    table = rope_table(
        tiny_config("llama", head_dim=32, rope_theta=500.0, rope_scaling=scaling), 512
    )
    cos, sin = reference(long, 500.0)
    assert torch.equal(table.cos, cos)
    assert torch.equal(table.sin, sin)


@pytest.mark.parametrize(
    "scaling", [RopeScaling(), RopeScaling("linear", 4.0), RopeScaling("yarn", 4.0, 128)]
)
def test_frequency_factors_divide_before_any_scaling(scaling: RopeScaling) -> None:
    """Twice the periods: what stood at a position stands at twice the position."""
    config = tiny_config("llama", head_dim=32, rope_scaling=scaling)
    slower = replace(config, rope_scaling=replace(scaling, frequency_factors=(2.0,) * 16))
    plain, stretched = rope_table(config, 100), rope_table(slower, 200)
    torch.testing.assert_close(stretched.cos[::2], plain.cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(stretched.sin[::2], plain.sin, atol=1e-5, rtol=0)


def test_frequency_factors_are_those_of_llama3() -> None:
    """A GGUF file gives Llama 3's scaling as divisors, which llama.cpp computes like this."""
    scaling = RopeScaling("llama3", 8.0, 512, 1.0, 4.0)
    inverse = 10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    factors = []
    for frequency in inverse.tolist():
        wavelength = 2 * math.pi / frequency
        smooth = (512 / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < 512 / 4.0:
            factors.append(1.0)
        elif wavelength > 512 / 1.0:
            factors.append(8.0)
        else:
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(factors)) > 3
    with_factors = RopeScaling(frequency_factors=tuple(factors))
    expected = rope_table(tiny_config("llama", head_dim=32, rope_scaling=scaling), 512)
    given = rope_table(tiny_config("llama", head_dim=32, rope_scaling=with_factors), 512)
    torch.testing.assert_close(given.cos, expected.cos, atol=1e-4, rtol=0)
    torch.testing.assert_close(given.sin, expected.sin, atol=1e-4, rtol=0)
