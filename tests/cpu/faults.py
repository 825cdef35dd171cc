"""A fault at the n-th call: whichever function of the engine that is, it raises instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import surefoot

ROOT = str(Path(surefoot.__file__).parent)
HOST = tuple(str(Path(ROOT, name)) for name in ("engine", "kv", "request.py"))
"""Where what an engine knows of its requests is kept."""


class Calls:
    """While it is entered, counts the calls of surefoot's functions. With ``inside``, those of
    Python's own and torch's from the files of ``HOST`` as well, and where they return."""

    def __init__(self, inside: bool = False) -> None:
        self.names: list[str] = []
        """Of what was called, in order."""
        self._events = ("call", "c_call", "c_return") if inside else ("call",)
        self._root = HOST if inside else ROOT
        self._known: dict[CodeType, bool] = {}
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _watch(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in self._events:
            return
        code = frame.f_code
        counts = self._known.get(code)
        if counts is None:
            # What is raised while a generator is closed is lost, as Python has it.
            generates = bool(code.co_flags & CO_GENERATOR)
            counts = code.co_filename.startswith(self._root) and not generates
            self._known[code] = counts
        if counts:
            self.names.append(code.co_qualname)
            self.counted(frame, event, argument)

    def counted(self, frame: FrameType, event: str, argument: Any) -> None:
        """One more call."""


class Fault(Calls):
    """Raises ``error`` in place of call ``at``; ``inside``, as if a signal arrived there."""

    def __init__(self, at: int, error: BaseException, inside: bool = False) -> None:
        super().__init__(inside)
        self.at = at
        self.error = error
        self.place = ""
        """Where it happened; "" if it did not."""

    def __enter__(self) -> Calls:
        return self if self.place else super().__enter__()

    def __exit__(self, *_: object) -> None:
        if not self.place:
            super().__exit__()

    def counted(self, frame: FrameType, event: str, argument: Any) -> None:
        if len(self.names) == self.at:
            name = getattr(argument, "__name__", "")
            self.place = f"{self.names[-1]}:{frame.f_lineno} {event} {name}"
            sys.setprofile(self._before)
            raise self.error
