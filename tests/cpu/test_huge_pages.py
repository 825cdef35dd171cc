"""Where packed weights, keys and values lie."""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from typing import Any

import pytest
import torch

from surefoot.kernels.backend import AttentionShape
from surefoot.kernels.cpu import huge_pages
from surefoot.kernels.cpu.huge_pages import (
    CACHE_LINE,
    CHUNK,
    HUGE_PAGE,
    WeightMemory,
    in_huge_pages,
)
from surefoot.kernels.cpu.kv import allocate


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK", 2 * HUGE_PAGE)


def test_nobody_writes_into_what_another_has() -> None:
    memory, chooser = WeightMemory(), random.Random(1)
    sizes = [1, HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE]
    sizes += [chooser.randint(1, HUGE_PAGE // 3) for _ in range(20)]
    taken = [memory.take(size) for size in sizes]
    for number, each in enumerate(taken):
        each.fill_(number)
    for number, (each, size) in enumerate(zip(taken, sizes, strict=True)):
        assert each.shape == (size,) and each.dtype == torch.uint8
        assert each.data_ptr() % CACHE_LINE == 0
        assert bool((each == number).all())


def test_small_ones_share_pages_and_large_ones_begin_their_own() -> None:
    memory = WeightMemory()
    first, large, second = memory.take(100), memory.take(3 * HUGE_PAGE), memory.take(100)
    assert first.data_ptr() % HUGE_PAGE == large.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 128


def test_what_nobody_has_any_more_is_given_back() -> None:
    memory = WeightMemory()
    first, second = memory.take(HUGE_PAGE), memory.take(HUGE_PAGE // 2)
    chunk = weakref.ref(first.untyped_storage())
    del memory, first
    gc.collect()
    second.fill_(3)
    assert bool((second == 3).all())
    del second
    gc.collect()
    assert chunk() is None


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux asks for huge pages")
def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Memory(mmap.mmap):
        def __new__(cls, *sizes: int, flags: int) -> Memory:
            assert flags & mmap.MAP_PRIVATE, "what is shared is asked for otherwise"
            return super().__new__(cls, *sizes, flags=flags)

        def madvise(self, option: int, *where: int) -> None:
            asked.append((option, len(self)))

    monkeypatch.setattr(mmap, "mmap", Memory)
    WeightMemory().take(3 * HUGE_PAGE + 1)
    allocate(1, 2, 16, AttentionShape(2, 1, 16, 0.25), torch.float32)
    assert asked == [(mmap.MADV_HUGEPAGE, pages * HUGE_PAGE) for pages in (5, 2)]


def test_a_system_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *arguments: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refused)
    assert not in_huge_pages(100).any()
    WeightMemory().take(100).fill_(1)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not in_huge_pages(100).any()
    WeightMemory().take(100).fill_(1)


def test_a_chunk_is_whole_huge_pages() -> None:
    assert CHUNK % HUGE_PAGE == 0
