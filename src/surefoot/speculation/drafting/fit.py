"""Whether a drafter was made for this target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig


@dataclass(frozen=True)
class Interface:
    """Where a drafter touches its target."""

    vocab_size: int
    hidden_size: int
    draft_vocab_size: int
    own_embedding: bool
    """Not the target's."""
    own_head: bool
    feature_size: int | None = None
    """Width of the target's hidden states as it reads them; None: it reads tokens alone."""
    captured_layers: tuple[int, ...] = ()
    """As ``Needs.captured_layers``."""


def misfits(own: Interface, target: ModelConfig) -> list[str]:
    """Why the drafter cannot serve this target; [] if it can."""
    problems, captured = [], own.captured_layers
    if own.feature_size not in (None, target.hidden_size):
        problems.append(f"its features are {own.feature_size} wide, not {target.hidden_size}")
    if own.vocab_size != target.vocab_size:
        problems.append(f"its vocabulary has {own.vocab_size} tokens, not {target.vocab_size}")
    inside = all(0 <= layer <= target.layers for layer in captured)
    if not inside or len(set(captured)) < len(captured):
        problems.append(f"it captures layers {list(captured)} of a target with {target.layers}")
    if not own.own_embedding and own.hidden_size != target.hidden_size:
        problems.append("it has no embedding, and the target's is of another width")
    if not own.own_head and own.hidden_size != target.hidden_size:
        problems.append("it has no lm_head, and the target's is of another width")
    elif not (own.own_head or own.draft_vocab_size == target.vocab_size or target.tied_embeddings):
        # Rows can be taken from an embedding alone.
        problems.append("it has no lm_head for its draft vocabulary, and the target's is whole")
    return problems


def refuse_misfits(problems: Sequence[str], folder: Path, made_for: str | None) -> None:
    """Raise SurefootError for a drafter that was not made for this target."""
    if problems:
        raise SurefootError(
            "path",
            f"{folder} does not fit the target: " + "; ".join(problems),
            f"it was made for {made_for or 'another model'}",
        )
