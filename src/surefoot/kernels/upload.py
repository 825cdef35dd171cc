"""From the host to a device without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

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


class Write(NamedTuple):
    """``values``, int64, int32 or float32 like ``target``, go to ``places``, int64, of ``target``,
    which is contiguous and counted through from its first element."""

    target: torch.Tensor
    places: np.ndarray
    values: np.ndarray


class Mirrored:
    """A table int64 on a device, which the host writes as a whole again and again, without waiting:
    by one copy, where ``Uploads`` need a kernel besides."""

    COPIES = 16
    """A GPU may be so many behind, less one."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.there = torch.zeros(shape, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._staged = [
            torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
            for _ in range(self.COPIES)
        ]
        self._tables = [staged.numpy() for staged in self._staged]
        self._turn = 0

    def write(self) -> np.ndarray:
        """A table of zeros, to be filled in and sent."""
        self._turn = (self._turn + 1) % self.COPIES
        table = self._tables[self._turn]
        table.fill(0)
        return table

    def send(self) -> None:
        """Have the device copy it when it has done what it was told to do before."""
        self.there.copy_(self._staged[self._turn], non_blocking=True)


class Uploads:
    """What is written on a device, gathered on the host: all of it goes there in one copy, which
    costs the host the same for few bytes as for many, and is put in its places by one kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._writes: list[Write] = []
        self._tables: dict[int, np.ndarray] = {}
        """By identity."""
        self._uses: list[tuple[Callable[..., object], list[int]]] = []

    @property
    def waiting(self) -> bool:
        """Whether anything is yet to be sent."""
        return bool(self._uses or self._writes)

    def write(self, target: torch.Tensor, places: np.ndarray, values: np.ndarray) -> None:
        """What a ``Write`` says, of which no place may occur twice; of what several have for one
        place, the last one's stays. TypeError for other numbers than a ``Write`` may have;
        ValueError where there are not as many of them as of places."""
        if target.dtype != _WRITTEN.get(values.dtype):
            raise TypeError(f"{values.dtype} cannot be written to {target.dtype}")
        if places.size != values.size:
            raise ValueError(f"{values.size} values for {places.size} places")
        self._writes.append(Write(target, places.reshape(-1), values.reshape(-1)))

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
        if self.device.type == "cuda":
            there = _send(writes, list(tables.values()), self.device)
        else:
            there = [torch.from_numpy(table) for table in tables.values()]
            for target, places, values in writes:
                found = torch.from_numpy(places), torch.from_numpy(values)
                target.view(-1).index_copy_(0, *found)
        by_identity = dict(zip(tables, there, strict=True))
        for use, wanted in uses:
            use(*(by_identity[table] for table in wanted))


@contextmanager
def sending(device: torch.device) -> Iterator[Uploads]:
    """What is added meanwhile is sent at the end."""
    uploads = Uploads(device)
    yield uploads
    uploads.send()


def places_of(index: np.ndarray, shape: Sequence[int], dim: int) -> np.ndarray:
    """int64 [m, n, k]: where in a table of ``shape``, counted through from its first element, those
    are that stand at ``index`` int64 [n] in dimension ``dim``; m for all before it, k behind it."""
    around, step = _around(tuple(shape), dim)
    return around + (index * step)[:, np.newaxis]


@lru_cache(maxsize=256)
def _around(shape: tuple[int, ...], dim: int) -> tuple[np.ndarray, int]:
    """``places_of`` index 0, int64 [m, 1, k], and how far the next index is."""
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    step = np.arange(outer)[:, np.newaxis] * (shape[dim] * inner)
    return (step + np.arange(inner))[:, np.newaxis], inner


def addressed(writes: Sequence[Write]) -> tuple[np.ndarray, np.ndarray]:
    """(Addresses int64 [n], values [n]) of writes to targets whose elements are alike wide, each
    address once; the values of narrow ones as int32."""
    if not writes:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    size = writes[0].target.element_size()
    begins = [write.target.data_ptr() for write in writes]
    addresses = np.concatenate([write.places for write in writes]) * size
    addresses += np.repeat(begins, [write.places.size for write in writes])
    kind = np.int64 if size == 8 else np.int32
    values = np.concatenate([write.values.view(kind) for write in writes])
    if len(set(begins)) < len(begins):
        # Nobody knows which of two threads writes last.
        addresses, first = np.unique(addresses[::-1], return_index=True)
        values = values[::-1][first]
    return addresses, values


def _send(
    writes: Sequence[Write], tables: Sequence[np.ndarray], device: torch.device
) -> list[torch.Tensor]:
    """``Uploads.send`` on a GPU: returns the tables there."""
    from surefoot.kernels.triton.writes import write_all

    wide = addressed([write for write in writes if write.target.element_size() == 8])
    narrow = addressed([write for write in writes if write.target.element_size() == 4])
    parts = [*wide, *narrow, np.zeros(narrow[1].size % 2, np.int32)]
    # Those with the widest elements first, so that all are aligned.
    order = sorted(range(len(tables)), key=lambda place: -tables[place].itemsize)
    begin = sum(part.nbytes for part in parts)
    flat = [part.reshape(-1).view(np.uint8) for part in (*parts, *(tables[at] for at in order))]
    staged = torch.empty(sum(map(len, flat)), dtype=torch.uint8, device="cpu", pin_memory=True)
    np.concatenate(flat, out=staged.numpy())
    there = staged.to(device, non_blocking=True)
    if writes:
        write_all(there, wide[0].size, narrow[0].size)
    found: dict[int, torch.Tensor] = {}
    for at in order:
        table = tables[at]
        end = begin + table.nbytes
        found[at] = there[begin:end].view(_DTYPES[table.dtype]).view(table.shape)
        begin = end
    return [found[at] for at in range(len(tables))]


# By the types themselves: numpy takes microseconds to tell a type's name.
_WRITTEN = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_DTYPES = {np.dtype(np.bool_): torch.bool, **_WRITTEN}
