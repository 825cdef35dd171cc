"""What a kind of drafter adds to the common loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.train.corpus import Batch, Corpus
from surefoot.train.options import TrainOptions
from surefoot.train.parameters import Parameters
from surefoot.train.target import Target


@dataclass(frozen=True)
class Drafted:
    """Drafts for every place of a batch, on the host: row i is the chain that follows token i + 1,
    its column k stands for token i + 2 + k. The tokens before it are the document's."""

    tokens: np.ndarray
    """int64 [N, depth]: the likeliest; -1 where the document has no generated token there, or
    where one before it in the chain was not generated."""
    overlap: np.ndarray
    """float32 [N, depth]: sum over tokens of min(draft's, target's probability)."""
    best: np.ndarray
    """int64 [N]: the target's likeliest token *after* token i; -1 where it was not asked."""
    alone: np.ndarray | None = None
    """int64 [N, depth]: ``tokens`` if none knew of the one before it, where some do."""
    confidence: np.ndarray | None = None
    """float32 [N, depth]: the chance of acceptance that the drafter itself gives, if it does."""


class Recipe(ABC):
    """A kind's constructor makes ``network``, whose float32 parameters are trained."""

    network: Parameters
    depth: int
    """Columns of ``Drafted``."""

    def __init__(self, options: TrainOptions, target: Target, corpus: Corpus) -> None:
        self.options, self.target, self.corpus = options, target, corpus
        self.compute = torch.bfloat16 if target.device.type == "cuda" else torch.float32
        """Of products. Parameters, gradients, norms, softmax and loss are float32."""

    @abstractmethod
    def loss(self, batch: Batch, divisor: float, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch's part of the loss of step number ``step``, to be differentiated; and float32 [3]
        on the device: the same without gradient, the rows judged, and those that agreed with the
        target."""

    @abstractmethod
    def draft(self, batch: Batch) -> Drafted:
        """What would be drafted everywhere; no gradients."""

    @abstractmethod
    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer at the learning rate ``rate``."""

    @abstractmethod
    def begin_from(self, path: str) -> None:
        """Give the network the weights of the drafter there (a folder, a GGUF file or a name of the
        hub). Raises SurefootError about ``init_from`` if it is none of this kind and shape."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, and read them back: raises
        SurefootError if what was written would not draft the same."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """For people: sizes, the draft vocabulary's coverage and the like. JSON-ready."""

    def divisor(self, documents: Sequence[int], weighting: str) -> float:
        """What a step's weighted rows are divided by: its documents, or with ``weighting`` token
        its rows. Known before anything is computed, so that it does not matter how a step is
        split over batches and processes."""
        pairs = self.corpus.pairs[list(documents)]
        return max(1.0, float((pairs > 0).sum() if weighting == "document" else pairs.sum()))

    def row_weights(self, batch: Batch, weighting: str) -> np.ndarray:
        """float32 [N]: the weight of each token's row before it is divided by ``divisor``."""
        if weighting == "token":
            return np.ones(len(batch), dtype=np.float32)
        pairs = np.add.reduceat(batch.pairs.astype(np.int64), batch.starts[:-1])
        return (1.0 / np.maximum(pairs, 1))[batch.document_of].astype(np.float32)
