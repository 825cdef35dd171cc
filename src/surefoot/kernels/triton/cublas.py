"""Where cuBLAS may compute a product: where it gives our kernels' bits, and sooner.

cuBLAS chooses a kernel by shapes, dtypes and alignments. Some of its kernels add up an output's
inputs in order, as ours do with one share; some cut them up. Which one it takes is seen on random
numbers, on which two orders of adding never agree in every element, once for every shape of a
weight and number of rows that recorded rounds have. What was not compared, our kernels compute.
Settings of ``torch.backends.cuda`` that change its choice must be made before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Key = tuple[int, int, bool, bool, int]
"""(weight's rows, inputs, with a bias, gated, shares asked for) of a product."""
Run = Callable[[], object]
ALIGNMENT = 256
"""Bytes. Tensors of their own lie so, and what is chosen for those is not used for others."""
LAUNCHES = 4
SLEEP = 2_000_000
"""Cycles that a device waits while launches that are timed pile up: a millisecond."""
LONG, SUSTAINED = 100e-6, 10e-3
"""Seconds: of a run that takes so long, what counts is its time when the chip has worked for a
while, at its power limit. There its clock falls by a fifth, and more for kernels that read more."""


class CublasChoices:
    """The numbers of rows for which cuBLAS computes a product, by its ``Key``; none at first."""

    def __init__(self) -> None:
        self.rows: dict[Key, set[int]] = {}

    def takes(self, key: Key, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return (
            x.shape[0] in self.rows.get(key, ())
            and x.data_ptr() % ALIGNMENT == 0
            and weight.data_ptr() % ALIGNMENT == 0
        )

    def find(
        self,
        linears: Sequence[Any],
        counts: Sequence[int],
        gated: bool = False,
        split_k: int = 0,
        seconds: Callable[[Sequence[Run]], float] | None = None,
    ) -> None:
        """Compare and time products of ``counts`` rows with ``linears`` (``TritonLinear`` of one
        shape, so many as a cache does not hold), unless that has been done. ``gated`` and
        ``split_k`` as ``TritonLinear.product``'s; ``seconds`` times a sequence of launches."""
        key, weight = linears[0].key(gated, split_k), linears[0].weight
        if key in self.rows:
            return
        self.rows[key] = set()
        seconds = seconds or device_seconds
        for rows in counts:
            x = torch.randn((rows, weight.shape[1]), device=weight.device).to(weight.dtype)
            if not torch.equal(
                linears[0].by_cublas(x, gated), linears[0].by_our_own(x, gated, split_k)
            ):
                continue
            runs = [linears[index % len(linears)] for index in range(LAUNCHES)]
            cublas = seconds([lambda each=each, x=x: each.by_cublas(x, gated) for each in runs])
            ours = seconds(
                [lambda each=each, x=x: each.by_our_own(x, gated, split_k) for each in runs]
            )
            if cublas < ours:
                self.rows[key].add(rows)


def device_seconds(runs: Sequence[Run]) -> float:
    """What ``runs`` take on the device, one after the other without a pause."""
    torch.cuda._sleep(SLEEP)
    seconds = _timed(runs)
    if seconds < LONG * len(runs):
        return seconds
    repeats = math.ceil(SUSTAINED / seconds)
    for run in repeats * tuple(runs):
        run()
    return _timed(repeats * tuple(runs)) / repeats


def _timed(runs: Sequence[Run]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for run in runs:
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000
