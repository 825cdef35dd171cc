"""Whether drafters serve a request at all: where they did not pay lately, it is let in without.

A drafter with KV of its own writes keys for every token of the requests that it serves, also while
it never drafts because that does not pay. A request that is let in without drafters costs nothing
of that, and gets no drafts of theirs until it ends, or is preempted and let in again. What served
requests gained is known by how many there were when they were let in, and by the kind of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from surefoot.request import Request
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import Decision
from surefoot.speculation.size import GREEDY, kind_of

_CROWD = 4
"""So many requests and more are a crowd."""
ENOUGH = 512.0
"""The time, in rounds without drafts, after which it is known what a crowd gains; that of fewer
requests has to be seen for longer, as it depends on their texts."""
_FEW = 0.25
"""The share of a round's requests that may lack drafters if it is to tell what these gain: they
take the same time to draft for few."""
_SHORTEST, _LONGEST = 8, 64
"""How many times as long a crowd does without drafters as it was served before; twice as many each
time that this was in vain. Fewer requests, who pay less for it, look again as much sooner."""


@dataclass(eq=False)
class Record:
    """Of requests that were let in under like conditions. Times are in rounds without drafts and
    prompts, and count by their share of the requests: half where half are such."""

    load: int
    """Requests that ran or waited, about."""
    served: float = 0.0
    """Time with drafters, of late."""
    known: float = 0.0
    """Of this, in which nearly all requests were served."""
    gained: float = 0.0
    """Tokens in that beyond what a request would have got without drafters: what drafts gained,
    less what keeping up with all other rows took."""
    without: float = 0.0
    """Time without drafters since these were given up."""
    given_up: bool = False
    patience: int = _SHORTEST // 2
    """How many times as long a crowd would be without as with drafters."""

    @property
    def weight(self) -> float:
        """Their number, against a crowd's."""
        return min(1.0, self.load / _CROWD)

    @property
    def enough(self) -> float:
        return ENOUGH / self.weight

    @property
    def told(self) -> bool:
        """Whether it is known what drafters gain, or cannot be: others lack them all the time."""
        return self.known >= self.enough or self.served >= 2 * self.enough

    @property
    def pays(self) -> bool:
        return self.gained > 0.0

    @property
    def rested(self) -> bool:
        """Whether it is time to look again."""
        return self.without >= self.patience * self.weight * self.served

    def give_up(self) -> None:
        self.given_up, self.without = True, 0.0
        self.patience = min(2 * self.patience, _LONGEST)

    def look_again(self) -> None:
        self.given_up = False
        self.served = self.known = self.gained = 0.0

    def passed(self, served: bool, share: float, time: float, gain: float | None) -> None:
        """A round of which such a ``share`` was ``served``, or went without. ``gain``: tokens;
        None: it does not tell."""
        if not served:
            self.without += share * time
            return
        self.served += share * time
        if gain is not None:
            self.known += share * time
            self.gained += share * gain
        if self.served >= 4 * self.enough:
            self.served, self.known, self.gained = (
                each / 2 for each in (self.served, self.known, self.gained)
            )


class Case(NamedTuple):
    """What a ``record`` counts a request as: one that drafters serve, or one without."""

    record: Record
    served: bool


class Upkeep:
    """Lets requests in with drafters or without."""

    def __init__(self, drafters: Collection[int], slots: int) -> None:
        """``drafters``: proposers with KV of their own, by index; for requests in so many
        ``slots``."""
        self.drafters = frozenset(drafters)
        self.records: dict[tuple[int, SamplingStages], Record] = {}
        self._kind = GREEDY
        """Of the last round, with the requests that were let in since."""
        self._cases: dict[Case | None, int] = {None: 0}
        """Numbers of what requests count as; ``Request.upkeep`` is one of them."""
        self._counts_as = np.zeros(slots, dtype=np.int64)
        """These numbers, by slot: hundreds of requests are counted in a round."""
        self._slots: np.ndarray | None = None
        """Of the last round's requests, if nobody was let in since."""
        self._shares: list[tuple[Case, float]] = []
        """What part of them counts as what."""
        self._tells = False

    def choose(self, request: Request, running: int, load: int) -> None:
        """Set ``drafters`` and ``declined`` of a request that is about to be let in beside so many
        ``running`` ones. ``load``: all that run or wait, itself included. One that names its
        drafter keeps it."""
        request.drafters, request.declined = request.drafters | request.declined, frozenset()
        request.upkeep = 0
        own = SamplingStages.of((request.params,))
        kind = kind_of(own)
        if running and kind is not self._kind:
            kind = kind_of(SamplingStages.together((own, self._kind)))
        self._kind = kind
        if not request.drafters or request.speculation.method != "auto":
            return
        about = 2 ** round(math.log2(load))
        record = self.records.setdefault((about, self._kind), Record(about))
        serves = self._serves(record)
        request.upkeep = self._cases.setdefault(Case(record, serves), len(self._cases))
        if not serves:
            request.drafters, request.declined = frozenset(), request.drafters

    def enter(self, requests: Sequence[Request]) -> None:
        """They were let in, and have slots now."""
        for request in requests:
            self._counts_as[request.slot] = request.upkeep
        self._slots = None

    def _serves(self, record: Record) -> bool:
        if record.given_up:
            if not record.rested:
                return False
            # All others, too: half a batch would not tell.
            for each in self.records.values():
                if each.given_up:
                    each.look_again()
        elif record.told:
            if not record.pays:
                record.give_up()
                return False
            record.patience = _SHORTEST // 2
        return True

    def launched(
        self,
        slots: np.ndarray,
        decision: Decision,
        kind: SamplingStages,
        prompt_rows: int,
        row_seconds: float,
    ) -> None:
        """Such a round was launched, in which the requests in ``slots`` (int64 [n], n > 0) sample,
        with so many rows of prompts. ``kind`` as in ``Situation``; ``row_seconds``: what drafters
        take to keep up with a row that they do not draft behind."""
        self._kind = kind
        if slots is not self._slots:
            self._slots = slots
            self._share(slots)
        expected = decision.expected
        plain, gain, kept = expected.plain_seconds, 0.0, prompt_rows
        if plain <= 0.0:
            # Somebody else decides, who believes nothing: a fixed number of drafts is measured.
            return
        if self.drafters.isdisjoint(decision.proposers):
            kept += len(slots)
        elif expected.trial is None:
            seconds = expected.seconds - expected.prompt_seconds
            gain = expected.tokens - seconds / plain
        gain -= kept * row_seconds / plain
        for case, share in self._shares:
            known = gain if self._tells else None
            case.record.passed(case.served, share, expected.seconds / plain, known)

    def _share(self, slots: np.ndarray) -> None:
        counts = np.bincount(self._counts_as[slots], minlength=len(self._cases)).tolist()
        pairs = zip(self._cases, counts, strict=True)
        self._shares = [(case, count / len(slots)) for case, count in pairs if case and count]
        self._tells = sum(share for case, share in self._shares if not case.served) <= _FEW
