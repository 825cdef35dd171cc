"""Kinds of drafters that can be trained, loaded when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.train.options import TrainOptions

if TYPE_CHECKING:
    from surefoot.train.recipe import Recipe


@dataclass(frozen=True)
class Kind:
    """``label``: what people call it. ``proposer``: who serves what comes out."""

    label: str
    proposer: str
    options: str
    recipe: str
    gguf: str

    def options_class(self) -> type[TrainOptions]:
        return _load(self.options)

    def recipe_class(self) -> type[Recipe]:
        return _load(self.recipe)

    def files(self) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Functions for GGUF files: (folder) -> whether it holds a drafter that this kind's files
        can hold; (path) -> its checkpoint; (file, checkpoint, target's config, whether the head is
        written) -> None, writes it."""
        return _load(self.gguf)


KINDS = {
    "eagle3": Kind(
        "EAGLE-3",
        "eagle3",
        "surefoot.train.eagle3.options:Eagle3TrainOptions",
        "surefoot.train.eagle3.recipe:Eagle3Recipe",
        "surefoot.train.eagle3.gguf:FILES",
    ),
    "dspark": Kind(
        "DSpark",
        "dflash",
        "surefoot.train.dflash.options:DSparkTrainOptions",
        "surefoot.train.dflash.recipe:DFlashRecipe",
        "surefoot.train.dflash.gguf:FILES",
    ),
    "dflash": Kind(
        "DFlash",
        "dflash",
        "surefoot.train.dflash.options:DFlashTrainOptions",
        "surefoot.train.dflash.recipe:DFlashRecipe",
        "surefoot.train.dflash.gguf:FILES",
    ),
}


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
