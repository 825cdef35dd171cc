"""Decoding rounds that the host launches before it has read the one before.

While every running request is decoding, rounds are ``ReplayRound``s: recorded as CUDA graphs on a
GPU, called as they are elsewhere. The host seats the requests, reserves KV for the longest spans
that can result, picks the number of rows, launches, and only then reads the verdict of the round
before. It learns of ends one round late; the device has known at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.engine.graphs import Report, RoundGraphs
from surefoot.engine.landing import Landing, read_report
from surefoot.kv.transaction import KVManager, Lease
from surefoot.request import Request
from surefoot.sampling.logprobs import width_for
from surefoot.sampling.params import Features
from surefoot.speculation.controller import Controller, split_rows
from surefoot.speculation.pace import Pace
from surefoot.speculation.replay import ReplayRound, Size, kind_of
from surefoot.speculation.rest import Rest
from surefoot.speculation.state import SlotState

IN_FLIGHT = 2
LOOK_EVERY = 16
"""Launches between two looks at how long the texts of many requests are."""
RESERVED_AHEAD = 32
"""Positions that are reserved at once, at least, so that not every launch has to look at every
request."""
RESERVED_ROUNDS = 8
"""Rounds that these last for, at least."""
PLENTY = 3
"""How many times as many blocks have to be free, for that."""


@dataclass
class Flight:
    """A launched round: who is in it, by span, and where its report will be."""

    size: Size
    longest: int
    """Positions that it may write for a request, at most."""
    company: Company
    report: Report


@dataclass(eq=False)
class Company:
    """Requests that decode together, and what follows from who they are."""

    requests: list[Request]
    leases: list[Lease]
    members: frozenset[int]
    """Their identities."""
    fits: bool
    """Whether their rounds need nothing that only the host can do."""
    kind: Features
    proposers: tuple[int, ...]
    most_drafts: int
    """The largest of their own limits."""
    logprobs: int | None
    """The width of logprobs that serves all who want any."""
    launches: int = 0
    """How often a round of theirs was sized."""
    reserved: int = 0
    """Positions that each of them has blocks for, at least, beyond what launched rounds may
    write."""


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
        self._company: Company | None = None
        self._seated: Company | None = None
        self._offers: tuple[Company, torch.Tensor] | None = None
        """Chances of the last report's offers, float32 [B, K]."""
        self.pace = Pace(graphs.longest)
        self.rest = Rest()
        self._last: Size | None = None
        """The last launched round's."""

    # --- who ----------------------------------------------------------------------------------

    def fits(self, running: Sequence[Request]) -> bool:
        """Whether a round of these requests needs nothing that only the host can do."""
        return bool(running) and self._gather(running).fits

    def _gather(self, running: Sequence[Request]) -> Company:
        # Between arrivals and ends nothing changes; every round asks.
        company = self._company
        if company is None or company.requests != running or not company.fits:
            company = self._company = self._meet(list(running), company)
        return company

    def _meet(self, requests: list[Request], before: Company | None = None) -> Company:
        members = frozenset(map(id, requests))
        if before is not None and not (before.fits and members <= before.members):
            before = None
        # Else some have ended: the others decode as they did, and their blocks are as they were.
        # Requests that come together often share these.
        params = {id(request.params): request.params for request in requests}.values()
        choices = {id(request.speculation): request.speculation for request in requests}.values()
        methods = {choice.method for choice in choices}
        names = self.controller.names if self.state.max_drafts else ()
        width = self.state.max_drafts
        scored = [each.logprobs for each in params if each.logprobs is not None]
        limits = [choice.max_draft_tokens for choice in choices]
        return Company(
            requests=requests,
            leases=[self.kv.leases[request.request_id] for request in requests],
            members=members,
            fits=before is not None
            or all(not r.prefilling and r.grammar is None for r in requests),
            kind=kind_of(Features.of(params)),
            proposers=tuple(i for i, name in enumerate(names) if methods & {"auto", name}),
            most_drafts=max(width if limit is None else limit for limit in limits),
            logprobs=width_for(max(scored)) if scored else None,
            launches=before.launches if before else 0,
            reserved=before.reserved if before else 0,
        )

    def leave(self) -> None:
        """The host plans the next rounds itself; nothing is in flight."""
        assert not self.flights
        if self._seated is not None:
            for request, lease in zip(self._seated.requests, self._seated.leases, strict=True):
                if not request.finished:
                    self.kv.give_back(lease)
        self._company = self._seated = self._offers = self._last = None

    # --- launching ----------------------------------------------------------------------------

    def launch(self, running: Sequence[Request]) -> bool:
        """Launch a round of ``running``. False if the KV pool cannot hold what may result, or if
        every request will have ended before it."""
        if all(self._ends_in_flight(request) for request in running):
            return False
        company = self._gather(running)
        self._attend(company)
        size = self._size(company)
        # Rows of requests that ended on the device go to the others: one may draft all it can.
        longest = 1 + (self.state.max_drafts if size.verifies else 0)
        if not self._reserve(company, longest):
            return False
        if self._seated is not company:
            slots = [request.slot for request in running]
            if self._seated is None:
                self.replay.enter(slots)
            self.replay.seat(slots)
            self._seated = company
        self._last = size
        self.flights.append(Flight(size, longest, company, self.graphs.launch(size)))
        return True

    def _attend(self, company: Company) -> None:
        """Have costs follow the length of the texts, as far as they were read. A few requests are
        looked at more often than many: they draft more, and cost less to look at."""
        count = len(company.requests)
        if company.launches % min(count, LOOK_EVERY) == 0:
            self.graphs.attend(sum(request.length for request in company.requests) / count)
        company.launches += 1

    def _ends_in_flight(self, request: Request) -> bool:
        flying = sum(id(request) in flight.company.members for flight in self.flights)
        return request.length + flying >= request.max_length

    def _reserve(self, company: Company, longest: int) -> bool:
        """Blocks for what launched rounds and this one may write; the new ones are copied to the
        device. Where blocks abound, for some rounds to come, too."""
        if company.reserved >= longest:
            company.reserved -= longest
            return True
        ahead = max(RESERVED_AHEAD, RESERVED_ROUNDS * longest)
        wanted, missing = self._wanted(company, ahead)
        if PLENTY * missing > self.kv.pool.num_free:
            ahead = longest
            wanted, _ = self._wanted(company, ahead)
        if wanted and not self.kv.transaction().reserve(wanted):
            return False
        company.reserved = ahead - longest
        self.state.set_blocks(
            (request.slot, lease.blocks)
            for request, lease in zip(company.requests, company.leases, strict=True)
            if request.request_id in wanted
        )
        return True

    def _wanted(self, company: Company, ahead: int) -> tuple[dict[str, int], int]:
        """Positions to reserve, by request that lacks blocks for what launched rounds may write and
        ``ahead`` more; and how many blocks they lack together."""
        # A tree no deeper than what a request may still write can have more nodes than that.
        trees = any(self.controller.trees[index] for index in company.proposers)
        beyond = self.state.max_drafts if trees else 0
        size, wanted, missing = self.kv.block_size, {}, 0
        for request, lease, flying in zip(
            company.requests, company.leases, self._reaches(company), strict=True
        ):
            room = request.max_length + beyond - request.computed
            positions = min(flying + ahead, room)
            lacking = lease.committed + positions - len(lease.blocks) * size
            if lacking > 0:
                wanted[request.request_id] = positions
                missing += self.kv.blocks_for(lacking)
        return wanted, missing

    def _reaches(self, company: Company) -> list[int]:
        """Positions beyond the committed ones that launched rounds may write, by request."""
        count = len(company.requests)
        if all(flight.company is company for flight in self.flights):
            return [sum(flight.longest for flight in self.flights)] * count
        return [
            sum(f.longest for f in self.flights if id(request) in f.company.members)
            for request in company.requests
        ]

    def _size(self, company: Company) -> Size:
        """The next round's: spans and rows for what the last report offers, and how far drafters
        draft for the round after it."""
        count, graphs = len(company.requests), self.graphs
        base = graphs.plain(count, company.kind, company.proposers)
        base = replace(base, logprobs=company.logprobs)
        if not company.proposers:
            return base
        if self._seated is not company:
            self.rest.meet()
        if self.controller.policy == "fixed":
            if base.steps is not None:
                base = replace(base, steps=min(company.most_drafts, graphs.longest))
            return graphs.holding(base, base.spans * (1 + company.most_drafts))
        if base.steps is None and self.rest.resting:
            self.rest.launched(0)
            return replace(base, proposers=())
        offered = self._offered(company)
        if base.steps is not None:
            base = replace(base, steps=self._steps(company, base, offered))
            if self.pace.on_trial and self._drafted_before:
                return graphs.holding(base, base.spans * (1 + graphs.longest))
            if offered is not None and self._drafters_alone(company):
                offered = self.pace.expected(offered, self._drafted_before)
        drafts = 0
        if offered is not None and offered.numel():
            drafts = int(split_rows(offered, graphs.table(base, count)).sum())
        self.rest.launched(drafts)
        return graphs.holding(base, graphs.rows_with(base, count, drafts))

    def _steps(self, company: Company, base: Size, offered: torch.Tensor | None) -> int:
        count, graphs = len(company.requests), self.graphs
        if self._seated is not company:
            self.pace.meet()
        return self.pace.next(
            offered,
            graphs.seconds(base) or 1.0,
            lambda steps: graphs.table(replace(base, steps=steps), count),
            graphs.depths(base.spans),
        )

    def _drafters_alone(self, company: Company) -> bool:
        """Whether all offers come from drafters: then those that the next round verifies are as
        many as the round before it was told to draft, whatever older ones were."""
        return all(index in self.replay.drafters for index in company.proposers)

    @property
    def _drafted_before(self) -> int:
        """Steps that the last launched round drafts."""
        return (self._last.steps or 0) if self._last is not None else 0

    def _offered(self, company: Company) -> torch.Tensor | None:
        """The last report's chances, float32 [B, K]; zeros for who was not in it."""
        if self._offers is None:
            return None
        before, chances = self._offers
        if before is company:
            return chances
        rows = {id(request): row for row, request in enumerate(before.requests)}
        places = [rows.get(id(request), len(rows)) for request in company.requests]
        return torch.nn.functional.pad(chances, (0, 0, 0, 1))[places]

    # --- landing ------------------------------------------------------------------------------

    def land(self) -> Landing:
        """Read the oldest round: commit its tokens to the leases of requests still running. The
        caller ends those that it ended before it launches another round."""
        flight = self.flights.popleft()
        flight.report.landed()
        width, company = self.state.max_drafts, flight.company
        if not flight.size.proposers:
            self._offers = None
        elif width:
            rows = flight.report.rows[: len(company.requests)]
            chances = rows[:, 7 + width :].contiguous().view(torch.float32)
            self._offers = company, chances
            if flight.size.steps is not None:
                self.pace.saw(chances, flight.size.steps)
        return read_report(
            flight.report,
            company.requests,
            company.leases,
            self.kv,
            self.controller.names,
            flight.longest,
        )
