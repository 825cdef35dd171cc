"""Graphs of a machine without a GPU."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch


class Replayed:
    """A graph that calls what it recorded, and leaves the results where the first call left
    them."""

    def __init__(self, run: Any, result: Any = None) -> None:
        self.run, self.result = run, result

    def replay(self) -> None:
        overwrite(self.result, self.run())


def overwrite(kept: Any, made: Any) -> None:
    """Copy the tensors of ``made`` into those of ``kept``."""
    if isinstance(kept, torch.Tensor):
        if kept is not made:
            kept.copy_(made)
    elif is_dataclass(kept):
        overwrite(list(vars(kept).values()), list(vars(made).values()))
    elif isinstance(kept, list | tuple):
        for old, new in zip(kept, made, strict=True):
            overwrite(old, new)


def record(run: Any, *_: Any) -> tuple[Replayed, Any]:
    """In place of ``capture``."""
    result = run()
    return Replayed(run, result), result
