"""What the sampling kernels need to know of requests, as protocols: ``sampling.params`` has the
classes."""

from __future__ import annotations

from typing import Protocol

import torch


class SamplingTables(Protocol):
    """Parameters by slot: [slots], or [slots, n] padded with -1, on the device, contiguous."""

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    prompt_length: torch.Tensor
    min_length: torch.Tensor
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias: torch.Tensor


class Stages(Protocol):
    """Which stages some row needs; known on the host."""

    @property
    def noise(self) -> bool: ...
    @property
    def penalties(self) -> bool: ...
    @property
    def bias(self) -> bool: ...
    @property
    def min_tokens(self) -> bool: ...
    @property
    def min_p(self) -> bool: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> bool: ...
