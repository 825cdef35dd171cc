"""Reading rounds: what a report says goes to the requests and their leases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from surefoot.engine.stats import NO_DRAFTING, Drafting, Progress
from surefoot.kv.transaction import KVManager, Lease
from surefoot.request import Request, Status
from surefoot.sampling.logprobs import unpack
from surefoot.speculation.books import ReportColumns

if TYPE_CHECKING:
    from surefoot.engine.batch import Batch
    from surefoot.engine.reports import Report
    from surefoot.speculation.decisions import Decision
    from surefoot.speculation.size import Size


@dataclass
class Landing:
    """What a round gave the requests still running, in their order."""

    progress: list[Progress] = field(default_factory=list)
    drafting: list[Progress] = field(default_factory=list)
    """Of these, who had drafts verified or has some on offer."""
    ended: list[tuple[Progress, int]] = field(default_factory=list)
    """Whose texts the round ended, and how."""
    size: Size = field(init=False)
    decision: Decision = field(init=False)
    prompt_rows: int = 0
    seconds: float | None = None
    """What the device took, where that was measured."""

    @property
    def verified(self) -> int:
        return sum(item.drafting.verified for item in self.drafting)

    @property
    def accepted(self) -> int:
        return sum(item.drafting.accepted for item in self.drafting)


def read_report(
    report: Report,
    batch: Batch,
    kv: KVManager,
    names: Sequence[str],
    columns: ReportColumns,
    longest: int,
    hosted: Mapping[int, tuple[int, int]],
) -> Landing:
    """Enter a landed round's tokens: those of at most ``longest`` drafts for each request of
    ``batch``, and one more. Requests that have ended are left alone. ``names`` are the
    proposers'; ``hosted`` says by slot who had how many drafts on offer for this very round."""
    requests, leases = batch.group.requests, batch.group.leases
    rows = report.rows[: len(requests)]
    scores: dict[int, torch.Tensor] = {}
    if report.scores is not None:
        scores.update(zip(batch.group.scored, report.scores, strict=False))
    # Hundreds of requests pass here every two milliseconds, and a device waits for nothing else:
    # for those that do not draft no list is made that is not needed.
    landing, size, chunks = Landing(), kv.block_size, len(batch.chunks)
    end_of_row = columns.FIRST_TOKEN + 1 + longest
    by_column = rows[:, : columns.FIRST_TOKEN + 1].T
    counts, _, ends, verified, _, offered, offerers, first = by_column.tolist()
    of_each = zip(requests, leases, counts, ends, first, verified, offered, offerers, strict=True)
    told: Iterator[list[int]] = iter(())
    if longest:
        # Of all that drafted at once: a call for each would take as long as all of them together.
        told = iter(rows[by_column[columns.VERIFIED].nonzero()[0], :end_of_row].tolist())
    offerer: int
    running, progress = Status.RUNNING, landing.progress
    for index, (request, lease, count, end, token, drafts, offers, offerer) in enumerate(of_each):
        row = next(told) if drafts else [token]
        if not count or request.status is not running:
            continue
        if drafts:
            item = _read_drafts(request, lease, row, kv, names, index < chunks)
            landing.drafting.append(item)
        else:
            stats = request.stats
            request.output.append(token)
            if index >= chunks:
                request.computed += 1
                if not request.computed % size:
                    kv.keep(lease)
            stats.rounds += 1
            if offers:
                stats.offered += offers
                item = Progress(request, row, Drafting(None, offers, offerer=names[offerer]))
                landing.drafting.append(item)
            else:
                item = Progress(request, row, NO_DRAFTING)
        if hosted and (count_on_host := hosted.get(int(batch.group.slots[index]))):
            item = _add_hosted(item, names, *count_on_host)
            if not drafts and not offers:
                landing.drafting.append(item)
        if scores and index in scores and request.params.logprobs is not None:
            request.logprobs += unpack(scores[index], item.tokens, request.params.logprobs)
        progress.append(item)
        if end:
            landing.ended.append((item, end))
    return landing


def _read_drafts(
    request: Request,
    lease: Lease,
    row: Sequence[int],
    kv: KVManager,
    names: Sequence[str],
    prompt: bool,
) -> Progress:
    """Of a request that had drafts verified. ``prompt``: the round ran the end of a prompt, whose
    rows are kept already."""
    count, accepted, _, verified, whose, offered, offerer = row[: ReportColumns.FIRST_TOKEN]
    tokens = row[ReportColumns.FIRST_TOKEN : ReportColumns.FIRST_TOKEN + count]
    name, drafts = names[whose], min(accepted, count)
    request.stats.count(name, offered, verified, drafts)
    request.note_drafts(name, drafts)
    request.output += tokens
    size, before = kv.block_size, request.computed
    request.computed = after = before + count - prompt
    if after // size > before // size:
        kv.keep(lease)
    drafting = Drafting(name, offered, verified, drafts, names[offerer] if offered else None)
    return Progress(request, tokens, drafting)


def _add_hosted(item: Progress, names: Sequence[str], host: int, count: int) -> Progress:
    item.request.stats.offered += count
    drafting = item.drafting._replace(hosted=count, host=names[host])
    return item._replace(drafting=drafting)


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
