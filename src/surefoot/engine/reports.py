"""What rounds tell the host, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from surefoot.speculation.round import Round
from surefoot.speculation.scoring import PromptScores
from surefoot.speculation.size import Size


@dataclass(frozen=True)
class Report:
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
        self.scores: torch.Tensor | None = None
        """Made when first needed."""
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
            scores = self.round.scores.part(size)
            if scores is not None:
                if self.scores is None:
                    count = self.round.scores.table.numel()
                    self.scores = torch.zeros(count, dtype=torch.int32).pin_memory()
                # Dense on both sides: one copy, not one for every row.
                target = self.scores[: scores.numel()].view(scores.shape)
                scores = target.copy_(scores.contiguous(), non_blocking=True)
            self.copied.record(self.reader)
        finally:
            torch.cuda.set_stream(stream)
        return Report(seen, scores, prompt_scores, self.copied.synchronize, self.seconds)

    def seconds(self) -> float:
        return self.begun.elapsed_time(self.ended) / 1000
