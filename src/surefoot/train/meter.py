"""What training steps report, how fast they are, and how much of a GPU's arithmetic they use."""

from __future__ import annotations

import functools
import time

import torch

_SIZE, _REPEATS = 8192, 10
"""Of the product that tells what a GPU can do."""


class Work:
    """Adds up the multiplications and additions of products, forwards and backwards. Attention,
    norms and the losses themselves are left out: shares made of it are a little too low."""

    def __init__(self) -> None:
        self.operations = 0

    def product(self, rows: int, numbers: int, inputs: bool = False, weight: bool = False) -> None:
        """Of so many rows with a matrix of so many ``numbers``; where gradients of its ``inputs``
        or its ``weight`` are needed, one more for each."""
        self.operations += 2 * rows * numbers * (1 + inputs + weight)


@functools.cache
def most_operations(device: torch.device) -> float | None:
    """Operations a second of a large product in bfloat16, measured; None on a CPU."""
    if device.type != "cuda":
        return None
    x = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(x, x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return 2 * _SIZE**3 / min(times)


class Meter:
    """Adds up on the device what steps report, and takes the time."""

    def __init__(self, device: torch.device, works: tuple[Work, ...], tokens: int) -> None:
        self.totals = torch.zeros(3, device=device)
        """Loss, rows judged, rows that agreed with the target."""
        self.steps = 0
        self.device, self.works = device, works
        self.start(tokens)

    @property
    def _operations(self) -> int:
        return sum(work.operations for work in self.works)

    def start(self, tokens: int) -> None:
        """Speeds are from now on; so many ``tokens`` were seen before."""
        self.tokens, self.operations, self.time = tokens, self._operations, time.monotonic()

    def speeds(self, tokens: int) -> dict[str, float | None]:
        """Since the start: tokens a second, 10^12 operations a second, and what part of a large
        product's these are (None on a CPU); and GB of the GPU's memory in use at most."""
        seconds = max(time.monotonic() - self.time, 1e-9)
        rate, most = (self._operations - self.operations) / seconds, most_operations(self.device)
        memory = None
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device) / 1e9
        return {
            "tokens_per_s": (tokens - self.tokens) / seconds,
            "tflops": rate / 1e12,
            "share_of_arithmetic": None if most is None else rate / most,
            "peak_gb": memory,
        }

    def read(self) -> tuple[float, float]:
        """Mean loss of a step and share of the rows that agreed; waits for the device."""
        loss, rows, agreed = self.totals.tolist()
        found = loss / max(1, self.steps), agreed / max(1.0, rows)
        self.totals.zero_()
        self.steps = 0
        return found
