"""Terminal output: loading with progress bars, coloured drafts. rich is imported when needed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from surefoot.engine.llm import LLM

ProgressCallback = Callable[[str, int, int], None]
_RESET = "\x1b[0m"
_COLOURS = ("32", "36", "35", "33", "34")
"""SGR codes of the proposers, in the order in which they are loaded."""


@contextmanager
def progress_bars() -> Iterator[ProgressCallback]:
    """A callback (label, done, total) that draws one bar per label on stderr; draws nothing
    when stderr is no terminal. A total of 0 means unknown."""
    if not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label)
            bars.update(tasks[label], completed=done, total=total or None)

        yield show


def load(options: Mapping[str, Any], **more: Any) -> LLM:
    """Load a model and print, on stderr, what was chosen and the limits that hold; what makes it
    slow, if anything; on a GPU also who gets its memory."""
    with progress_bars() as progress:
        progress("Starting", 0, 0)
        from surefoot.engine.build import why_slow
        from surefoot.engine.llm import LLM

        llm = LLM(progress=progress, **options, **more)
    print(describe(llm), file=sys.stderr)
    slow = why_slow(llm.engine)
    if slow is not None:
        print(slow, file=sys.stderr)
    if llm.engine.memory is not None:
        print(llm.engine.memory.summary(), file=sys.stderr)
    return llm


def prepare_libraries() -> None:
    """Settings that libraries read when they are imported; call it before."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Their progress bars would tear ours apart.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def show_log() -> None:
    """From now on print what Surefoot logs, from INFO on, as lines on stderr."""
    logger = logging.getLogger("surefoot")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_LogLines())


class _LogLines(logging.Handler):
    """Asks for stderr each time: progress bars put something else there, to stay below."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        print(level + self.format(record), file=sys.stderr)


def describe(llm: LLM) -> str:
    """One line: model, backend, and the limits of context, batch and memory."""
    engine = llm.engine
    backend = engine.decoder.backend
    return (
        f"{llm.config.model}: {backend.name} backend, {str(backend.dtype).removeprefix('torch.')}; "
        f"context {engine.max_model_len} tokens, up to {llm.config.max_num_seqs} requests at once, "
        f"KV cache for {engine.kv_tokens} tokens; drafts from {engine.drafts_from}"
    )


def has_colour(stream: TextIO) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR is set; anywhere with FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


class DraftPainter:
    """Writes text in pieces, accepted drafts in their proposer's colour, or between «» where
    there is no colour."""

    def __init__(self, proposers: Sequence[str], stream: TextIO) -> None:
        self.proposers = list(proposers)
        self.stream = stream
        self.colour = has_colour(stream)
        self._open: str | None = None

    def write(self, text: str, source: str | None) -> None:
        if not text:
            return
        if source != self._open:
            self.close()
            if source is not None:
                self.stream.write(self._start(source))
            self._open = source
        self.stream.write(printable(text, self.stream))

    def close(self) -> None:
        """End the open piece; call it at the end of a text."""
        if self._open is not None:
            self.stream.write(_RESET if self.colour else "»")
        self._open = None
        self.stream.flush()

    def legend(self) -> str:
        """What the marks mean, in one line."""
        marked = [
            f"{self._start(name)}accepted drafts from {name}{_RESET if self.colour else '»'}"
            for name in self.proposers
        ]
        return ", ".join(["plain: the model's own tokens", *marked])

    def _start(self, source: str) -> str:
        if self.colour:
            return f"\x1b[{_COLOURS[self.proposers.index(source) % len(_COLOURS)]}m"
        return f"«{source}: " if len(self.proposers) > 1 else "«"


def printable(text: str, stream: TextIO) -> str:
    """On a terminal, escape characters that a model wrote are shown, not obeyed."""
    return text.replace("\x1b", "␛") if stream.isatty() else text
