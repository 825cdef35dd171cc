"""When Python may collect garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERPRETERS_OWN = 10_000
"""Objects, at most, that Python leaves out of collections of its own accord (3.12: some hundreds).
Whoever leaves out what a program has loaded, leaves out more."""

BETWEEN = 50_000
"""Objects, at least, that are made and not dropped before garbage is collected again. A round of
hundreds of requests makes a thousand, and drops those of the round before: by Python's own number,
700, every round would be interrupted, for a tenth of the host's time."""


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection meanwhile, not even of what is left behind now."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Collections meanwhile are few, and leave out all that exists already. With a model loaded,
    looking through that takes a tenth of a second, once in a few hundred rounds."""
    if gc.get_freeze_count() > INTERPRETERS_OWN:
        # Somebody has done so before; undoing it is theirs, too.
        yield
        return
    before, *others = gc.get_threshold()
    gc.freeze()
    # By 0 somebody says that there are to be none.
    gc.set_threshold(before and max(before, BETWEEN), *others)
    try:
        yield
    finally:
        gc.set_threshold(before, *others)
        gc.unfreeze()
