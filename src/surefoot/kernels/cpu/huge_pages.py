"""Memory for packed weights, and for keys and values, in huge pages where the system grants them.

A round reads all weights once, and keys from all over their pool. In pages of 4 KB, a tenth of its
time goes to finding out where they lie (docs/log.md).
"""

from __future__ import annotations

import contextlib
import mmap

import torch

CHUNK = 32 << 20
"""Bytes that are had at once: most matrices of a small model are smaller than a huge page."""
HUGE_PAGE = 2 << 20
CACHE_LINE = 64


class WeightMemory:
    """Hands out memory that holds weights from then on."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """Zeros, uint8 [size], on a cache line. Their chunk is given back with the last of its
        parts."""
        if size > CHUNK // 2:
            return in_huge_pages(size)
        if self._used + size > len(self._chunk):
            self._chunk, self._used = in_huge_pages(CHUNK), 0
        taken = self._chunk[self._used : self._used + size]
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return taken


def in_huge_pages(size: int) -> torch.Tensor:
    """Zeros, uint8 [size], from the beginning of a page on. A page takes memory when something is
    written into it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE, flags=flags)
    # A kernel that was built without them refuses.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + size]
