"""What recorded rounds take where the host is slower than the device.

A small model's round of hundreds of requests takes the device less time than the host needs to read
it, and reading is slower where drafts were verified. By the device's time alone those drafts would
look nearly free.
"""

from __future__ import annotations

import time
from collections import deque

import torch

RECENT = 7
"""Periods that count; a garbage collection among them does not."""
FEWEST = 3
"""Periods before anything is said of a kind of round."""
FORGET_EVERY = 64
"""Plain rounds after which one period with drafts is forgotten: one day they are tried again."""


class HostTime:
    """Told of every launch and landing. Kinds of rounds: (spans, whether drafts are verified)."""

    def __init__(self) -> None:
        self._periods: dict[tuple[int, bool], deque[float]] = {}
        self._read: tuple[int, bool] | None = None
        self._launched: float | None = None
        self._plain_rounds = 0

    def landed(self, spans: int, verified: bool) -> None:
        """Such a round was read."""
        self._read = spans, verified

    def launching(self, idle: bool) -> None:
        """The next round is about to be launched; ``idle``: the device has finished all others."""
        now = time.perf_counter()
        before, kind = self._launched, self._read
        self._launched, self._read = now, None
        if before is None or kind is None:
            return
        # While the device has work, the host costs nothing.
        periods = self._periods.setdefault(kind, deque(maxlen=RECENT))
        periods.append(now - before if idle else 0.0)
        spans, verified = kind
        self._plain_rounds = 0 if verified else self._plain_rounds + 1
        if self._plain_rounds % FORGET_EVERY == FORGET_EVERY - 1:
            drafting = self._periods.get((spans, True))
            if drafting:
                drafting.popleft()

    def pause(self) -> None:
        """The host does something else before the next launch."""
        self._launched = self._read = None

    def seconds(self, spans: int, verified: bool) -> float:
        """The host's period of such rounds, 0 where the device's is longer or nothing is known."""
        periods = self._periods.get((spans, verified), ())
        return sorted(periods)[len(periods) // 2] if len(periods) >= FEWEST else 0.0

    def table(self, spans: int, table: torch.Tensor) -> torch.Tensor:
        """``table`` float32 [n + 1], the device's seconds of a round with 0 .. n drafts, nowhere
        less than the host's. Drafts of which nothing is known cost it nothing more."""
        plain = self.seconds(spans, False)
        drafting = max(plain, self.seconds(spans, True))
        if not drafting:
            return table
        slow = table.clamp(min=drafting)
        slow[0] = max(float(table[0]), plain)
        return slow
