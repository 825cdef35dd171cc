"""From the host to a device without waiting for it."""

from __future__ import annotations

import math
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
    costs the host the same for few bytes as for many, and is put in its places by one kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._writes: list[tuple[torch.Tensor, np.ndarray, np.ndarray]] = []
        self._tables: dict[int, np.ndarray] = {}
        """By identity."""
        self._uses: list[tuple[Callable[..., object], list[int]]] = []

    @property
    def waiting(self) -> bool:
        """Whether anything is yet to be sent."""
        return bool(self._uses or self._writes)

    def write(self, target: torch.Tensor, places: np.ndarray, values: np.ndarray) -> None:
        """``values``, int64, int32 or float32 like ``target``, are to be at ``places``, int64, of
        ``target``, which is contiguous and counted through from its first element. No place may
        occur twice; of what several calls have for one place, the last one's stays."""
        self._writes.append((target, places.reshape(-1), values.reshape(-1)))

    def clear(self, target: torch.Tensor, index: np.ndarray, dim: int) -> None:
        """What stands at ``index`` int64 [n] in dimension ``dim`` of such a target is to be 0."""
        places = places_of(index, target.shape, dim)
        kind = np.int64 if target.dtype == torch.int64 else np.float32
        self.write(target, places, np.zeros(places.size, dtype=kind))

    def add(self, use: Callable[..., object], *tables: np.ndarray) -> None:
        """``use`` is to be called with these tables on the device, when all is written. Who hands
        over one and the same again gets the one that is there."""
        self._uses.append((use, [id(table) for table in tables]))
        self._tables.update((id(table), table) for table in tables)

    def send(self) -> None:
        """Copy everything, write what is to be written, and call who uses the rest in the order of
        ``add``."""
        if not self.waiting:
            return
        writes, uses, tables = self._writes, self._uses, self._tables
        self._writes, self._uses, self._tables = [], [], {}
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            flat = _addressed(writes)
        else:
            flat = [table for _, places, values in writes for table in (places, values)]
        there = upload_together([*flat, *tables.values()], self.device)
        if on_gpu:
            from surefoot.kernels.triton.writes import write_all

            write_all(*there[: len(flat)])
        else:
            pairs = zip(there[: len(flat) : 2], there[1 : len(flat) : 2], strict=True)
            for (target, _, _), (places, values) in zip(writes, pairs, strict=True):
                target.view(-1).index_copy_(0, places, values)
        found = dict(zip(tables, there[len(flat) :], strict=True))
        for use, wanted in uses:
            use(*(found[table] for table in wanted))


def places_of(index: np.ndarray, shape: Sequence[int], dim: int) -> np.ndarray:
    """int64 [m, n, k]: where in a table of ``shape``, counted through from its first element, those
    are that stand at ``index`` int64 [n] in dimension ``dim``; m for all before it, k behind it."""
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    first = np.arange(outer)[:, np.newaxis] * (shape[dim] * inner) + index * inner
    return first[:, :, np.newaxis] + np.arange(inner)


def _addressed(
    writes: Sequence[tuple[torch.Tensor, np.ndarray, np.ndarray]],
) -> list[np.ndarray]:
    """As ``write_all`` takes it: (addresses int64, values) of int64, and of what is half as wide,
    as int32."""
    targets: dict[int, list[tuple[torch.Tensor, np.ndarray, np.ndarray]]] = {}
    for write in writes:
        targets.setdefault(write[0].data_ptr(), []).append(write)
    found: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {8: ([], []), 4: ([], [])}
    for begin, own in targets.items():
        target, places, values = own[0]
        if len(own) > 1:
            # Nobody knows which of two threads writes last.
            places = np.concatenate([places for _, places, _ in reversed(own)])
            values = np.concatenate([values for _, _, values in reversed(own)])
            places, first = np.unique(places, return_index=True)
            values = values[first]
        size = target.element_size()
        addresses, all_values = found[size]
        addresses.append(begin + size * places)
        all_values.append(values if size == 8 else values.view(np.int32))
    return [
        np.concatenate(part) if part else np.empty(0, dtype)
        for size, dtype in ((8, np.int64), (4, np.int32))
        for part, dtype in zip(found[size], (np.int64, dtype), strict=True)
    ]


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
