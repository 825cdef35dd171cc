"""Compiles grammars beside the rounds: a request waits for its own, and nobody else does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from surefoot.errors import SurefootError
from surefoot.sampling.grammar import CACHED_GRAMMARS, Grammars
from surefoot.server.messages import Add
from surefoot.structured import StructuredOutputsParams

SHORT_GRAMMAR = 4096
"""Characters. Within the library's limits such a grammar compiles in tenths of a second at most."""


class Checks(Protocol):
    """``sampling.trial.Trial``."""

    def check(self, wanted: StructuredOutputsParams) -> None:
        """Raises SurefootError for a grammar that takes too long."""
        ...


class Compiler:
    """Two threads that compile, one of them the long grammars only, once ``trial`` has shown that
    they take not too long; the others' methods are for the thread of the rounds. ``wake`` is called
    from a compiling thread when a message has become ready."""

    def __init__(
        self, grammars: Grammars | None, trial: Checks | None, wake: Callable[[], None]
    ) -> None:
        self._grammars = grammars
        self._trial = trial
        self._wake = wake
        self._short = ThreadPoolExecutor(1, "grammar")
        self._long = ThreadPoolExecutor(1, "long-grammar")
        self._refused: OrderedDict[StructuredOutputsParams, SurefootError] = OrderedDict()
        """Long ones, the latest."""
        self._pending: set[str] = set()
        """First ids of the messages that wait."""
        self._ready: deque[tuple[Add, SurefootError | None]] = deque()

    def defer(self, message: Add) -> bool:
        """Whether the message has to wait for its grammar; ``ready`` returns it then."""
        wanted = message.params.structured_outputs
        grammars = self._grammars
        if wanted is None or grammars is None or grammars.knows(wanted):
            return False
        self._pending.add(message.ids[0])
        long = wanted.characters > SHORT_GRAMMAR

        def compile_it() -> None:
            error = None
            try:
                if message.ids[0] in self._pending and not grammars.knows(wanted):
                    if long:
                        self._try(wanted)
                    grammars.start(wanted)
            except SurefootError as caught:
                error = caught
            except Exception as caught:
                error = SurefootError(wanted.option, f"cannot be compiled: {caught}")
            self._ready.append((message, error))
            self._wake()

        (self._long if long else self._short).submit(compile_it)
        return True

    def _try(self, wanted: StructuredOutputsParams) -> None:
        if wanted in self._refused:
            raise self._refused[wanted]
        try:
            if self._trial is not None:
                self._trial.check(wanted)
        except SurefootError as error:
            self._refused[wanted] = error
            if len(self._refused) > CACHED_GRAMMARS:
                self._refused.popitem(last=False)
            raise

    def drop(self, ids: Iterable[str]) -> None:
        """Forget the messages that have one of these ids first: their client left."""
        self._pending.difference_update(ids)

    def ready(self) -> list[tuple[Add, SurefootError | None]]:
        """The messages whose grammar has been compiled since the last call, or the error."""
        found = []
        while self._ready:
            message, error = self._ready.popleft()
            if message.ids[0] in self._pending:
                self._pending.discard(message.ids[0])
                found.append((message, error))
        return found
