"""Random weights for measurements of speed: any shape without a download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from surefoot.models.config import ModelConfig
from surefoot.models.decoder import expected_shapes


class DummyWeights(Mapping[str, torch.Tensor]):
    """Every tensor of a config, made when asked for, the same each time. Texts are noise."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes = expected_shapes(config)
        self.device = device
        self.dtype = dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        generator = torch.Generator(self.device).manual_seed(list(self.shapes).index(name))
        spread = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        if name.endswith("norm.weight"):
            return (1 + 0.1 * spread).to(self.dtype)
        return (0.02 * spread).to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
