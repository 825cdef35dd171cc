"""Random weights for measurements of speed: a drafter that does all the work without a download,
and whose drafts are noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch

NAME = "dummy"
"""Takes the place of a checkpoint's path."""
DRAFT_VOCABULARY = 32000
"""Tokens that public drafters with a vocabulary of their own know."""


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Matrices of small numbers, and norms near 1; the same each time."""
    generator = torch.Generator(device).manual_seed(3)
    tensors = {}
    for name, shape in shapes.items():
        spread = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        tensors[name] = 1 + 0.1 * spread if len(shape) == 1 else 0.02 * spread
    return tensors


def dummy_target_ids(vocab: int) -> torch.Tensor:
    """A draft vocabulary of the usual size, or all ``vocab`` tokens if there are fewer."""
    size = min(DRAFT_VOCABULARY, vocab)
    return torch.arange(size) * (vocab // size)
