"""What rounds tell the host, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from surefoot.speculation.round import Round
from surefoot.speculation.scoring import PromptScores
from surefoot.speculation.size import Size


class Report(NamedTuple):
    """What a launched round will have told the host."""

    rows: np.ndarray
    """int32 [spans, columns]: ``speculation.books.ReportColumns``."""
    scores: torch.Tensor | None
    """int32 [scored, n, columns] as ``kernels.logprobs`` has them, where the round's size asks for
    logprobs."""
    prompt_scores: PromptScores
    """Of prompts, where such were wanted."""
    wait: Callable[[], None]
    """Returns when all is there; raises what the device raises."""
    seconds: Callable[[], float | None]
    """What the round took on the device, once it is there, but for catching up on earlier ones;
    None: nobody measured it."""


class PinnedReport:
    """Where the report of one round in flight goes. The next round begins meanwhile, and its first
    part leaves the report alone: a pause for a copy would be a hundredth of a small model's round.
    """

    def __init__(self, round_: Round, reader: torch.cuda.Stream) -> None:
        self.round = round_
        self.reader = reader
        self.rows = torch.zeros_like(round_.books.report, device="cpu").pin_memory()
        self._seen = self.rows.numpy()
        self._scores: torch.Tensor | None = None
        """Where logprobs go; made when first needed."""
        self._scored: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """By shape: these on the device, and where they go."""
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor, np.ndarray]] = {}
        """By spans: where the rows go, where they are on the device, and what the host sees."""
        self.begun, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.copied = torch.cuda.Event()

    def take(self, size: Size, prompt_scores: PromptScores, stream: torch.cuda.Stream) -> Report:
        """Have the report of a round that runs on ``stream`` copied when it has ended."""
        parts = self._parts.get(size.spans)
        if parts is None:
            spans, report = size.spans, self.round.books.report
            parts = self._parts[spans] = self.rows[:spans], report[:spans], self._seen[:spans]
        rows, source, seen = parts
        self.reader.wait_event(self.ended)
        # The context manager takes the host longer than what is done in it.
        torch.cuda.set_stream(self.reader)
        try:
            rows.copy_(source, non_blocking=True)
            scores = None
            if size.logprobs is not None:
                there, scores = self._scores_of(size)
                scores.copy_(there, non_blocking=True)
            self.copied.record(self.reader)
        finally:
            torch.cuda.set_stream(stream)
        return Report(seen, scores, prompt_scores, self.copied.synchronize, self.seconds)

    def _scores_of(self, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.round.scores
        shape = scores.shape(size)
        if shape not in self._scored:
            if self._scores is None:
                self._scores = torch.zeros_like(scores.table, device="cpu").pin_memory()
            there = scores.part(size)
            assert there is not None
            self._scored[shape] = there, self._scores[: there.numel()].view(shape)
        return self._scored[shape]

    def seconds(self) -> float:
        return self.begun.elapsed_time(self.ended) / 1000
