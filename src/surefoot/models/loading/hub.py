"""Where repositories of the Hugging Face hub lie on this machine, told without its slow client."""

from __future__ import annotations

import os
import re
from pathlib import Path

from surefoot.cache import own_folder, user_cache

BLOB = re.compile(r"[0-9a-f]{64}")
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")


def hub_caches() -> list[Path]:
    """Folders that may hold repositories: Surefoot's own, if SUREFOOT_CACHE is set and none of the
    hub's variables is, then that which all programs share."""
    own = own_folder("hub", *VARIABLES)
    return [_shared()] if own is None else [own, _shared()]


def hub_cache_for(repository: str) -> Path:
    """The folder from ``hub_caches`` for the model ``org/name``: that which has it, else the first,
    to download to."""
    caches = hub_caches()
    name = _folder_name(repository)
    return next((cache for cache in caches if os.path.isdir(cache / name / "snapshots")), caches[0])


def downloaded(repository: str, file: str = "") -> Path | None:
    """The folder here that has the branch ``main`` of the model ``org/name``, or ``file`` in it;
    None if it was not downloaded."""
    folder = hub_cache_for(repository) / _folder_name(repository)
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except OSError:
        return None
    path = folder / "snapshots" / revision / file
    return path if path.exists() else None


def blob_digest(path: Path) -> str | None:
    """The SHA-256 that a file of the hub's cache should have: snapshots are links to ``blobs``,
    where large files are named after theirs. None for a file that lies elsewhere."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and BLOB.fullmatch(blob.name) else None


def repository_name(folder: Path) -> str:
    """``org/name`` of the folder ``models--org--name``."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _folder_name(repository: str) -> str:
    return f"models--{repository.replace('/', '--')}"


def _shared() -> Path:
    direct = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return Path(direct).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else user_cache() / "huggingface") / "hub"
