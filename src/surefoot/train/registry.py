"""Kinds of drafters that can be trained, loaded when asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def options_class(self) -> type[TrainOptions]:
        return _load(self.options)

    def recipe_class(self) -> type[Recipe]:
        return _load(self.recipe)


KINDS = {
    "eagle3": Kind(
        "EAGLE-3",
        "eagle3",
        "surefoot.train.eagle3.options:Eagle3TrainOptions",
        "surefoot.train.eagle3.recipe:Eagle3Recipe",
    ),
    "dspark": Kind(
        "DSpark",
        "dflash",
        "surefoot.train.dflash.options:DSparkTrainOptions",
        "surefoot.train.dflash.recipe:DFlashRecipe",
    ),
    "dflash": Kind(
        "DFlash",
        "dflash",
        "surefoot.train.dflash.options:DFlashTrainOptions",
        "surefoot.train.dflash.recipe:DFlashRecipe",
    ),
}


def _load(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
