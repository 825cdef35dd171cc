"""Drafters that come with the package, for models that Surefoot knows by name.

``surefoot/drafters/index.json`` lists them: by model, ``{"proposer": who drafts with it, "file":
beside the index, "size": bytes, "sha256": …, "default": whether engines load it unasked}``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.models.loading.embedded import checksum
from surefoot.speculation import registry

FOLDER = Path(__file__).parents[1] / "drafters"
INDEX = "index.json"
PATH = "path"
"""The option of proposers that names their drafter."""


@dataclass(frozen=True)
class ShippedDrafter:
    """``default``: engines for ``model`` load it unless they are told what to load."""

    model: str
    proposer: str
    path: Path
    size: int
    sha256: str
    default: bool

    def is_whole(self) -> bool:
        """Whether the file is there and its checksum is right; reads it once per process."""
        here = self.path.is_file() and self.path.stat().st_size == self.size
        return here and checksum(self.path) == self.sha256


def shipped_drafters() -> list[ShippedDrafter]:
    """All of them, as the index lists them."""
    index = json.loads((FOLDER / INDEX).read_text(encoding="utf-8"))
    return [
        ShippedDrafter(
            model, item["proposer"], FOLDER / item["file"], item["size"], item["sha256"],
            item["default"],
        )
        for model, items in index.items()
        for item in items
    ]  # fmt: skip


def with_shipped(config: EngineConfig) -> EngineConfig:
    """``config`` with what is shipped for its model: where it names no proposers, the registry's
    default and the shipped one; and the path of a shipped drafter where it names the proposer
    alone. Raises SurefootError for a file that is damaged."""
    found = [item for item in shipped_drafters() if item.model == config.model]
    if not found or config.max_draft_tokens == 0:
        return config
    names = config.proposers
    if names is None:
        usual = (item.proposer for item in found if item.default)
        names = tuple(dict.fromkeys((*registry.default(), *usual)))
    options = {name: dict(values) for name, values in config.proposer_options.items()}
    for item in found:
        own = options.get(item.proposer, {})
        if item.proposer not in names or own.get(PATH):
            continue
        if not item.is_whole():
            raise SurefootError(
                f"{item.proposer}.{PATH}",
                f"{item.path} is damaged",
                "install Surefoot again, or name the proposers to load (--proposer)",
            )
        options[item.proposer] = {**own, PATH: str(item.path)}
    return replace(config, proposers=names, proposer_options=options)
