"""What lies in Surefoot's cache folder: how large it is, whose it is, and what is of no more use.

Only what Surefoot writes itself is found here, told by its name, and only that is ever removed; a
folder of the cache that is a link to elsewhere is left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.cache import (
    FOLDERS,
    PART,
    cache_root,
    is_abandoned,
    remove,
    remove_abandoned,
    size_of,
    unchanged_for_long,
)
from surefoot.errors import SurefootError
from surefoot.kernels.cpu.build import current_library
from surefoot.kernels.cuda.machine_code import current_sources
from surefoot.models.loading.converted import read_origin
from surefoot.models.loading.embedded import EMBEDDED
from surefoot.models.loading.hub import hub_caches, repository_name

CONVERTED = re.compile(r".+-[0-9a-f]{24}\.safetensors")
LIBRARY = re.compile(r"native-[0-9a-f]{24}\.so")
CUBIN = re.compile(r"[0-9a-f]{16}-[0-9a-f]{24}\.cubin")
TRITON_KERNEL = re.compile(r"[A-Z2-7]{52}")


@dataclass(frozen=True)
class Entry:
    """Something in the cache folder.

    ``kind`` is ``embedded`` or ``hub`` (models), ``converted`` (weights), ``kernels``, ``wheel``
    (put there by hand) or ``unfinished`` (being written, or left by an interrupted write).
    ``model`` is the model that the entry is, or that converted weights belong to; None for others
    and where it cannot be told. ``useless`` says why no start will use the entry; None when one
    may. ``busy``: another process is writing it, or did within the last hour. ``parts`` are what
    belongs to the entry in the folder ``path``, if that is not all.
    """

    kind: str
    name: str
    bytes: int
    path: Path
    model: str | None = None
    useless: str | None = None
    busy: bool = False
    parts: tuple[Path, ...] = ()

    def is_called(self, name: str) -> bool:
        """Whether a user who says ``name`` means this: its name, kind or model."""
        owner = self.model or ""
        return name in (self.name, self.kind, owner) or owner.startswith(f"{name}:")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        facts = {"kind": self.kind, "name": self.name, "model": self.model, "bytes": self.bytes}
        return {**facts, "path": str(self.path), "useless": self.useless, "busy": self.busy}


def stored_entries() -> list[Entry]:
    """All that Surefoot keeps in its cache folder. Raises SurefootError if it cannot be read."""
    readers = {
        "models": _models,
        "wheels": _wheels,
        "hub": _repositories,
        "converted": _converted,
        "native": _libraries,
        "cuda": _cuda_kernels,
        "triton": _triton_kernels,
    }
    root = cache_root()
    entries: list[Entry] = []
    for name in FOLDERS:
        folder = root / name
        try:
            if not folder.is_symlink() and folder.is_dir():
                items = sorted(folder.iterdir())
                entries += readers[name](items)
                entries += map(_part, filter(lambda item: PART.fullmatch(item.name), items))
        except OSError as error:
            raise _failed(folder, "read", error) from error
    return entries


def prune(
    names: Sequence[str] = (), *, everything: bool = False, dry_run: bool = False
) -> list[Entry]:
    """Remove what is of no use, beside it what ``names`` says (``Entry.is_called``) or, but for
    wheels, ``everything``. Returns all that; what is busy of it stays, and with ``dry_run`` all
    does. Raises SurefootError for a name that means nothing, and when something cannot be removed.
    """
    entries = stored_entries()
    for name in names:
        if not any(entry.is_called(name) for entry in entries):
            raise SurefootError(
                "name",
                f"there is no {name!r} in {cache_root()}",
                "`surefoot models list` shows what there is; Hugging Face's own cache is emptied "
                "with `hf cache rm`",
            )
    chosen = [
        entry
        for entry in entries
        if entry.useless
        or any(entry.is_called(name) for name in names)
        or (everything and entry.kind != "wheel")
    ]
    for entry in chosen:
        try:
            if not dry_run and not entry.busy:
                _remove(entry)
        except OSError as error:
            raise _failed(entry.path, "removed", error) from error
    return chosen


def _remove(entry: Entry) -> None:
    if entry.kind == "hub":
        from huggingface_hub import scan_cache_dir

        # It knows which files several repositories share.
        known = scan_cache_dir(entry.path.parent)
        repos = frozenset(item for item in known.repos if item.repo_path == entry.path)
        hashes = [revision.commit_hash for item in repos for revision in item.revisions]
        # It takes a revision from whichever repository has it, and copies have the same ones.
        replace(known, repos=repos).delete_revisions(*hashes).execute()
        if entry.path.exists():
            raise OSError("the hub's client could not delete all of it")
        return
    for path in entry.parts or (entry.path,):
        if PART.fullmatch(path.name):
            remove_abandoned([path])
        else:
            remove(path)


def _part(path: Path) -> Entry:
    return _unfinished(path, is_abandoned(path))


def _unfinished(path: Path, abandoned: bool) -> Entry:
    useless = "left by an interrupted write" if abandoned else None
    return Entry("unfinished", path.name, size_of(path), path, None, useless, not abandoned)


def _models(items: list[Path]) -> Iterator[Entry]:
    names = {model.path.name: name for name, model in EMBEDDED.items()}
    for path in items:
        if path.name in names:
            name = names[path.name]
            yield Entry("embedded", name, size_of(path), path, name)


def _wheels(items: list[Path]) -> Iterator[Entry]:
    known = {model.wheel for model in EMBEDDED.values()}
    for path in items:
        if path.name in known:
            yield Entry("wheel", path.name, size_of(path), path)


def _repositories(items: list[Path]) -> Iterator[Entry]:
    if not any(path.name.startswith("models--") for path in items):
        return
    from huggingface_hub import scan_cache_dir

    # The hub's client holds no locks on what it writes.
    parts = [part for path in items for part in path.glob("blobs/*.incomplete")]
    fresh = {part for part in parts if not unchanged_for_long(part)}
    known = scan_cache_dir(items[0].parent).repos
    sizes = {item.repo_path: item.size_on_disk for item in known if item.repo_type == "model"}
    for path, size in sorted(sizes.items()):
        busy = any(part.is_relative_to(path) for part in fresh)
        name = repository_name(path)
        yield Entry("hub", name, size, path, name, busy=busy)
    for part in parts:
        yield _unfinished(part, part not in fresh)


def _converted(items: list[Path]) -> Iterator[Entry]:
    for path in items:
        if not CONVERTED.fullmatch(path.name):
            continue
        origin = read_origin(path)
        model = _model_name(origin.source) if origin else None
        useless = origin.obsolete() if origin else "of another version of Surefoot"
        yield Entry("converted", path.name, size_of(path), path, model, useless)


def _libraries(items: list[Path]) -> Iterator[Entry]:
    current = current_library()
    for path in items:
        if LIBRARY.fullmatch(path.name):
            # Without a compiler nothing tells which of them would be loaded.
            other = current is not None and path.name != current
            useless = "for other sources, another compiler or CPU" if other else None
            yield Entry("kernels", path.name, size_of(path), path, useless=useless)
        elif path.name.startswith("build-"):  # Earlier versions compiled there.
            yield _unfinished(path, unchanged_for_long(path))


def _cuda_kernels(items: list[Path]) -> Iterator[Entry]:
    for path in items:
        if CUBIN.fullmatch(path.name):
            other = not path.name.startswith(current_sources())
            useless = "for other sources" if other else None
            yield Entry("kernels", path.name, size_of(path), path, useless=useless)


def _triton_kernels(items: list[Path]) -> Iterator[Entry]:
    kernels = [path for path in items if TRITON_KERNEL.fullmatch(path.name)]
    fresh = {path for path in kernels if not unchanged_for_long(path)}
    for busy in (False, True):
        paths = tuple(path for path in kernels if (path in fresh) == busy)
        if paths:
            size = sum(map(size_of, paths))
            yield Entry("kernels", "triton", size, paths[0].parent, busy=busy, parts=paths)


def _model_name(source: Path) -> str:
    """What a user calls the GGUF file ``source``."""
    for name, model in EMBEDDED.items():
        if source == model.path:
            return name
    for cache in hub_caches():
        if source.is_relative_to(cache):
            # models--org--name/snapshots/REVISION/FILE
            repository, _, _, *file = source.relative_to(cache).parts
            return f"{repository_name(Path(repository))}:{os.path.join(*file)}"
    return str(source)


def _failed(path: Path, what: str, error: OSError) -> SurefootError:
    return SurefootError("SUREFOOT_CACHE", f"{path} cannot be {what}: {error.strerror or error}")
