"""What proposers offer to each request, and who may offer.

Proposers offer; the best offer of each request, with the chance that each of its drafts is
accepted, is what a round may verify (``speculation.books``). Everything is decided per request: one
with repetitive text keeps its drafts while its neighbour with prose gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from surefoot.errors import SurefootError
from surefoot.kernels.upload import Uploads
from surefoot.request import Request
from surefoot.speculation.estimator import AcceptanceEstimator, OfferRecords
from surefoot.speculation.proposer import Drafts, find_mistake
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import chain_parents


class Controller:
    """Holds every proposer's offers for the next round, and what is learnt of their chances.

    By proposer and slot: ``tokens`` int64 and ``confidence`` float32 [P, slots, K], ``lengths``
    int64 and ``allowed`` bool [P, slots], and ``parents`` int64 [P, slots, K] where some proposer
    offers trees. ``draft_limit`` int64 [slots]: each request's own.
    """

    def __init__(
        self, state: SlotState, proposers: Sequence[str], trees: Sequence[bool] = ()
    ) -> None:
        """``trees``: which of the proposers offer trees."""
        self.state = state
        self.names = tuple(proposers)
        self.active = dict(enumerate(self.names))
        """Those that may offer, by index: all but those that failed, and were switched off."""
        self.trees = tuple(trees) or (False,) * len(self.names)
        count, slots, width = len(self.names), state.slots, state.max_drafts
        self.records = OfferRecords(state, count, any(self.trees))
        self.estimators = [
            AcceptanceEstimator(state, self.records, index) for index in range(count)
        ]
        device = state.device
        self.tokens = torch.zeros((count, slots, width), dtype=torch.int64, device=device)
        self.lengths = state.zeroed(count)
        self.confidence = torch.zeros((count, slots, width), device=device)
        self.parents: torch.Tensor | None = None
        if any(self.trees):
            self.parents = chain_parents(count * slots, width, device).view(count, slots, width)
        self.allowed = torch.zeros((count, slots), dtype=torch.bool, device=device)
        self.draft_limit = torch.zeros(slots, dtype=torch.int64, device=device)
        self._written: dict[int, tuple[int, list[bool]]] = {}
        """By slot: entries of ``draft_limit`` and ``allowed``, also those that are not sent yet."""

    def admit(self, requests: Sequence[Request], slots: np.ndarray, uploads: Uploads) -> None:
        """Have ``uploads`` enter requests, new or resumed, into their ``slots`` int64 [B]. What
        they allow is written where the slot's last request allowed something else."""
        most = self.state.max_drafts
        changed: dict[int, tuple[int, list[bool]]] = {}
        for slot, request in zip(slots.tolist(), requests, strict=True):
            wanted = request.speculation.max_draft_tokens
            limit = most if wanted is None else min(wanted, most)
            names = enumerate(self.names)
            own = limit, [index in self.active and request.allows(name) for index, name in names]
            if self._written.get(slot) != own:
                changed[slot] = own
        if changed:
            limits, allowed = zip(*changed.values(), strict=True)
            index, table = np.array(list(changed)), np.array(allowed, dtype=bool).T
            uploads.write(self.draft_limit, index, np.array(limits))
            uploads.add(partial(self.allowed.index_copy_, 1), index, table)
            self._written |= changed
        if self.names:
            self.records.forget(slots, uploads)

    def forget_written(self) -> None:
        """Nobody knows what arrived of what was to be entered."""
        self._written.clear()

    def check(self, index: int, slots: torch.Tensor, drafts: Drafts) -> None:
        """SurefootError if what proposer ``index`` offers for ``slots`` int64 [B] is not what
        ``Drafts`` says, or a tree without its ``needs()`` having said so, or a chain."""
        problem = find_mistake(drafts, slots)
        if problem is None and (drafts.parents is not None) != self.trees[index]:
            kind = "a chain" if drafts.parents is None else "a tree"
            problem = f"{kind}, and its needs() say otherwise"
        if problem is not None:
            raise SurefootError("proposers", f"{self.names[index]!r} offers {problem}")
