"""Reading rounds: what a report says goes to the requests and their leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from surefoot.engine.stats import NO_DRAFTING, Drafting, Progress
from surefoot.kv.transaction import KVManager
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
    drafting: int = 0
    """Of these, how many had drafts verified or have some on offer."""
    ended: list[tuple[Progress, int]] = field(default_factory=list)
    """Whose texts the round ended, and how."""
    size: Size = field(init=False)
    decision: Decision = field(init=False)
    prompt_rows: int = 0
    verified: int = 0
    accepted: int = 0
    """Drafts, of all together."""
    seconds: float | None = None
    """What the device took, where that was measured."""


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
    # lists are made of all of them at once, and no object for each that others can share.
    landing, size, chunks = Landing(), kv.block_size, len(batch.chunks)
    first = columns.FIRST_TOKEN
    tokens = rows[:, first : first + 1 + longest].tolist()
    counts, *others = rows[:, :first].T.tolist()
    of_each = zip(counts, requests, leases, tokens, *others, strict=True)
    running, progress = Status.RUNNING, landing.progress
    for index, each in enumerate(of_each):
        count, request, lease, row, accepted, end, verified, whose, offered, offerer = each
        if not count or request.status is not running:
            continue
        del row[count:]
        drafting, stats = NO_DRAFTING, request.stats
        if verified:
            name, accepted = names[whose], min(accepted, count)
            stats.count(name, offered, verified, accepted)
            request.note_drafts(name, accepted)
            drafting = _drafting(
                name, offered, verified, accepted, names[offerer] if offered else None
            )
            landing.verified += verified
            landing.accepted += accepted
        else:
            stats.rounds += 1
            if offered:
                stats.offered += offered
                drafting = _drafting(None, offered, 0, 0, names[offerer])
        request.output += row
        before = request.computed
        # Rows of a prompt's end are kept already.
        request.computed = after = before + count - (index < chunks)
        if after // size > before // size:
            kv.keep(lease)
        if hosted and (count_on_host := hosted.get(int(batch.group.slots[index]))):
            drafting = _add_hosted(request, drafting, names, *count_on_host)
        if scores and index in scores and request.params.logprobs is not None:
            request.logprobs += unpack(scores[index], row, request.params.logprobs)
        item = Progress(request, row, drafting)
        progress.append(item)
        landing.drafting += drafting is not NO_DRAFTING
        if end:
            landing.ended.append((item, end))
    return landing


_drafting = lru_cache(maxsize=4096)(Drafting)
"""One object for all that are equal: to make one takes longer than all else of a request."""


def _add_hosted(
    request: Request, drafting: Drafting, names: Sequence[str], host: int, count: int
) -> Drafting:
    request.stats.offered += count
    return drafting._replace(hosted=count, host=names[host])
