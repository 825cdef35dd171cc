"""What one rendering of a chat template may make: sizes of values, of all together, and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

MOST_CHARACTERS = 1 << 24
"""Of a prompt and of any value while it is made; more than the longest contexts take."""
MOST_MADE = 1 << 27
"""Characters and entries of containers made by one rendering."""
MOST_SECONDS = 2.0
"""Of the thread's CPU time, which does not pass while others run."""
MOST_PIECES = 1 << 17
"""Into which a text may be taken apart, and characters of one that is worked on word by word: done
at one go, during which no other thread runs."""
MOST_WIDTH = 100_000
"""Of numbers that say how wide or how many, as Jinja's sandbox limits ``range``."""
MOST_BITS = 10_000
ENTRY = 8
"""Characters that an entry of a container counts as, beside its own."""


class LimitReached(Exception):
    """What a template did too much of."""


class Work:
    """What one rendering has made so far."""

    def __init__(self) -> None:
        self.printed = self.made = 0
        self.end = time.thread_time() + MOST_SECONDS
        # Values are kept, so that no other one gets their id.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def tick(self) -> None:
        if time.thread_time() > self.end:
            raise LimitReached(f"it takes more than {MOST_SECONDS:g} s")

    def made_text(self, size: int) -> None:
        """About to make, or just made, a text of ``size`` characters."""
        if size > MOST_CHARACTERS:
            raise LimitReached(f"it makes a text of more than {MOST_CHARACTERS} characters")
        self.made += size
        if self.made > MOST_MADE:
            raise LimitReached("it makes too many texts")

    def taking_apart(self, pieces: int) -> None:
        """About to make so many pieces of a text, at one go."""
        if pieces > MOST_PIECES:
            raise LimitReached(f"it takes a text apart into more than {MOST_PIECES} pieces")

    def size(self, value: Any) -> int:
        """Characters of ``value`` when printed, about. Containers are looked through once."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3 + 1
        if not isinstance(value, (list, tuple, dict)):
            return ENTRY
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        items: Iterable[Any] = value
        if isinstance(value, dict):
            items = (*value.keys(), *value.values())
        size = sum(ENTRY + self.size(item) for item in items)
        self._sizes[id(value)] = value, size
        self.made_text(ENTRY * len(value))
        if size > MOST_CHARACTERS:
            raise LimitReached(f"it makes a value of more than {MOST_CHARACTERS} characters")
        return size

    def printing(self, value: Any) -> None:
        self.tick()
        self.printed += self.size(value)
        if self.printed > MOST_CHARACTERS:
            raise LimitReached(f"it prints more than {MOST_CHARACTERS} characters")


class _Running(threading.local):
    work: Work


running = _Running()
"""``running.work`` is that of the rendering in this thread."""


def bounded(items: Iterable[Any]) -> Iterator[Any]:
    """``items``, as long as the clock and their sizes together allow."""
    work, size = running.work, 0
    for item in items:
        work.tick()
        size += ENTRY + work.size(item)
        if size > MOST_CHARACTERS:
            raise LimitReached(f"it makes a value of more than {MOST_CHARACTERS} characters")
        yield item
