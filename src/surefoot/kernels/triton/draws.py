"""Sampling as ``Backend.adjust`` and ``Backend.draw`` ask for it."""

from __future__ import annotations

import torch

from surefoot.kernels.draws import Adjustments, Draws
from surefoot.kernels.triton.launch import next_power_of_2
from surefoot.kernels.triton.penalties import apply_bias_and_ends, apply_penalties
from surefoot.kernels.triton.sampling import Sampler


class _EveryFilter:
    """Stages of a draw whose filters are told apart row by row, on the device."""

    noise = True
    penalties = bias = min_tokens = False
    min_p = top_p = True
    top_k = 1


class DrawSeam:
    """Holds the scratch table of the penalties, made when first needed and grown with the rows.
    Tables that were outgrown are kept: a recorded round goes on with the one it was recorded with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """float32 logits [M, vocab] -> tokens int64 [M]."""
        sampler = Sampler(logits.shape[0], logits.shape[1], self.device)
        return sampler.draw(logits, draws.slots, draws.positions, draws, _EveryFilter())

    def adjust(self, logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
        """float32 logits [M, vocab] -> a changed copy."""
        logits = logits.clone()
        slots, positions = adjustments.slots, adjustments.positions
        if adjustments.penalties:
            apply_penalties(
                logits,
                self._table(*logits.shape),
                slots,
                positions,
                adjustments.history,
                adjustments.max_history,
                adjustments,
            )
        if adjustments.biased or adjustments.min_tokens:
            apply_bias_and_ends(
                logits, slots, positions, adjustments, adjustments.biased, adjustments.min_tokens
            )
        return logits

    def _table(self, rows: int, vocab: int) -> torch.Tensor:
        if not self._tables or self._tables[-1].shape[0] < rows:
            # By powers of two, so that all together take at most twice the largest.
            shape = next_power_of_2(rows), vocab
            self._tables.append(torch.zeros(shape, dtype=torch.int32, device=self.device))
        return self._tables[-1]
