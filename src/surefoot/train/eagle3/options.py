"""What an EAGLE-3 run can be told beside the usual. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.errors import SurefootError
from surefoot.train.options import TrainOptions, option, read_layers

FEWEST_LAYERS = 6
"""Of a target with the usual captured layers."""


@dataclass(frozen=True)
class Eagle3TrainOptions(TrainOptions):
    draft_vocab: int = option(16384, "Tokens that can be drafted, the most frequent ones.")
    unroll: int = option(7, "Drafts in a row that are trained.")
    step_weight: float = option(0.8, "Weight of each of them in the loss, relative to the last.")
    train_head: bool = option(False, "Train the head too; otherwise it is the target's rows.")
    captured_layers: str | None = option(
        None,
        "Layers of the target whose input is read, as 2,15,27. (default: 2, the middle one, the "
        "last but two)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "draft_vocab", "unroll")
        if not 0 < self.step_weight <= 1:
            raise SurefootError("step_weight", f"{self.step_weight} is not in (0, 1]")

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """Indices of the layers whose entering residual stream is captured."""
        if self.captured_layers is not None:
            return read_layers(self.captured_layers, target_layers)
        if target_layers < FEWEST_LAYERS:
            return tuple(range(1, target_layers))[-3:]
        return (2, target_layers // 2, target_layers - 3)
