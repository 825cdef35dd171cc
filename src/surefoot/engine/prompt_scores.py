"""What is wanted of prompts' own tokens: logprobs, and hidden states to be pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.upload import upload
from surefoot.request import Request, Status
from surefoot.sampling.logprobs import unpack
from surefoot.speculation.scoring import PromptReads

if TYPE_CHECKING:
    from surefoot.engine.batch import Batch
    from surefoot.engine.reports import Report


def prompt_targets(batch: Batch) -> list[int]:
    """By prompt chunk, how many tokens of the prompt are predicted by its rows and still lack their
    logprob, if these are wanted."""
    return [_targets(*pair) for pair in zip(batch.group.requests, batch.chunks, strict=False)]


def _targets(request: Request, rows: int) -> int:
    if request.prompt_scored or request.pooling is not None:
        return 0
    return max(0, min(request.computed + rows, len(request.prompt) - 1) - request.computed)


def prompt_reads(batch: Batch, targets: Sequence[int], device: torch.device) -> PromptReads | None:
    """What a round is to return of its prompts' rows, as of ``prompt_targets``; None: nothing."""
    rows, pooled, first = [], [], 0
    for request, chunk, count in zip(batch.group.requests, batch.chunks, targets, strict=False):
        rows.extend(range(first, first + count))
        if request.pooling is not None:
            pooled.append((first, chunk))
        first += chunk
    if not rows and not pooled:
        return None
    return PromptReads(upload(rows, device) if rows else None, tuple(pooled))


def read_prompt_scores(report: Report, batch: Batch, targets: Sequence[int]) -> None:
    """Enter logprobs of prompt tokens, so many (``targets``) for each chunk of ``batch``, and what
    was pooled of prompts."""
    pools = iter(report.prompt_scores.pooled)
    for request, rows in zip(batch.group.requests, batch.chunks, strict=False):
        if request.pooling is not None:
            total = next(pools)
            if request.status is Status.RUNNING:
                request.pooling.add(rows, total.tolist())
    if not report.prompt_scores.logprobs:
        return
    scores = torch.cat(report.prompt_scores.logprobs).cpu()
    first = 0
    for request, count in zip(batch.group.requests, targets, strict=False):
        if count and request.status is Status.RUNNING:
            start = 1 + len(request.prompt_logprobs)
            tokens = request.prompt[start : start + count]
            width = request.params.prompt_logprobs or 0
            request.prompt_logprobs += unpack(scores[first:], tokens, width)
        first += count
