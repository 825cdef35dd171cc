"""Reading recorded rounds: what a report says goes to the requests and their leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.engine.graphs import Report
from surefoot.engine.stats import NO_DRAFTING, Drafting, Progress
from surefoot.kv.transaction import KVManager, Lease
from surefoot.request import Request, Status
from surefoot.sampling.logprobs import unpack


@dataclass
class Landing:
    """What a round gave the requests still running, in their order."""

    progress: list[Progress] = field(default_factory=list)
    drafting: list[Progress] = field(default_factory=list)
    """Of these, who had drafts verified or has some on offer."""
    ended: list[tuple[Progress, int]] = field(default_factory=list)
    """Whose texts the round ended, and how."""


def read_report(
    report: Report,
    requests: Sequence[Request],
    leases: Sequence[Lease],
    kv: KVManager,
    names: Sequence[str],
    longest: int,
) -> Landing:
    """Enter a landed round's tokens, at most ``longest`` for each of ``requests``. Those that have
    ended are left alone. ``names`` are the proposers'."""
    rows, scores = report.rows[: len(requests)], report.scores
    # Hundreds of requests pass here every two milliseconds, and a device waits for nothing else:
    # for those that do not draft no list is made that is not needed.
    landing, keep = Landing(), kv.keep
    counts, _, ends, drafted, _, offered = rows[:, :6].t().tolist()
    first: list[list[int]] = rows[:, 6:7].tolist()
    if scores is not None:
        drafted = [1] * len(requests)
    told: list[list[int]] = rows[:, : 6 + longest].tolist() if any(drafted) else []
    for index, (request, lease, count, end, token, drafts, offers) in enumerate(
        zip(requests, leases, counts, ends, first, drafted, offered, strict=True)
    ):
        if not count or request.status is Status.FINISHED:
            continue
        if drafts:
            item = _read_drafts(request, lease, told[index], kv, names)
            landing.drafting.append(item)
            if scores is not None and request.params.logprobs is not None:
                request.logprobs += unpack(scores[index], item.tokens, request.params.logprobs)
        else:
            output, stats = request.output, request.stats
            keep(lease, output[-1:] or request.prompt[-1:])
            output += token
            request.computed += 1
            stats.rounds += 1
            if offers:
                stats.offered += offers
                item = Progress(request, token, Drafting(None, offers))
                landing.drafting.append(item)
            else:
                item = Progress(request, token, NO_DRAFTING)
        landing.progress.append(item)
        if end:
            landing.ended.append((item, end))
    return landing


def _read_drafts(
    request: Request, lease: Lease, row: Sequence[int], kv: KVManager, names: Sequence[str]
) -> Progress:
    count, accepted, _, drafted, whose, offered, *tokens = row
    output, tokens = request.output, tokens[:count]
    kv.keep(lease, (output[-1] if output else request.prompt[-1], *tokens[:-1]))
    name = names[whose] if drafted else None
    drafts = min(accepted, count) if drafted else 0
    request.stats.count(name, offered, drafted, drafts)
    request.note_drafts(name, drafts)
    output += tokens
    request.computed += count
    return Progress(request, tokens, Drafting(name, offered, drafted, drafts))
