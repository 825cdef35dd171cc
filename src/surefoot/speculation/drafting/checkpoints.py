"""What the checkpoints of drafters that read the target's hidden states have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from surefoot.kernels.backend import Weight
from surefoot.models.config import ModelConfig
from surefoot.speculation.drafting.fit import Interface
from surefoot.speculation.drafting.folders import (
    DrafterCheckpoint,
    Shapes,
    check_tensors,
    read_target_ids,
    vocabulary_shapes,
)


class ReadsFeatures(Protocol):
    """A config. ``layer``: sizes of its layers, with the target's ``vocab_size``."""

    @property
    def layer(self) -> ModelConfig: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """As ``Needs.captured_layers``, of a target with so many layers."""
        ...


Config = TypeVar("Config", bound=ReadsFeatures)


def checked(
    folder: Path,
    config: Config,
    stored: Mapping[str, Weight],
    expected: Shapes,
    optional: Shapes | None = None,
) -> DrafterCheckpoint[Config]:
    """The checkpoint of tensors as ``check_tensors`` wants them; those that stand in for the
    target's, or map a draft vocabulary to it, are ``optional`` too. Raises SurefootError."""
    layer, draft_vocab = config.layer, config.draft_vocab_size
    usual = vocabulary_shapes(layer.vocab_size, layer.hidden_size, draft_vocab)
    check_tensors(folder, stored, expected, {**usual, **(optional or {})})
    ids = read_target_ids(folder, stored, layer.vocab_size, draft_vocab)
    return DrafterCheckpoint(folder, config, stored, ids)


def interface(checkpoint: DrafterCheckpoint[Any], target: ModelConfig) -> Interface:
    """Where it would touch this target; its config is a ``ReadsFeatures``."""
    config: ReadsFeatures = checkpoint.config
    return Interface(
        vocab_size=config.layer.vocab_size,
        hidden_size=config.layer.hidden_size,
        draft_vocab_size=config.draft_vocab_size,
        own_embedding="embed_tokens.weight" in checkpoint.tensors,
        own_head="lm_head.weight" in checkpoint.tensors,
        feature_size=config.target_hidden_size,
        captured_layers=config.layers_of(target.layers),
    )
