"""From the host to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def upload(
    values: torch.Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``values`` as a tensor on ``device``. A GPU gets them in the order of what it was told to do,
    and the host goes on: an ordinary copy would wait until all of that is done."""
    table = (
        values
        if isinstance(values, torch.Tensor)
        else torch.tensor(values, dtype=dtype, device="cpu")
    )
    if device.type != "cuda" or table.is_cuda:
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
