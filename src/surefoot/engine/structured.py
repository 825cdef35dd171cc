"""Grammars in a round: what they cut from the offers, and the masks of its rows. Host-side.

A request with a grammar takes part in a round once its last report was read: its offer is cut
before the first draft that the grammar forbids, or replaced by a better one of the proposers that
work on the host, and the masks of the rows that it will sample are sent to its slot, all behind the
rounds in flight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from surefoot.engine.reported import ReportedOffers
from surefoot.kernels.upload import Uploads, places_of, sending
from surefoot.request import Request
from surefoot.speculation.books import LEAST, BookKeeping
from surefoot.speculation.host_offers import HostOffer, HostOffers, room_for
from surefoot.structured import TextGrammar

MAX_HOST_SECONDS = 0.001
"""Of a launch, for offers that the host makes: who is left goes without."""


class GrammarMasks:
    """Writes what the next round of requests with grammars needs."""

    def __init__(
        self,
        books: BookKeeping,
        reported: ReportedOffers,
        hosts: HostOffers,
    ) -> None:
        self.books = books
        self.reported = reported
        self.hosts = hosts
        self.state = books.state
        self._known: dict[int, tuple[int, list[int], list[int]]] = {}
        """By slot, the last offer read: whose, tokens, parents."""
        self._entered: dict[int, tuple[int, HostOffer]] = {}
        """By slot, the last offer of the host that replaced the device's, and the length of the
        output that it follows."""
        self._turn = 0

    def forget(self, slot: int) -> None:
        """Another request has the slot, and nothing is on offer there."""
        self._known.pop(slot, None)
        self._entered.pop(slot, None)
        self.hosts.forget(slot)

    def note(self, slot: int, whose: int, tokens: list[int], parents: list[int] | None) -> None:
        """A report told of an offer."""
        self._known[slot] = whose, tokens, parents or list(range(-1, len(tokens) - 1))

    def write(self, requests: Sequence[Request]) -> dict[int, tuple[int, int]]:
        """Cut or replace the offers of ``requests``, which sample in the next round, and write
        their masks. Returns by slot who has how many drafts on offer on the host."""
        table, entries = self.state.mask_bits.numpy(), 1 + self.state.max_drafts
        kept: dict[int, int] = {}
        hosted: dict[int, HostOffer] = {}
        left = MAX_HOST_SECONDS
        self._turn += 1
        for place in range(len(requests)):
            # Another one is the first each time: none is always without an offer.
            request = requests[(place + self._turn) % len(requests)]
            assert request.grammar is not None
            slot = request.slot
            _, tokens, parents = self._known.get(slot, (0, [], []))
            length = kept[slot] = _allowed(request, tokens, parents, len(tokens))
            request.grammar.sync(request.output)
            self.reported.cut(slot, length)
            own = self._entered_for(request)
            if own is None and left > 0.0:
                began = time.perf_counter()
                own = self.hosts.of(request, room_for(request, self.state.max_drafts))
                left -= time.perf_counter() - began
            if own is not None and sum(own.chances) > self.reported.gain(slot, length):
                hosted[slot] = own
                self._entered[slot] = len(request.output), own
                tokens, length = own.tokens, len(own.tokens)
                parents = list(range(-1, length - 1))
            self.reported.host(slot, own.chances if own and slot in hosted else None)
            bits = table[slot * entries :][: 1 + length]
            _write_masks(request.grammar, tokens[:length], parents[:length], bits)
        with sending(self.state.device) as uploads:
            self._cut(kept, uploads)
        # Behind the cut, which would shorten these offers, too: whoever is called is called when
        # all is written.
        with sending(self.state.device) as uploads:
            self._replace(hosted, uploads)
        return {slot: (item.proposer, len(item.tokens)) for slot, item in hosted.items()}

    def _entered_for(self, request: Request) -> HostOffer | None:
        """The host's offer that stands on the device already: the round that it was made for was
        not launched, for want of room."""
        length, offer = self._entered.get(request.slot, (-1, None))
        return offer if length == len(request.output) else None

    def _replace(self, hosted: dict[int, HostOffer], uploads: Uploads) -> None:
        """Put the host's offers in the place of those that proposers made on the device."""
        if not hosted:
            return
        offers, slots = self.books.offers, np.array(list(hosted))
        whose = np.array([[offer.proposer, len(offer.tokens)] for offer in hosted.values()])
        tokens = np.zeros((len(hosted), self.state.max_drafts), dtype=np.int64)
        chances = np.zeros(tokens.shape, dtype=np.float32)
        for place, offer in enumerate(hosted.values()):
            tokens[place, : len(offer.tokens)] = offer.tokens
            chances[place, : len(offer.tokens)] = np.maximum(offer.chances, LEAST)
        places = places_of(slots, offers.tokens.shape, 0)
        uploads.write(offers.proposer, slots, whose[:, 0])
        uploads.write(offers.lengths, slots, whose[:, 1])
        uploads.write(offers.tokens, places, tokens)
        uploads.write(offers.chances, places, chances)
        if offers.parents is not None:
            chains = np.tile(np.arange(-1, tokens.shape[1] - 1), (len(hosted), 1))
            uploads.write(offers.parents, places, chains)

    def _cut(self, kept: dict[int, int], uploads: Uploads) -> None:
        shorter = {
            slot: length for slot, length in kept.items()
            if slot in self._known and length < len(self._known[slot][1])
        }  # fmt: skip
        if not shorter:
            return
        proposers = [self._known[slot][0] for slot in shorter]
        uploads.add(self.books.cut, np.array([list(shorter), proposers, list(shorter.values())]))
        for slot, length in shorter.items():
            whose, tokens, parents = self._known[slot]
            self._known[slot] = whose, tokens[:length], parents[:length]


def _allowed(request: Request, drafts: Sequence[int], parents: Sequence[int], length: int) -> int:
    """How many leading drafts of an offer the grammar allows."""
    if not length or request.grammar is None:
        return 0
    request.grammar.sync(request.output)
    if list(parents[:length]) == list(range(-1, length - 1)):
        return request.grammar.allowed_prefix(drafts[:length])
    for node in range(length):
        path = _path(drafts, parents, node)
        if request.grammar.allowed_prefix(path) < len(path):
            return node
    return length


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The drafts from the first to ``node`` of a tree."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _write_masks(
    grammar: TextGrammar, drafts: Sequence[int], parents: Sequence[int], bits: np.ndarray
) -> None:
    """The masks of a span's rows: the current token's, and those behind each draft's own path."""
    if list(parents) == list(range(-1, len(parents) - 1)):
        grammar.write_masks(drafts, bits)
        return
    grammar.write_masks([], bits[:1])
    for node in range(len(drafts)):
        path = _path(drafts, parents, node)
        rows = np.empty((len(path) + 1, bits.shape[1]), dtype=bits.dtype)
        grammar.write_masks(path, rows)
        bits[1 + node] = rows[-1]


def dead_end(request: Request) -> str:
    """Why a request that an end token ended had no way to complete its text; "" if it did."""
    if request.grammar is None or request.output[-1] not in request.end_tokens:
        return ""
    request.grammar.sync(request.output)
    return request.grammar.problem
