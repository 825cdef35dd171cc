"""Reading rounds: what a report says goes to the requests and their leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from surefoot.engine.stats import Progress
from surefoot.request import Drafting
from surefoot.sampling.logprobs import unpack
from surefoot.speculation.books import ReportColumns

if TYPE_CHECKING:
    from surefoot.engine.batch import Batch
    from surefoot.engine.reports import Report
    from surefoot.speculation.decisions import Decision
    from surefoot.speculation.size import Size


NO_DRAFTING = Drafting()
MANY = 16
"""Reports of so many requests are read in arrays, which takes longer for fewer."""
BITS = 10
"""Of each of the numbers that ``Draftings`` has together: those of a report from ``ACCEPTED`` to
``OFFERER``."""
PLACES = 1 << BITS * np.arange(6, dtype=np.int64)
_progress = partial(tuple.__new__, Progress)
"""Of a tuple; to call ``Progress`` takes three times as long."""


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


class Draftings(dict[int, Drafting]):
    """By what a report says of a request's drafts, as one number: one object for all of whom it
    says the same. In a crowd, to make one takes longer than all else of a request."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names`` are the proposers'."""
        super().__init__({0: NO_DRAFTING})
        self.names = names

    def __missing__(self, told: int) -> Drafting:
        numbers = (told >> BITS * place & (1 << BITS) - 1 for place in range(len(PLACES)))
        self[told] = self.make(*numbers)
        return self[told]

    def make(
        self, accepted: int, end: int, verified: int, whose: int, offered: int, offerer: int
    ) -> Drafting:
        """From what is in a report's columns."""
        name = self.names[whose] if verified else None
        offers = self.names[offerer] if offered else None
        return Drafting(name, offered, verified, accepted, offers)


def read_report(
    report: Report,
    batch: Batch,
    committed: np.ndarray,
    draftings: Draftings,
    columns: ReportColumns,
    longest: int,
    hosted: Mapping[int, tuple[int, int]],
) -> Landing:
    """Enter a landed round's tokens. ``committed`` int [spans]: how many each request of ``batch``
    got; 0 for those that no longer run. ``longest``: drafts of a request, at most, that the round
    verified. ``hosted`` says by slot who had how many drafts on offer for this very round."""
    requests = batch.group.requests
    rows = report.rows[: len(requests)]
    # Hundreds of requests pass here every two milliseconds, and a device waits for nothing else:
    # lists are made of all of them at once, and no object for each that others can share.
    landing = Landing()
    computed = counts = committed.tolist()
    first, most = columns.FIRST_TOKEN, 1 + longest
    if len(rows) < MANY:
        table = rows.tolist()
        drafting = _note_few(landing, table, counts, draftings, columns)
        tokens = [row[first : first + most] for row in table]
        ends = [row[columns.END] for row in table]
    else:
        drafting = _note_many(landing, rows, committed, draftings, columns)
        most = min(most, int(committed.max()))
        tokens = rows[:, first : first + most].tolist()
        ended = rows[:, columns.END]
        ends = ended.tolist() if ended.any() else []
    if hosted:
        _note_hosted(landing, drafting, batch, counts, draftings, hosted)
    if chunks := len(batch.chunks):
        # Rows of a prompt's end are kept already.
        computed = [*(count - 1 for count in counts[:chunks]), *counts[chunks:]]
    of_each = zip(counts, computed, requests, tokens, drafting, strict=True)
    for count, more, request, row, drafts in of_each:
        if not count:
            continue
        if count < most:
            del row[count:]
        if drafts is not NO_DRAFTING:
            request.landed.append((len(request.output), drafts))
        request.output += row
        request.computed += more
    items = list(map(_progress, zip(requests, tokens, drafting, strict=True)))
    landing.progress = list(compress(items, counts))
    if any(ends):
        every = zip(items, ends, counts, strict=True)
        landing.ended = [(item, end) for item, end, count in every if end and count]
    if report.scores is not None:
        for place, scores in zip(batch.group.scored, report.scores, strict=False):
            request, width = requests[place], requests[place].params.logprobs
            if committed[place] and width is not None:
                request.logprobs += unpack(scores, tokens[place], width)
    return landing


def _note_few(
    landing: Landing,
    table: list[list[int]],
    counts: list[int],
    draftings: Draftings,
    columns: ReportColumns,
) -> list[Drafting]:
    """What became of the drafts of a few requests, by request. ``table``: their rows."""
    found = []
    for row, count in zip(table, counts, strict=True):
        # Nothing of those who left; and of drafts that were right, some may lie behind a text's
        # end.
        if not count or not (row[columns.VERIFIED] or row[columns.OFFERED]):
            found.append(NO_DRAFTING)
            continue
        right, *numbers = row[columns.ACCEPTED : columns.FIRST_TOKEN]
        one = draftings.make(min(right, count), *numbers)
        landing.verified += one.verified
        landing.accepted += one.accepted
        landing.drafting += 1
        found.append(one)
    return found


def _note_many(
    landing: Landing,
    rows: np.ndarray,
    committed: np.ndarray,
    draftings: Draftings,
    columns: ReportColumns,
) -> list[Drafting]:
    """As ``_note_few``, of int32 [n, columns] and int [n]."""
    if not (rows[:, columns.VERIFIED] | rows[:, columns.OFFERED]).any():
        return [NO_DRAFTING] * len(rows)
    facts = rows[:, columns.ACCEPTED : columns.FIRST_TOKEN] * (committed > 0)[:, None]
    accepted, _, verified, _, offered, _ = facts.T
    np.minimum(accepted, committed, out=accepted)
    landing.verified, landing.accepted = int(verified.sum()), int(accepted.sum())
    landing.drafting = int(np.count_nonzero(verified | offered))
    return [draftings[number] for number in (facts @ PLACES).tolist()]


def _note_hosted(
    landing: Landing,
    drafting: list[Drafting],
    batch: Batch,
    counts: list[int],
    draftings: Draftings,
    hosted: Mapping[int, tuple[int, int]],
) -> None:
    """What the host had on offer is part of ``drafting``."""
    for place, slot in enumerate(batch.group.slots.tolist()):
        if counts[place] and slot in hosted:
            host, count = hosted[slot]
            before = drafting[place]
            landing.drafting += not before.verified and not before.offered
            drafting[place] = before._replace(hosted=count, host=draftings.names[host])
