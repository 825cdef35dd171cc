"""What a training run can be told. A kind of drafter adds its own; the command line takes its
options from these fields. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import SurefootError


def option(default: Any, text: str) -> Any:
    """A field with the text that ``--help`` shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainOptions:
    """Sizes are counts of tokens, prompts included."""

    epochs: float = option(2.0, "Passes over the data.")
    steps: int | None = option(None, "Optimizer steps, in place of --epochs.")
    duration: float | None = option(
        None,
        "Minutes in place of --epochs, measurements included: the learning rate falls with the "
        "time. Not the same from run to run.",
    )
    learning_rate: float = option(1e-3, "Highest, after the warm-up.")
    warm_up: float = option(0.04, "Share of the steps in which the learning rate rises.")
    step_tokens: int = option(32768, "Tokens of an optimizer step.")
    batch_tokens: int = option(
        32768, "Tokens computed at once; a step of more is accumulated. Bounds the memory."
    )
    max_length: int = option(2048, "Cut longer documents.")
    weighting: str = option(
        "document", "What counts the same in the loss: every document, or every token."
    )
    init_from: str | None = option(
        None,
        "Begin with the weights of this drafter: a folder, a GGUF file or org/name of the hub. "
        "(default: random ones)",
    )
    held_out: int = option(256, "Documents kept for measuring.")
    measure_every: int = option(1_000_000, "Tokens between measurements on them.")
    save_every: int = option(4_000_000, "Tokens between checkpoints to go on from.")
    seed: int = option(0, "Of the first weights and the order of the documents.")

    def __post_init__(self) -> None:
        self.at_least(1, "step_tokens", "batch_tokens", "held_out", "measure_every", "save_every")
        self.at_least(8, "max_length")
        if self.steps is not None:
            self.at_least(1, "steps")
        for name in ("epochs", "learning_rate", "duration"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise SurefootError(name, f"{value} is not above 0")
        if self.duration is not None and self.steps is not None:
            raise SurefootError("duration", "and steps exclude each other", "drop one of them")
        if not 0 <= self.warm_up < 1:
            raise SurefootError("warm_up", f"{self.warm_up} is no share below 1")
        if self.weighting not in ("document", "token"):
            raise SurefootError("weighting", f"{self.weighting!r} is neither document nor token")
        if self.step_tokens % self.batch_tokens:
            raise SurefootError("batch_tokens", "does not divide step_tokens")

    def at_least(self, low: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < low:
                raise SurefootError(name, f"{getattr(self, name)} is below {low}")


def read_layers(text: str, target_layers: int) -> tuple[int, ...]:
    """``text`` as a list of layers whose input is captured, from 1 to the last one's. The output of
    the last layer is not among them: elsewhere it goes by the same name when it is normed. Raises
    SurefootError about ``captured_layers``."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SurefootError("captured_layers", f"{text!r} is no list", "as 2,15,27") from None
    inside = all(1 <= layer < target_layers for layer in layers)
    if not inside or list(layers) != sorted(set(layers)):
        raise SurefootError(
            "captured_layers",
            f"{list(layers)} does not fit a target of {target_layers} layers",
            f"name rising ones from 1 to {target_layers - 1}",
        )
    return layers
