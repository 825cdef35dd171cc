"""Surefoot's cache folder: where it is, how large, and files that appear in it whole or not at all.

What is being written is called ``.NAME.<16 hex digits>.part``, beside the entry that it becomes.
Its writer holds a lock (``flock``) on it, which the system releases when the process ends, however
it ends: a part that nobody has locked is a leftover. Where a file system knows no such locks, one
that has not changed for an hour is.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from surefoot.errors import SurefootError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much of it is done, how much there is)."""
FOLDERS = ("models", "wheels", "hub", "converted", "native", "cuda", "triton")
"""What lies in the cache folder: embedded models, wheels of theirs that were put there by hand,
Hugging Face's downloads, converted weights, compiled C, CUDA and Triton kernels. The downloads and
Triton's kernels only if SUREFOOT_CACHE is set (see ``own_folder``)."""
PART = re.compile(r"\.(.+)\.[0-9a-f]{16}\.part")
QUIET_SECONDS = 3600
DIGEST_BYTES = 32
USE_ANOTHER = "set SUREFOOT_CACHE to a folder that can be written"


def cache_root() -> Path:
    """``$SUREFOOT_CACHE``, else ``$XDG_CACHE_HOME/surefoot``, else ``~/.cache/surefoot``. Raises
    SurefootError when that is no folder, or there is no home; it need not exist yet."""
    own = os.environ.get("SUREFOOT_CACHE")
    try:
        root = Path(own).expanduser().absolute() if own else user_cache() / "surefoot"
    except RuntimeError as error:
        raise SurefootError("SUREFOOT_CACHE", f"{own} names no folder: {error}") from None
    existing = _existing(root)
    if not existing.is_dir():
        is_what = "is not a folder" if existing == root else f"lies under {existing}, a file"
        raise SurefootError("SUREFOOT_CACHE", f"the cache folder {root} {is_what}", USE_ANOTHER)
    return root


def user_cache() -> Path:
    """``$XDG_CACHE_HOME``, else ``~/.cache``. Raises SurefootError when there is no home."""
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).absolute()
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise SurefootError(
            "SUREFOOT_CACHE", "this user has no home folder for a cache", USE_ANOTHER
        ) from None


def own_folder(name: str, *variables: str) -> Path | None:
    """The folder ``name`` of the cache for a library that has a cache of its own; None leaves that
    alone: SUREFOOT_CACHE is not set, or one of the library's ``variables`` is."""
    if not os.environ.get("SUREFOOT_CACHE") or any(map(os.environ.get, variables)):
        return None
    return cache_root() / name


@dataclass(frozen=True)
class Usage:
    """``sizes``: bytes by folder of ``root``, those of ``FOLDERS`` that exist. ``problem``: why
    nothing can be written there, in one line; None when it can."""

    root: Path
    sizes: dict[str, int]
    problem: str | None

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def usage() -> Usage:
    """How large the cache is, and whether it can be written. Creates nothing. Raises SurefootError
    as ``cache_root`` does."""
    root = cache_root()
    sizes = {name: size_of(root / name) for name in FOLDERS if os.path.exists(root / name)}
    existing = _existing(root)
    writable = os.access(existing, os.W_OK | os.X_OK)
    return Usage(root, sizes, None if writable else f"{existing} cannot be written by this user")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links are not followed."""
    return sum(status.st_size for status in _walk(path) if stat.S_ISREG(status.st_mode))


def size_in_words(size: int) -> str:
    """``538 MB``, ``1.4 GB``: decimal units, as file managers and disks count."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            value = size / factor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{size} bytes"


@contextmanager
def replacing(path: Path, size: int = 0) -> Iterator[BinaryIO]:
    """A binary file that becomes ``path``, in one step, if the block succeeds; else nothing is
    left. Raises OSError when the folder cannot be written, or lacks ``size`` bytes."""
    part, lock = _new_part(path, folder=False)
    try:
        with os.fdopen(lock, "wb") as file:
            if shutil.disk_usage(part.parent).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part.parent))
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def write_checked(path: Path, content: bytes) -> None:
    """Keep ``content`` followed by its SHA-256. Raises OSError as ``replacing`` does."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, len(content) + DIGEST_BYTES) as file:
        file.write(content + hashlib.sha256(content).digest())


def read_checked(path: Path) -> bytes | None:
    """What ``write_checked`` kept there; None if it is not there, or damaged."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    content, digest = kept[:-DIGEST_BYTES], kept[-DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


@contextmanager
def working_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside ``path``, for what is needed to make that; gone after the block.
    Raises OSError when it cannot be made."""
    part, lock = _new_part(path, folder=True)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(lock)


def is_abandoned(part: Path) -> bool:
    """Whether ``part`` (a file or folder) is there and nobody is writing it any more."""
    lock = _try_lock(part)
    if lock is not None:
        os.close(lock)
    return lock is not None


def remove_abandoned(parts: Iterable[Path]) -> None:
    """Remove those that nobody is writing any more. Raises OSError."""
    for part in parts:
        lock = _try_lock(part)
        if lock is None:
            continue
        try:
            remove(part)
        finally:
            os.close(lock)


def remove(path: Path) -> None:
    """A file, a link (not what it points to) or a folder with all that it holds."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unchanged_for_long(path: Path) -> bool:
    """Whether nothing in ``path`` was written to for an hour."""
    latest = max((status.st_mtime for status in _walk(path)), default=0.0)
    return time.time() - latest > QUIET_SECONDS


def _new_part(path: Path, folder: bool) -> tuple[Path, int]:
    """A new, locked part of ``path`` and its descriptor. Leftovers of earlier ones go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.parent.glob(f".{glob.escape(path.name)}.*.part")
    with suppress(OSError):  # A leftover that stays does not hinder the new one.
        remove_abandoned(part for part in mine if PART.fullmatch(part.name))
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        if folder:
            part.mkdir(mode=0o700)
            descriptor = os.open(part, os.O_RDONLY)
        else:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # Not every file system has locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if part.exists():
            return part, descriptor
        os.close(descriptor)  # Another process took it for a leftover before it was locked.


def _try_lock(part: Path) -> int | None:
    """A descriptor of ``part`` if it is abandoned, locked so that no one else finds it so."""
    try:
        descriptor = os.open(part, os.O_RDONLY if part.is_dir() else os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        pass
    except OSError:  # The file system has no locks.
        if unchanged_for_long(part):
            return descriptor
    os.close(descriptor)
    return None


def _existing(path: Path) -> Path:
    """``path``, or the closest folder above it that exists."""
    return next(item for item in (path, *path.parents) if os.path.exists(item))


def _walk(path: Path) -> Iterator[os.stat_result]:
    """The status of ``path`` and of all that it holds; what vanishes meanwhile is left out."""
    with suppress(OSError):
        yield path.lstat()
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(OSError):
                yield os.lstat(os.path.join(folder, name))
