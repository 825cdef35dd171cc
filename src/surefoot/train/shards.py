"""Token shards: documents in the target's own ids, and which of their tokens it generated.

A shard is one safetensors file with ``ids`` uint16 or int32 [N], ``mask`` uint8 [N] (1: the target
generated this token), ``lengths`` int32 [D], ``temperature`` float32 [D] (at which the document was
generated) and ``keys`` int64 [D, 2] (see ``filters``). ``data.json`` beside them says how they were
made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.errors import SurefootError

SETTINGS = "data.json"
_NARROW = 1 << 16


@dataclass(frozen=True)
class Document:
    """A conversation. ``keys``: of the prompt and of the answers."""

    ids: Sequence[int]
    answers: Sequence[tuple[int, int]]
    """Where in ``ids`` each piece that the target generated begins, and where it ends."""
    temperature: float
    keys: tuple[int, int]


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in order; a missing one ends them."""
    paths = []
    while (path := shard_path(folder, len(paths))).is_file():
        paths.append(path)
    return paths


def write_shard(
    path: Path, documents: Sequence[Document], vocab_size: int, facts: Mapping[str, Any]
) -> None:
    """Write all of it or nothing. ``facts``: JSON-ready, kept in the file's header."""
    from safetensors.numpy import save_file

    kind = np.uint16 if vocab_size <= _NARROW else np.int32
    lengths = np.array([len(document.ids) for document in documents], dtype=np.int32)
    mask = np.zeros(lengths.sum(), dtype=np.uint8)
    for document, start in zip(documents, np.cumsum(lengths) - lengths, strict=True):
        for first, end in document.answers:
            mask[start + first : start + end] = 1
    tensors = {
        "ids": np.array([token for item in documents for token in item.ids], dtype=kind),
        "mask": mask,
        "lengths": lengths,
        "temperature": np.array([item.temperature for item in documents], dtype=np.float32),
        "keys": np.array([item.keys for item in documents], dtype=np.int64).reshape(-1, 2),
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"facts": json.dumps(facts)})
    os.replace(unfinished, path)


def read_shard(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a shard. Raises SurefootError about ``data`` for what is none."""
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors' own type is not exported everywhere
        raise SurefootError("data", f"{path} cannot be read: {error}") from error
    names = {"ids", "mask", "lengths", "temperature", "keys"}
    if set(tensors) != names or tensors["lengths"].sum() != len(tensors["ids"]):
        raise SurefootError("data", f"{path} is no shard of `surefoot train data`")
    return tensors


def shard_facts(path: Path) -> dict[str, Any]:
    """What ``write_shard`` was told."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["facts"])


def settle(folder: Path, name: str, settings: Mapping[str, Any], option: str) -> None:
    """Keep ``settings`` in ``folder`` as the file ``name``; where there are some already, refuse
    others: a run that goes on must be the run that was begun. Raises SurefootError about
    ``option``."""
    wanted = json.loads(json.dumps(settings))
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
            return
        begun = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SurefootError(option, f"{path} cannot be used: {error}") from None
    for key in (*wanted, *begun):
        if begun.get(key) != wanted.get(key):
            raise SurefootError(
                option,
                f"{folder} was begun with {key} = {begun.get(key)!r}, not {wanted.get(key)!r}",
                "go on with the same settings, or use another folder",
            )
