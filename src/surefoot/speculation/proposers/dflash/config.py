"""What a drafter of the DFlash family is made of: the backbone, and which heads it has.

The family is told by what a config holds, not by the name of its class: projects use the same
names for different things. ``layouts`` reads the configs of safetensors folders.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.models.config import ModelConfig

MOST_BLOCK_ROWS = 63
"""Bits of a row's mask (``FlatBatch.mask``), but for the pattern that means causal."""
MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class Visibility:
    """What the rows of a block see in one layer."""

    causal: bool
    """Of the block only what comes before them. Otherwise the block in both directions."""
    window: int = 0
    """Keys that a row sees to its left, itself included, and to its right; 0: all."""
    from_anchor: bool = False
    """The window bounds the context alone, and reaches back from the block's first row by
    ``window`` keys for every row of it (speculators' training)."""


@dataclass(frozen=True)
class Convolutions:
    """Grouped dynamic convolutions around attention and MLP (DFlash 2)."""

    taps: int
    group: int
    """Channels that share a dynamic coefficient."""


@dataclass(frozen=True)
class Selector:
    """The head that picks a path through the best candidates of each row (DFlash 2)."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class MarkovShape:
    """The head that adds what the token before says about a row (DSpark)."""

    kind: str
    """One of ``MARKOV_KINDS``."""
    rank: int


@dataclass(frozen=True)
class DFlashConfig:
    """``layer``: sizes and constants of the layers; its ``vocab_size`` is the target's."""

    layout: str
    """Who writes such files: ``z-lab``, ``deepseek``, ``specforge``, ``speculators``; ``gguf``,
    ``dummy``."""
    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    block_size: int
    """Rows of a block: the current token's and the masks'."""
    layer_ids: tuple[int, ...] | None
    """Captured layers as ``Needs.captured_layers`` counts them, ascending; None: the default."""
    mask_token_id: int
    anchor_predicts: bool
    """Row i of a block predicts the token after its own position, so that the current token's row
    drafts, too. Otherwise rows predict the tokens at their own positions, the first none."""
    layers: tuple[Visibility, ...]
    """By layer."""
    markov: MarkovShape | None = None
    confidence: bool = False
    confidence_with_markov: bool = False
    """The confidence head reads the token before, too."""
    convolutions: Convolutions | None = None
    selector: Selector | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """c of ``c * tanh(x / c)`` over the scaled logits; 0: none."""
    verifier: str | None = None
    """The target it was made for, where the file says so."""

    @property
    def first_row(self) -> int:
        """The first row of a block that drafts."""
        return 0 if self.anchor_predicts else 1

    @property
    def most_drafts(self) -> int:
        return self.block_size - self.first_row

    @property
    def captured(self) -> int:
        """How many layers of the target it reads."""
        return self.layer.layers if self.layer_ids is None else len(self.layer_ids)

    @property
    def family(self) -> str:
        if self.selector is not None:
            return "DFlash 2"
        return "DFlash" if self.markov is None and not self.confidence else "DSpark"

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The captured layers of a target with so many, as the index of the layer that each
        residual stream *enters* (0: the embeddings), ascending."""
        if self.layer_ids is not None:
            return self.layer_ids
        return default_layers(self.layer.layers, target_layers)


def default_layers(layers: int, target_layers: int) -> tuple[int, ...]:
    """Where a drafter of so many layers reads, if its config does not say: spread evenly from the
    second layer's output to the third last's."""
    if layers == 1:
        return (target_layers // 2 + 1,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + index * step) + 1 for index in range(layers))
