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
from weakref import WeakKeyDictionary

from surefoot.request import Request
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import Decision
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, kind_of

COST = 0.04
"""What keeping up takes of the time of rounds without drafts: so much was measured with SmolLM2 and
its drafter on a CPU, four and eight requests at once. What a drafter gains is held against it."""
ENOUGH = 256
"""Rounds after which it is known what was gained."""
_FEW = 0.25
"""The share of a round's requests that may lack drafters if it is to tell what these gain: they
take the same time to draft for few."""
_SHORTEST, _LONGEST = 8, 64
"""How many times as many rounds requests do without drafters as they were served before; twice as
many each time that this was in vain."""


_KINDS = (GREEDY, DRAWN, ADJUSTED)
"""A round is of the last kind that one of its requests is of."""


@dataclass(eq=False)
class Record:
    """Of requests that were let in under like conditions. Rounds count by their share of the
    requests: 0.5 where half are such."""

    served: float = 0.0
    """Rounds with drafters, of late."""
    known: float = 0.0
    """Of these, in which nearly all requests were served."""
    gained: float = 0.0
    """Tokens in those beyond what a request would have got in their time without drafts."""
    without: float = 0.0
    """Rounds without drafters since these were given up."""
    given_up: bool = False
    patience: int = _SHORTEST // 2
    """How many times as many rounds without as with drafters."""

    @property
    def told(self) -> bool:
        """Whether it is known what drafters gain, or cannot be: others lack them all the time."""
        return self.known >= ENOUGH or self.served >= 2 * ENOUGH

    @property
    def pays(self) -> bool:
        return self.gained > COST * self.known

    def give_up(self) -> None:
        self.given_up, self.without = True, 0.0
        self.patience = min(2 * self.patience, _LONGEST)

    def look_again(self) -> None:
        self.given_up = False
        self.served = self.known = self.gained = 0.0

    def passed(self, served: float, without: float, gain: float | None) -> None:
        """A round. ``gain``: tokens; None: it does not tell."""
        self.without += without
        self.served += served
        if gain is not None:
            self.known += served
            self.gained += served * gain
        if self.served >= 4 * ENOUGH:
            self.served, self.known, self.gained = (
                each / 2 for each in (self.served, self.known, self.gained)
            )


class Upkeep:
    """Lets requests in with drafters or without."""

    def __init__(self, drafters: Collection[int]) -> None:
        """``drafters``: proposers with KV of their own, by index."""
        self.drafters = frozenset(drafters)
        self.records: dict[tuple[int, SamplingStages], Record] = {}
        self._record_of: WeakKeyDictionary[Request, Record] = WeakKeyDictionary()
        self._kind = GREEDY
        """Of the last round, with the requests that were let in since."""
        self._requests: Sequence[Request] = ()
        self._shares: list[tuple[Record, float, float]] = []
        """Of the last round's requests, those with drafters and those without, by record."""
        self._tells = False

    def choose(self, request: Request, running: int, load: int) -> None:
        """Set ``drafters`` and ``declined`` of a request that is about to be let in beside so many
        ``running`` ones. ``load``: all that run or wait, itself included. One that names its
        drafter keeps it."""
        request.drafters, request.declined = request.drafters | request.declined, frozenset()
        kind = kind_of(SamplingStages.of((request.params,)))
        self._kind = max(self._kind, kind, key=_KINDS.index) if running else kind
        if not request.drafters or request.speculation.method != "auto":
            return
        key = round(math.log2(load)), self._kind
        record = self._record_of[request] = self.records.setdefault(key, Record())
        if not self._serves(record):
            request.drafters, request.declined = frozenset(), request.drafters

    def _serves(self, record: Record) -> bool:
        if record.given_up:
            if record.without < record.patience * record.served:
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
        self, requests: Sequence[Request], decision: Decision, kind: SamplingStages
    ) -> None:
        """Such a round was launched, in which these requests sample. ``kind`` as in
        ``Situation``."""
        self._kind = kind
        if requests is not self._requests:
            self._requests = requests
            self._share(requests)
        expected = decision.expected
        gain = 0.0
        if expected.trial is None and not self.drafters.isdisjoint(decision.proposers):
            seconds = expected.seconds - expected.prompt_seconds
            gain = expected.tokens - seconds / expected.plain_seconds
        for record, served, without in self._shares:
            record.passed(served, without, gain if self._tells else None)

    def _share(self, requests: Sequence[Request]) -> None:
        counts: dict[Record, list[int]] = {}
        for request in requests:
            if (record := self._record_of.get(request)) is not None:
                counts.setdefault(record, [0, 0])[bool(request.declined)] += 1
        total = len(requests)
        self._shares = [(key, a / total, b / total) for key, (a, b) in counts.items()]
        self._tells = sum(without for *_, without in self._shares) <= _FEW
