"""From the host to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
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


class Uploads:
    """What is written on a device, gathered on the host: all of it goes there in one copy, which
    costs the host the same for few bytes as for many."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[int, np.ndarray] = {}
        """By identity."""
        self._uses: list[tuple[Callable[..., object], list[int]]] = []

    @property
    def waiting(self) -> bool:
        """Whether anything is yet to be sent."""
        return bool(self._uses)

    def add(self, use: Callable[..., object], *tables: np.ndarray) -> None:
        """``use`` is to be called with these tables on the device. Who hands over one and the same
        again gets the one that is there."""
        self._uses.append((use, [id(table) for table in tables]))
        self._tables.update((id(table), table) for table in tables)

    def send(self) -> None:
        """Copy everything, and call who uses it in the order of ``add``."""
        if not self._uses:
            return
        uses, tables = self._uses, self._tables
        self._uses, self._tables = [], {}
        there = upload_together(list(tables.values()), self.device)
        found = dict(zip(tables, there, strict=True))
        for use, wanted in uses:
            use(*(found[table] for table in wanted))


@contextmanager
def sending(device: torch.device) -> Iterator[Uploads]:
    """What is added meanwhile is sent at the end."""
    uploads = Uploads(device)
    yield uploads
    uploads.send()


def upload_together(tables: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Several tables as ``upload`` has it, in one copy."""
    if device.type != "cuda" or not tables:
        return [torch.from_numpy(table) for table in tables]
    # The widest elements first, so that all are aligned; one view for each type, not each table.
    kinds: dict[np.dtype, list[int]] = {}
    for place, table in enumerate(tables):
        kinds.setdefault(table.dtype, []).append(place)
    order = sorted(kinds.items(), key=lambda kind: -kind[0].itemsize)
    flat = [tables[place].reshape(-1) for _, places in order for place in places]
    staged = torch.empty(
        sum(table.nbytes for table in flat), dtype=torch.uint8, device="cpu", pin_memory=True
    )
    np.concatenate([table.view(np.uint8) for table in flat], out=staged.numpy())
    there, begin = staged.to(device, non_blocking=True), 0
    found: dict[int, torch.Tensor] = {}
    for dtype, places in order:
        sizes = [tables[place].size for place in places]
        end = begin + sum(sizes) * dtype.itemsize
        parts = there[begin:end].view(_DTYPES[dtype.name]).split(sizes)
        begin = end
        for place, part in zip(places, parts, strict=True):
            table = tables[place]
            found[place] = part if table.ndim == 1 else part.view(table.shape)
    return [found[place] for place in range(len(tables))]


_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
