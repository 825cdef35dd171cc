"""Surefoot's cache folder, and files that appear in it whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much of it is done, how much there is)."""


def cache_root() -> Path:
    """``$SUREFOOT_CACHE``, else ``$XDG_CACHE_HOME/surefoot``, else ``~/.cache/surefoot``."""
    own = os.environ.get("SUREFOOT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "surefoot"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes ``path``, in one step, if the block succeeds; else nothing is
    left. Raises OSError when the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with name.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            name.unlink()
        raise
