"""Trainable parameters under the names of a checkpoint, and the products and norms made of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from surefoot.train.meter import Work

_SPREAD = 0.02


class Parameters(nn.Module):
    """Parameters are float32; products are computed in ``compute``."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        compute: torch.dtype,
        eps: float,
        device: torch.device,
        seed: int,
    ) -> None:
        """Norms begin at 1, biases at 0, everything else normally distributed around 0."""
        super().__init__()
        self.compute, self.eps = compute, eps
        self.work = Work()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            if name.endswith("norm.weight") or "_norm." in name:
                value = torch.ones(shape)
            elif len(shape) == 1:
                value = torch.zeros(shape)
            else:
                value = _SPREAD * torch.randn(shape, generator=generator)
            self.add(name, value.to(device))

    def add(self, name: str, value: torch.Tensor, trained: bool = True) -> None:
        # Torch allows no dots in a parameter's name.
        self.register_parameter(name.replace(".", "/"), nn.Parameter(value, trained))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by their names in a checkpoint, detached."""
        found = self.named_parameters()
        return {name.replace("/", "."): value.detach() for name, value in found}

    def weight(self, name: str) -> torch.Tensor:
        return getattr(self, name.replace(".", "/"))

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # Cast at every use, so that the gradients of several uses add up in float32.
        bias = getattr(self, f"{name}.bias".replace(".", "/"), None)
        own = self.weight(f"{name}.weight")
        learns = torch.is_grad_enabled()
        rows = x.shape[:-1].numel()
        self.work.product(
            rows, own.numel(), learns and x.requires_grad, learns and own.requires_grad
        )
        weight = own.to(self.compute)
        return linear(x, weight, None if bias is None else bias.to(self.compute))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # Torch's own has one kernel for each direction.
        weight = self.weight(f"{name}.weight")
        return rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
