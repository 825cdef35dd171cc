"""From the host to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ALIGNED = 16
"""Bytes that tables begin at multiples of."""


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


def upload_together(tables: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Several tables as ``upload`` has it, in one copy: what a copy costs the host is the same for
    few bytes as for many."""
    if device.type != "cuda":
        return [torch.from_numpy(table) for table in tables]
    flat = [np.ascontiguousarray(table) for table in tables]
    places = np.cumsum([0, *(-(-table.nbytes // _ALIGNED) * _ALIGNED for table in flat)]).tolist()
    staged = torch.empty(places[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = staged.numpy()
    for place, table in zip(places, flat, strict=False):
        memory[place : place + table.nbytes] = table.reshape(-1).view(np.uint8)
    there = staged.to(device, non_blocking=True)
    return [
        there[place : place + table.nbytes].view(_DTYPES[table.dtype.name]).view(table.shape)
        for place, table in zip(places, flat, strict=False)
    ]


_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
