"""Decoding rounds that the host launches before it has read the one before.

While every running request is decoding, rounds are ``ReplayRound``s: recorded as CUDA graphs on a
GPU, called as they are elsewhere. The host seats the requests, reserves KV for the longest spans
that can result, picks the number of rows, launches, and only then reads the verdict of the round
before. It learns of ends one round late; the device has known at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from surefoot.engine.graphs import RoundGraphs
from surefoot.engine.stats import Drafting
from surefoot.kv.transaction import KVManager
from surefoot.request import Request
from surefoot.sampling.params import Features
from surefoot.speculation.controller import Controller, split_rows
from surefoot.speculation.replay import ReplayRound, Size, kind_of
from surefoot.speculation.state import SlotState

IN_FLIGHT = 2


@dataclass
class Flight:
    """A launched round: who is in it, by span, and where its report will be."""

    size: Size
    requests: list[Request]
    members: frozenset[int]
    """Their identities."""
    report: torch.Tensor
    landed: Callable[[], None]
    """Waits until ``report`` is there."""


@dataclass(frozen=True)
class Landed:
    """What a round gave one request."""

    request: Request
    tokens: list[int]
    end: int
    drafting: Drafting


class Pipeline:
    """Keeps up to ``IN_FLIGHT`` rounds launched. Reads and writes leases, not the scheduler."""

    def __init__(
        self,
        replay: ReplayRound,
        graphs: RoundGraphs,
        controller: Controller,
        kv: KVManager,
        state: SlotState,
    ) -> None:
        self.replay = replay
        self.graphs = graphs
        self.controller = controller
        self.kv = kv
        self.state = state
        self.flights: deque[Flight] = deque()
        self._seated: list[int] | None = None
        self._offers: dict[str, list[float]] = {}
        self._table: dict[Size, torch.Tensor] = {}

    def fits(self, running: Sequence[Request]) -> bool:
        """Whether a round of these requests needs nothing that only the host can do."""
        return all(
            not r.prefilling and r.params.logprobs is None and r.grammar is None for r in running
        )

    def leave(self) -> None:
        """The host plans the next rounds itself; nothing is in flight."""
        assert not self.flights
        self._seated = None
        self._offers.clear()

    def launch(self, running: Sequence[Request]) -> bool:
        """Launch a round of ``running``. False if the KV pool cannot hold what may result, or if
        every request will have ended before it."""
        if all(self._ends_in_flight(request) for request in running):
            return False
        size = self._size(running)
        if not self._reserve(running, size):
            return False
        slots = [request.slot for request in running]
        if self._seated is None:
            self.replay.enter(slots)
        if self._seated != slots:
            self.replay.seat(slots)
            self._seated = slots
        report, landed = self.graphs.launch(size)
        members = frozenset(map(id, running))
        self.flights.append(Flight(size, list(running), members, report, landed))
        return True

    def _ends_in_flight(self, request: Request) -> bool:
        flying = sum(id(request) in flight.members for flight in self.flights)
        return request.length + flying >= request.max_length

    def _reserve(self, running: Sequence[Request], size: Size) -> bool:
        wanted = {}
        for request in running:
            reach = self._reach(request) + self._longest(size)
            most = request.max_length - request.computed
            wanted[request.request_id] = min(reach, most)
        if not self.kv.transaction().reserve(wanted):
            return False
        self.state.set_all_blocks([(r.slot, self.kv.leases[r.request_id].blocks) for r in running])
        return True

    def _reach(self, request: Request) -> int:
        """Positions beyond the committed ones that launched rounds may write for a request."""
        return sum(self._longest(f.size) for f in self.flights if id(request) in f.members)

    def _longest(self, size: Size) -> int:
        return 1 + min(self.state.max_drafts, size.rows - size.spans)

    # --- how many rows ------------------------------------------------------------------------

    def _size(self, running: Sequence[Request]) -> Size:
        """The next round's: spans and rows for what the last report offers."""
        kind = kind_of(Features.of(request.params for request in running))
        methods = {request.speculation.method for request in running}
        names = self.controller.names if self.state.max_drafts else ()
        proposers = tuple(i for i, name in enumerate(names) if methods & {"auto", name})
        base = self.graphs.plain(len(running), kind, proposers)
        if not proposers:
            return base
        width = self.state.max_drafts
        if self.controller.policy == "fixed":
            limits = [request.speculation.max_draft_tokens for request in running]
            most = max(width if limit is None else limit for limit in limits)
            return self.graphs.holding(base, base.spans * (1 + most))
        chances = [self._offers.get(request.request_id) for request in running]
        if not any(chances):
            return base
        offered = torch.tensor([row or [0.0] * width for row in chances])
        counts = split_rows(offered, self.graphs.table(base, len(running)))
        return self.graphs.holding(base, len(running) + int(counts.sum()))

    # --- landing ------------------------------------------------------------------------------

    def land(self) -> list[Landed]:
        """Read the oldest round: commit its tokens to the leases of requests still running.
        The caller ends those whose ``end`` says so before it launches another."""
        flight = self.flights.popleft()
        flight.landed()
        width = self.state.max_drafts
        rows = flight.report[: len(flight.requests)]
        chances = rows[:, 7 + width :].contiguous().view(torch.float32).tolist()
        self._offers = {
            r.request_id: row for r, row in zip(flight.requests, chances, strict=True) if any(row)
        }
        out = []
        for request, row in zip(flight.requests, rows.tolist(), strict=True):
            count, accepted, end, drafted, whose, offered, *tokens = row
            if request.finished or not count:
                continue
            tokens = tokens[:count]
            name = self.controller.names[whose] if drafted else None
            drafts = min(accepted, count)
            request.stats.count(name, offered, drafted, drafts)
            request.proposed_by += [name] * drafts + [None] * (count - drafts)
            self._commit(request, tokens)
            out.append(Landed(request, tokens, end, Drafting(name, offered, drafted, drafts)))
        return out

    def _commit(self, request: Request, tokens: list[int]) -> None:
        current = request.output[-1] if request.output else request.prompt[-1]
        request.output.extend(tokens)
        settled = [current, *tokens[:-1]]
        ahead = self._reach(request)
        self.kv.transaction().commit(request.request_id, settled, ahead)
        request.computed += len(settled)
