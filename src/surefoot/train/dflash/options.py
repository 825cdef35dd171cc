"""What a run of the DFlash family can be told beside the usual. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.errors import SurefootError
from surefoot.train.options import TrainOptions, option, read_layers

_USUAL_TAPS = 5


@dataclass(frozen=True)
class DFlashTrainOptions(TrainOptions):
    """Rows behind the current token's predict the tokens at their own positions."""

    weighting: str = option(
        "token", "What counts the same in the loss: every document, or every token."
    )
    layers: int = option(5, "Layers of the drafter.")
    block: int = option(16, "Rows of a block: the current token's and the masks behind it.")
    captured_layers: str | None = option(
        None,
        "Layers of the target whose input is read, as 2,9,15,21,28. (default: five, spread evenly)",
    )
    anchors: float = option(0.25, "Share of the generated tokens behind which a block is trained.")
    decay: float = option(7.0, "Draft j of a block weighs exp(-j / decay) in the loss.")
    draft_vocab: int | None = option(
        None,
        "Tokens that can be drafted, the most frequent ones; the layout is then speculators'. "
        "(default: all)",
    )
    mask_token: int | None = option(
        None, "Token that stands for what is to be drafted. (default: one that no text holds)"
    )

    anchor_predicts = False
    """The current token's row drafts, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "layers")
        self.at_least(2, "block")
        if self.draft_vocab is not None:
            self.at_least(1, "draft_vocab")
        if not 0 < self.anchors <= 1:
            raise SurefootError("anchors", f"{self.anchors} is not in (0, 1]")
        if self.decay <= 0:
            raise SurefootError("decay", f"{self.decay} is not above 0")

    @property
    def drafts(self) -> int:
        """Of a block."""
        return self.block - (not self.anchor_predicts)

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """Indices of the layers whose entering residual stream is captured."""
        if self.captured_layers is not None:
            return read_layers(self.captured_layers, target_layers)
        if target_layers < 2 * _USUAL_TAPS:
            return tuple(range(1, target_layers))[-_USUAL_TAPS:]
        step = (target_layers - 4) / (_USUAL_TAPS - 1)
        return tuple(round(1 + index * step) + 1 for index in range(_USUAL_TAPS))

    @property
    def heads(self) -> tuple[int, bool]:
        """(rank of the Markov head, 0 for none; whether there is a confidence head)."""
        return 0, False

    @property
    def objective(self) -> tuple[float, float]:
        """Weights of the cross-entropy to the text's own tokens, and of the distance sum of
        abs(q - p) to the target's distribution."""
        return 1.0, 0.0


@dataclass(frozen=True)
class DSparkTrainOptions(DFlashTrainOptions):
    """All rows of a block predict the token after their own, helped by the token before."""

    layers: int = option(3, "Layers of the drafter.")
    block: int = option(7, "Rows of a block, as many drafts: the current token's and the masks.")
    decay: float = option(4.0, "Draft j of a block weighs exp(-j / decay) in the loss.")
    markov_rank: int = option(64, "Rank of what the token before says about a row's.")
    anchor_predicts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "markov_rank")

    @property
    def heads(self) -> tuple[int, bool]:
        return self.markov_rank, True

    @property
    def objective(self) -> tuple[float, float]:
        return 0.1, 0.9
