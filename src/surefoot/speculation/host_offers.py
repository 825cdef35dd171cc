"""What proposers on the host offer to a request, and what is learnt of their chances.

The host knows the whole text of these requests, so it judges earlier offers by the tokens itself,
verified or not, and weighs a request's own record against that of all requests, as ``estimator``
does for the others on the device. Confidence is sorted into the same bins; where in an offer a
draft stands makes no difference here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.errors import SurefootError
from surefoot.request import Request
from surefoot.speculation.estimator import BINS, GLOBAL_DECAY, SLOT_DECAY, SLOT_PRIOR
from surefoot.speculation.host_proposer import HostDrafts, HostProposer
from surefoot.speculation.proposer import blamed

_FIRST_PRIOR = 4.0
"""Trials that a bin begins with, as successful as its confidence says."""


@dataclass(frozen=True)
class HostOffer:
    """Drafts of proposer number ``proposer`` that a request's grammar allows, and the chance of
    each and all before it."""

    proposer: int
    tokens: list[int]
    chances: list[float]


class HostOffers:
    """The host's proposers, whose numbers follow those of the device's."""

    def __init__(self, proposers: Sequence[HostProposer], first: int, vocab_size: int) -> None:
        """``first``: the number of the first one."""
        self.proposers = dict(enumerate(proposers, first))
        self.names = tuple(proposer.name for proposer in proposers)
        self.active = {number: item.name for number, item in self.proposers.items()}
        """Those that may offer: all but those that failed, and were switched off."""
        self._vocab_size = vocab_size
        self._records = {number: _Record() for number in self.proposers}

    def forget(self, slot: int) -> None:
        """Another request has the slot."""
        for record in self._records.values():
            record.forget(slot)

    def of(self, request: Request, most: int) -> HostOffer | None:
        """The most promising offer of up to ``most`` drafts for ``request``, whose grammar has
        followed its output. None: nobody has one."""
        best: HostOffer | None = None
        for number, name in self.active.items():
            record, proposer = self._records[number], self.proposers[number]
            record.learn(request)
            if most < 1 or not request.speculation.allows(name):
                continue
            with blamed(proposer, "propose"):
                drafts = proposer.propose(request, most)
                self._check(name, drafts)
            tokens = list(drafts.tokens)[:most]
            if tokens and request.grammar is not None:
                tokens = tokens[: request.grammar.allowed_prefix(tokens)]
            if not tokens:
                continue
            bins = [_bin(each) for each in drafts.confidence[: len(tokens)]]
            offer = HostOffer(number, tokens, record.chances(request.slot, bins))
            record.watch(request, tokens, bins)
            if best is None or sum(offer.chances) > sum(best.chances):
                best = offer
        return best

    def _check(self, name: str, drafts: object) -> None:
        """SurefootError if what a proposer offers is not what ``HostDrafts`` says."""
        problem = None
        if not isinstance(drafts, HostDrafts):
            problem = f"{type(drafts).__name__} instead of HostDrafts"
        elif len(drafts.tokens) != len(drafts.confidence):
            problem = f"{len(drafts.tokens)} tokens with {len(drafts.confidence)} confidences"
        elif not all(0 <= token < self._vocab_size for token in drafts.tokens):
            problem = "tokens outside the vocabulary"
        if problem is not None:
            raise SurefootError("proposers", f"{name!r} offers {problem}")


class _Record:
    """Of one proposer: float64 hits and trials by bin, of all requests and of each slot's, and by
    slot the offer in view: (length of the output before it, tokens, bins)."""

    def __init__(self) -> None:
        rates = (np.arange(BINS) + 0.5) / BINS
        self._all = np.stack((rates * _FIRST_PRIOR, np.full(BINS, _FIRST_PRIOR)))
        self._own: dict[int, np.ndarray] = {}
        self._watched: dict[int, tuple[int, list[int], list[int]]] = {}

    def forget(self, slot: int) -> None:
        self._own.pop(slot, None)
        self._watched.pop(slot, None)

    def watch(self, request: Request, tokens: list[int], bins: list[int]) -> None:
        """Take an offer in view, unless there is one."""
        self._watched.setdefault(request.slot, (len(request.output), tokens, bins))

    def learn(self, request: Request) -> None:
        """Enter the offer in view once the text has contradicted or confirmed all of it."""
        if (watched := self._watched.get(request.slot)) is None:
            return
        first, tokens, bins = watched
        text = request.output[first : first + len(tokens)]
        right = [a == b for a, b in zip(tokens, text, strict=False)]
        tried = right.index(False) + 1 if False in right else len(right)
        if tried == len(right) < len(tokens) and all(right):
            return
        del self._watched[request.slot]
        own = self._own.setdefault(request.slot, np.zeros((2, BINS)))
        for place in range(tried):
            for table, decay in ((own, SLOT_DECAY), (self._all, GLOBAL_DECAY)):
                table[:, bins[place]] *= decay
                table[:, bins[place]] += right[place], 1.0

    def chances(self, slot: int, bins: list[int]) -> list[float]:
        """Of drafts in these bins: the chance of each and all before it."""
        hits, trials = self._all
        rates = hits / trials
        if (own := self._own.get(slot)) is not None:
            rates = (own[0] + SLOT_PRIOR * rates) / (own[1] + SLOT_PRIOR)
        return np.cumprod(rates[bins]).tolist()


def _bin(confidence: float) -> int:
    return min(max(int(confidence * BINS), 0), BINS - 1)


def room_for(request: Request, most: int) -> int:
    """Drafts that a round may verify for a request that decodes, ``most`` at most: one less than
    the tokens it may still get, and no more than it wants itself."""
    if request.length - request.computed > 1:
        return 0
    wanted = request.speculation.max_draft_tokens
    limit = most if wanted is None else min(wanted, most)
    return min(limit, request.max_length - request.length - 1)
