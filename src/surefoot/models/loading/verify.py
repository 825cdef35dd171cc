"""Whether a model's files are what they were, as far as anything says what that is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from surefoot.cache import Progress
from surefoot.models.loading.checkpoint import load_checkpoint
from surefoot.models.loading.converted import converted_from, entry_is_whole
from surefoot.models.loading.embedded import EMBEDDED
from surefoot.models.loading.hub import blob_digest
from surefoot.models.loading.resolve import resolve_model
from surefoot.models.loading.safetensors_dir import weight_files


def verify_model(model: str, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Read all of ``model``'s weights and check them. JSON-ready: per check ``path``, ``check``
    (what was compared) and ``good``, None where nothing says what the file should be.

    SHA-256 digests are compared: an embedded model's with the pinned one, a Hugging Face
    download's with its name in the hub's cache, and converted copies' with the one they note.
    Raises SurefootError as loading would, also for a weight that is no number."""
    source = resolve_model(model, progress)
    checks = []
    for path in [source.path] if source.gguf else weight_files(source.path):
        pinned = EMBEDDED[model].sha256 if model in EMBEDDED else None
        expected = pinned or blob_digest(path)
        whose = "the pinned one" if pinned else "its name in the hub's cache"
        checks.append(
            _check(path, f"SHA-256 against {whose}", _sha256(path) == expected)
            if expected
            else _check(path, "no digest of it is known", None)
        )
    for path in converted_from(source.path) if source.gguf else []:
        checks.append(_check(path, "SHA-256 against its header", entry_is_whole(path)))
    weights = load_checkpoint(model, dtype=torch.float32, native=True, progress=progress).weights
    for done, name in enumerate(weights):
        if progress:
            progress("Reading weights", done, len(weights))
        weights[name]
    if progress:
        progress("Reading weights", len(weights), len(weights))
    return [*checks, _check(source.path, f"{len(weights)} tensors hold numbers only", True)]


def _check(path: Path, check: str, good: bool | None) -> dict[str, Any]:
    return {"path": str(path), "check": check, "good": good}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
