"""What a router knows of replicas: how many requests each has under way, and since when it
exists."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ARRIVAL_SECONDS = 0.05
"""After which a request that was sent to a replica is among those that it counts."""

NEW_SECONDS = 2.0
"""After which HAProxy knows a replica: what is for it before that goes through Ray's own proxy."""

Replica = TypeVar("Replica", bound=Hashable)


@dataclass
class _Load:
    told: int = 0
    """Requests under way when the replica was asked last."""
    sent: deque[float] = field(default_factory=deque)
    """Times of requests that it may not have counted then."""


class Loads(Generic[Replica]):
    """What replicas said last, and what they were sent since. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[Replica, _Load] = {}

    def of(self, replica: Replica) -> int:
        load = self._loads.get(replica)
        return 0 if load is None else load.told + len(load.sent)

    def send(self, replica: Replica) -> None:
        """A request goes to a replica."""
        self._loads.setdefault(replica, _Load()).sent.append(self._clock())

    def tell(self, replica: Replica, requests: int, asked: float) -> None:
        """A replica said how many requests it has; it was asked at ``asked``."""
        load = self._loads.setdefault(replica, _Load())
        load.told = requests
        while load.sent and load.sent[0] < asked - ARRIVAL_SECONDS:
            load.sent.popleft()

    def keep_only(self, replicas: Sequence[Replica]) -> None:
        """Forget the other replicas."""
        self._loads = {name: self._loads[name] for name in replicas if name in self._loads}


class Ages(Generic[Replica]):
    """Since when there are replicas. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Replica, float] = {}

    def keep_only(self, replicas: Sequence[Replica]) -> None:
        """These are there now; the others are not any more."""
        now = self._clock()
        self._since = {name: self._since.get(name, now) for name in replicas}

    def without_new(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Those of ``replicas`` that are not new; all, if all of them are."""
        latest = self._clock() - NEW_SECONDS
        old = [name for name in replicas if self._since.get(name, latest + 1) <= latest]
        return old or list(replicas)
