"""Reading rounds: what a report says goes to the requests and their leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from surefoot.engine.stats import NO_DRAFTING, Drafting, Progress
from surefoot.kv.transaction import KVManager
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
    committed: np.ndarray,
    kv: KVManager,
    names: Sequence[str],
    columns: ReportColumns,
    longest: int,
    hosted: Mapping[int, tuple[int, int]],
) -> Landing:
    """Enter a landed round's tokens. ``committed`` int [spans]: how many each request of ``batch``
    got; 0 for those that no longer run. ``longest``: drafts of a request, at most, that the round
    verified. ``names`` are the proposers'; ``hosted`` says by slot who had how many drafts on offer
    for this very round."""
    requests = batch.group.requests
    rows = report.rows[: len(requests)]
    # Hundreds of requests pass here every two milliseconds, and a device waits for nothing else:
    # lists are made of all of them at once, and no object for each that others can share.
    landing, size = Landing(), kv.block_size
    progress = landing.progress
    first = columns.FIRST_TOKEN
    tokens = rows[:, first : first + 1 + longest].tolist()
    draftings = _note_drafts(landing, rows, batch, committed, names, columns)
    if hosted:
        _note_hosted(draftings, batch, committed, names, hosted)
    landing.drafting = len(draftings) - draftings.count(NO_DRAFTING)
    computed = counts = committed.tolist()
    if chunks := len(batch.chunks):
        # Rows of a prompt's end are kept already.
        computed = [*(count - 1 for count in counts[:chunks]), *counts[chunks:]]
    ends = rows[:, columns.END].tolist()
    of_each = zip(counts, computed, requests, tokens, draftings, ends, strict=True)
    for count, more, request, row, drafting, end in of_each:
        if not count:
            continue
        if count <= longest:
            del row[count:]
        request.stats.rounds += 1
        request.output += row
        request.computed = after = request.computed + more
        if after % size < more:
            # A block ends among these tokens.
            kv.keep(kv.leases[request.request_id])
        item = Progress(request, row, drafting)
        progress.append(item)
        if end:
            landing.ended.append((item, end))
    if report.scores is not None:
        for place, scores in zip(batch.group.scored, report.scores, strict=False):
            request, width = requests[place], requests[place].params.logprobs
            if committed[place] and width is not None:
                request.logprobs += unpack(scores, tokens[place], width)
    return landing


def _note_drafts(
    landing: Landing,
    rows: np.ndarray,
    batch: Batch,
    committed: np.ndarray,
    names: Sequence[str],
    columns: ReportColumns,
) -> list[Drafting]:
    """Enter what became of the drafts, before the tokens are added. Returns it by request."""
    requests, draftings = batch.group.requests, [NO_DRAFTING] * len(rows)
    told = rows[:, columns.VERIFIED] | rows[:, columns.OFFERED]
    (places,) = (told * committed).nonzero()
    if not len(places):
        return draftings
    table = zip(places.tolist(), *rows[places, : columns.FIRST_TOKEN].T.tolist(), strict=True)
    for place, count, accepted, _, verified, whose, offered, offerer in table:
        request, offers = requests[place], names[offerer] if offered else None
        if not verified:
            request.stats.offered += offered
            draftings[place] = _drafting(None, offered, 0, 0, offers)
            continue
        name, accepted = names[whose], min(accepted, count)
        request.note_drafts(name, accepted)
        request.stats.count_drafts(name, offered, verified, accepted)
        landing.verified += verified
        landing.accepted += accepted
        draftings[place] = _drafting(name, offered, verified, accepted, offers)
    return draftings


_drafting = lru_cache(maxsize=4096)(Drafting)
"""One object for all that are equal: to make one takes longer than all else of a request."""


def _note_hosted(
    draftings: list[Drafting],
    batch: Batch,
    committed: np.ndarray,
    names: Sequence[str],
    hosted: Mapping[int, tuple[int, int]],
) -> None:
    """Add what the host had on offer, as ``read_report`` has it."""
    for place, slot in enumerate(batch.group.slots.tolist()):
        if committed[place] and slot in hosted:
            host, count = hosted[slot]
            batch.group.requests[place].stats.offered += count
            draftings[place] = draftings[place]._replace(hosted=count, host=names[host])
