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
"""Rounds of a kind that count; a garbage collection among them does not."""
FEWEST = 3
"""Rounds before anything is said of a kind."""
FORGET_EVERY = 64
"""Plain rounds after which one with drafts is forgotten: one day they are tried again."""


class HostTime:
    """Told of every launch and landing. Kinds of rounds: (spans, whether drafts are verified)."""

    def __init__(self) -> None:
        self._busy: dict[tuple[int, bool], deque[float]] = {}
        self._read: tuple[tuple[int, bool], float] | None = None
        self._launched: float | None = None
        self._plain_rounds = 0

    def landed(self, spans: int, verified: bool, waited: float) -> None:
        """Such a round is there, after so many seconds of waiting; now it will be read."""
        self._read = (spans, verified), waited

    def launching(self) -> None:
        """The next round is about to be launched. Since the launch before it the host has read one
        round, and done whatever its callers do between rounds."""
        now = time.perf_counter()
        before, read = self._launched, self._read
        self._launched, self._read = now, None
        if before is None or read is None:
            return
        (spans, verified), waited = read
        recent = self._busy.setdefault((spans, verified), deque(maxlen=RECENT))
        recent.append(now - before - waited)
        self._plain_rounds = 0 if verified else self._plain_rounds + 1
        if self._plain_rounds % FORGET_EVERY == FORGET_EVERY - 1:
            drafting = self._busy.get((spans, True))
            if drafting:
                drafting.popleft()

    def pause(self) -> None:
        """The host does something else before the next launch."""
        self._launched = self._read = None

    def seconds(self, spans: int, verified: bool) -> float:
        """What the host is busy with such a round for; 0 where too little is known."""
        recent = self._busy.get((spans, verified), ())
        return sorted(recent)[len(recent) // 2] if len(recent) >= FEWEST else 0.0

    def table(self, spans: int, table: torch.Tensor) -> torch.Tensor:
        """``table`` float32 [n + 1], the device's seconds of a round with 0 .. n drafts, nowhere
        less than the host's. Drafts of which nothing is known cost it nothing more."""
        plain = self.seconds(spans, False)
        drafting = max(plain, self.seconds(spans, True))
        # It never falls: where the device is slower throughout there is nothing to do.
        least = float(table[0])
        if drafting <= least:
            return table
        slow = table.clamp(min=drafting)
        slow[0] = max(least, plain)
        return slow
