"""An engine that several callers share: streams read in turn, calls from several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.request import FinishReason, Request

Result = TypeVar("Result")


class Turns:
    """Lets one thread at a time have the engine. Every step is everybody's: whose turn it is finds
    in ``Request.output`` and ``Request.finished`` what others' steps brought. Who waits for a turn
    gets the next one or, where several wait, one of the next: nobody has two in a row meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._next = threading.Lock()
        """Of whoever waits for the other one, and of nobody longer."""
        self._holder: int | None = None
        self._cancelled: deque[Request] = deque()

    def take(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` when it is this thread's turn. SurefootError if it has one already: a
        proposer or a tokenizer called the engine that called it."""
        me = threading.get_ident()
        if self._holder == me and self._lock.locked():
            raise SurefootError(
                "LLM", "was called in the middle of its own round", "call it from outside"
            )
        mine = False
        try:
            # A lock that is let go of and asked for again at once is got by the same thread again.
            # So whoever had the last turn comes behind the one that waits for it to end.
            with self._next:
                mine = self._lock.acquire()
            self._holder = me
            self.engine.settle()
            self._end_cancelled()
            return work()
        finally:
            if mine:
                try:
                    self._end_cancelled()
                finally:
                    self._holder = None
                    self._lock.release()

    def cancel(self, requests: Iterable[Request]) -> None:
        """End those that have not ended: now, or with the turn that somebody has. (A stream that
        nobody holds any more may be closed anywhere, even in the middle of a step.)"""
        self._cancelled.extend(request for request in requests if not request.finished)
        if self._cancelled and not (self._next.locked() or self._lock.locked()):
            self.take(lambda: None)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            self.engine.finish(self._cancelled[0], FinishReason.ABORT)
            self._cancelled.popleft()
