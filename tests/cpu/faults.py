"""A fault at the n-th call: whichever function of the engine that is, it raises instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import surefoot

ROOT = str(Path(surefoot.__file__).parent)
HOST = tuple(str(Path(ROOT, name)) for name in ("engine", "kv", "request.py"))
"""Where what an engine knows of its requests is kept."""


class Fault:
    """While it is entered, counts the calls of surefoot's functions, and has call ``at`` raise
    ``error``; with ``inside``, also every call of a built-in function from the files of ``HOST``,
    before and after it, as if a signal arrived there."""

    def __init__(self, at: int, error: BaseException, inside: bool = False) -> None:
        self.at = at
        self.error = error
        self.inside = inside
        self.count = 0
        self.place = ""
        """Where it happened; "" if it did not."""
        self._known: dict[CodeType, bool] = {}
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> Fault:
        self._before = sys.getprofile()
        if not self.place:
            sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _watch(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" and not (self.inside and event in ("c_call", "c_return")):
            return
        code = frame.f_code
        counts = self._known.get(code)
        if counts is None:
            root = HOST if self.inside else ROOT
            counts = self._known[code] = code.co_filename.startswith(root)
        if not counts:
            return
        self.count += 1
        if self.count == self.at:
            name = getattr(argument, "__name__", "")
            self.place = f"{code.co_qualname}:{frame.f_lineno} {event} {name}"
            raise self.error
