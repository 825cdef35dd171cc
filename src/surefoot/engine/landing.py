"""Reading recorded rounds: what a report says goes to the requests and their leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from surefoot.engine.graphs import Report
from surefoot.engine.stats import NO_DRAFTING, Drafting, Progress
from surefoot.kv.transaction import KVManager, Lease
from surefoot.request import Request, Status
from surefoot.sampling.logprobs import unpack


@dataclass
class Landing:
    """What a round gave the requests still running, in their order."""

    progress: list[Progress] = field(default_factory=list)
    ended: list[tuple[Progress, int]] = field(default_factory=list)
    """Of these, whose texts the round ended, and how."""
    drafting: bool = False
    """Whether drafts were verified or are on offer."""


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
    rows = report.rows[: len(requests)]
    if report.scores is None and not rows[:, 3:6:2].any():
        return _read_plain(rows, requests, leases, kv)
    landing, scores = Landing(drafting=True), report.scores
    told: list[list[int]] = rows[:, : 6 + longest].tolist()
    for index, (request, lease, row) in enumerate(zip(requests, leases, told, strict=True)):
        count, accepted, end, drafted, whose, offered, *tokens = row
        if not count or request.status is Status.FINISHED:
            continue
        output, tokens = request.output, tokens[:count]
        kv.keep(lease, (output[-1] if output else request.prompt[-1], *tokens[:-1]))
        name = names[whose] if drafted else None
        drafts = min(accepted, count) if drafted else 0
        request.stats.count(name, offered, drafted, drafts)
        request.note_drafts(name, drafts)
        output += tokens
        request.computed += count
        if scores is not None and request.params.logprobs is not None:
            request.logprobs += unpack(scores[index], tokens, request.params.logprobs)
        item = Progress(request, tokens, Drafting(name, offered, drafted, drafts))
        landing.progress.append(item)
        if end:
            landing.ended.append((item, end))
    return landing


def _read_plain(
    rows: torch.Tensor, requests: Sequence[Request], leases: Sequence[Lease], kv: KVManager
) -> Landing:
    """Nobody drafts: a token each."""
    # Hundreds of requests pass here every two milliseconds, and a device waits for nothing else:
    # no list is made that is not needed, no function called.
    landing, keep, caching = Landing(), kv.keep, kv.prefix_caching
    counts, ends = rows[:, 0:3:2].t().tolist()
    for request, lease, count, end, token in zip(
        requests, leases, counts, ends, rows[:, 6:7].tolist(), strict=True
    ):
        if not count or request.status is Status.FINISHED:
            continue
        output = request.output
        if caching:
            keep(lease, output[-1:] or request.prompt[-1:])
        else:
            lease.committed += 1
        output += token
        request.computed += 1
        request.stats.rounds += 1
        item = Progress(request, token, NO_DRAFTING)
        landing.progress.append(item)
        if end:
            landing.ended.append((item, end))
    return landing
