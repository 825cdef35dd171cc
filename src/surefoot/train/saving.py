"""The state of a run on disk: what it goes on from, and the best weights so far."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError

STATE = "state.pt"
BEST = "best.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write all of it or nothing."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def read(path: Path, device: torch.device | str) -> dict[str, Any] | None:
    """What ``save`` wrote; None if nothing."""
    if not path.is_file():
        return None
    try:
        # weights_only: nothing in the file is executed.
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise SurefootError("out", f"{path} cannot be read: {error}", "remove it") from error
