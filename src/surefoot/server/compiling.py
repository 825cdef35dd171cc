"""Compiles grammars beside the rounds: a request waits for its own, and nobody else does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from surefoot.errors import SurefootError
from surefoot.sampling.grammar import Grammars
from surefoot.server.messages import Add


class Compiler:
    """One thread that compiles; the others' methods are for the thread of the rounds. ``wake`` is
    called from the compiling thread when a message has become ready."""

    def __init__(self, grammars: Grammars | None, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._pool: ThreadPoolExecutor | None = None
        self._pending: set[str] = set()
        """First ids of the messages that wait."""
        self._ready: deque[tuple[Add, SurefootError | None]] = deque()

    def defer(self, message: Add) -> bool:
        """Whether the message has to wait for its grammar; ``ready`` returns it then."""
        wanted = message.params.structured_outputs
        grammars = self._grammars
        if wanted is None or grammars is None or grammars.knows(wanted):
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammar")
        self._pending.add(message.ids[0])

        def compile_it() -> None:
            error = None
            try:
                if message.ids[0] in self._pending:
                    grammars.start(wanted)
            except SurefootError as caught:
                error = caught
            except Exception as caught:
                error = SurefootError(wanted.option, f"cannot be compiled: {caught}")
            self._ready.append((message, error))
            self._wake()

        self._pool.submit(compile_it)
        return True

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
