"""Grammars in a round: what they cut from the offers, and the masks of its rows. Host-side.

A request with a grammar takes part in a round once its last report was read: its offer is cut
before the first draft that the grammar forbids, and the masks of the rows that it will sample are
sent to its slot, all behind the rounds in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from surefoot.kernels.upload import upload
from surefoot.request import Request
from surefoot.speculation.books import Offers
from surefoot.speculation.controller import Controller
from surefoot.structured import TextGrammar


class GrammarMasks:
    """Writes what the next round of requests with grammars needs."""

    def __init__(self, offers: Offers, controller: Controller) -> None:
        self.offers = offers
        self.controller = controller
        self.state = controller.state
        self._known: dict[int, tuple[int, list[int], list[int]]] = {}
        """By slot, the last offer read: whose, tokens, parents."""

    def forget(self, slot: int) -> None:
        """Nothing is on offer in a slot."""
        self._known.pop(slot, None)

    def note(self, slot: int, whose: int, tokens: list[int], parents: list[int] | None) -> None:
        """A report told of an offer."""
        self._known[slot] = whose, tokens, parents or list(range(-1, len(tokens) - 1))

    def write(self, requests: Sequence[Request]) -> dict[int, int]:
        """Cut the offers of ``requests``, which sample in the next round, and write their masks.
        Returns how many drafts are left, by slot."""
        words = self.state.mask_bits.shape[1]
        rows: list[int] = []
        masks: list[np.ndarray] = []
        kept: dict[int, int] = {}
        for request in requests:
            assert request.grammar is not None
            slot = request.slot
            _, tokens, parents = self._known.get(slot, (0, [], []))
            length = kept[slot] = _allowed(request, tokens, parents, len(tokens))
            request.grammar.sync(request.output)
            bits = np.empty((1 + length, words), dtype=np.int32)
            _write_masks(request.grammar, tokens[:length], parents[:length], bits)
            masks.append(bits)
            first = slot * (1 + self.state.max_drafts)
            rows.extend(range(first, first + 1 + length))
        device = self.state.device
        bits = torch.from_numpy(np.concatenate(masks))
        self.state.mask_bits[upload(rows, device)] = upload(bits, device)
        self._cut(kept)
        return kept

    def _cut(self, kept: dict[int, int]) -> None:
        shorter = {
            slot: length for slot, length in kept.items()
            if slot in self._known and length < len(self._known[slot][1])
        }  # fmt: skip
        if not shorter:
            return
        device, offers = self.state.device, self.offers
        slots, lengths = upload([list(shorter), list(shorter.values())], device)
        offers.lengths[slots] = lengths
        steps = torch.arange(self.state.max_drafts, device=device)
        inside = steps < lengths.unsqueeze(1)
        offers.chances[slots] = torch.where(inside, offers.chances[slots], 0.0)
        for index, estimator in enumerate(self.controller.estimators):
            own = [slot for slot in shorter if self._known[slot][0] == index]
            if own:
                table = upload([own, [shorter[slot] for slot in own]], device)
                estimator.shorten(table[0], table[1])
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
