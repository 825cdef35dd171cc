"""The loop: launch rounds, read what they report. One for every device and all traffic.

On a GPU up to two rounds are in flight: the host lets requests in, reserves KV for the longest
spans that can result, picks the size of the round, launches it, and only then reads the report of
the round before. It learns of ends one round late; the device has known at once. Where rounds are
so short that the host has next to no time to spare, there are three: its hiccups would otherwise
leave the device idle. On a CPU one round is in flight, and everything else is the same. A request
whose next token needs the host (it has a grammar) joins a round when the report of its last one has
been read; its neighbours do not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

# np.unique would import it in the middle of serving, which holds up everybody.
import numpy.ma

from surefoot.engine.batch import Batch
from surefoot.engine.chunks import ChunkLimits
from surefoot.engine.gathering import Gathering, missing
from surefoot.engine.host_clock import HostClock
from surefoot.engine.landing import Draftings, Landing, read_report
from surefoot.engine.prompt_scores import prompt_reads, prompt_targets, read_prompt_scores
from surefoot.engine.reported import ReportedOffers
from surefoot.engine.reports import Report
from surefoot.engine.reserving import Reach, Reservations
from surefoot.engine.rounds import Rounds
from surefoot.engine.scheduler import Scheduler
from surefoot.engine.structured import GrammarMasks
from surefoot.kernels.upload import Uploads
from surefoot.kv.transaction import KVManager
from surefoot.request import Request
from surefoot.speculation.decisions import Decision, Landed, Situation
from surefoot.speculation.fixed import FixedPlanner
from surefoot.speculation.host_costs import HICCUP, HostSample
from surefoot.speculation.host_offers import HostOffers
from surefoot.speculation.planner import Planner
from surefoot.speculation.round import Round
from surefoot.speculation.size import Size

MOST_GONE = 1 / 16
"""The part of a round's requests that may have ended before it ran, if its time is to tell what
rounds of as many take."""


@dataclass(eq=False)
class Flight:
    """A launched round."""

    batch: Batch
    size: Size
    decision: Decision
    situation: Situation
    reach: Reach
    scored: list[int]
    """By prompt chunk, how many prompt tokens' logprobs come back."""
    hosted: dict[int, tuple[int, int]]
    """By slot, who had how many drafts on offer for it on the host."""
    changes: int
    """As of the scheduler, when it was launched."""
    left: np.ndarray
    """How often the slots of its requests had been left, int64 [spans]."""
    report: Report


class Loop:
    """Keeps up to ``in_flight`` rounds launched."""

    def __init__(
        self,
        round_: Round,
        rounds: Rounds,
        scheduler: Scheduler,
        kv: KVManager,
        planner: Planner | FixedPlanner,
        hosts: HostOffers,
        limits: ChunkLimits,
        most_rows: int,
        depth: int,
    ) -> None:
        """``limits`` of prompts beside others. ``most_rows``: rows of a round before drafts.
        ``depth``: rounds in flight, usually."""
        self.round = round_
        self.rounds = rounds
        self.scheduler = scheduler
        self.kv = kv
        self.planner = planner
        self.depth = depth
        self.clock = HostClock()
        self.state = state = round_.state
        self.controller = round_.controller
        self.flights: deque[Flight] = deque()
        self.preempted = 0
        self.without_drafters = 0
        """Requests let in without drafters that they allow."""
        self.admitted: list[tuple[int, int]] = []
        """Of requests let in for the first time since somebody last looked: tokens of the prompt,
        and how many of them were found in the prefix cache."""
        trees = any(self.controller.trees)
        self.uploads = Uploads(state.device)
        """What the next launch is to find on the device, and is not there yet."""
        # What writes it is compiled now, not when somebody waits for it.
        unused = np.array([state.padding_slot])
        self.uploads.write(state.length, unused, np.ones(1, dtype=np.int64))
        if self.controller.names:
            self.controller.records.forget(unused, self.uploads)
            self.uploads.add(round_.books.cut, np.array([[state.padding_slot], [0], [0]]))
        self.uploads.send()
        beyond = state.max_drafts if trees else 0
        self.reservations = Reservations(kv, state, beyond, self.uploads)
        self._reported = ReportedOffers(state.slots, state.max_drafts, round_.books.columns)
        self._offered = False
        """Whether what the round left whose report was read last is known, and may be offers."""
        self._grammars = GrammarMasks(round_.books, self._reported, hosts)
        self.names = (*self.controller.names, *hosts.names)
        self._draftings = Draftings(self.names)
        self.gathering = Gathering(
            scheduler, self.controller.active, state.max_drafts, most_rows,
            limits, self._admit,
        )  # fmt: skip
        self._batch_set: Batch | None = None
        self._changes = scheduler.changes

    @property
    def hurried(self) -> bool:
        """Whether the device now and then waits for the host."""
        return self.depth > 1 and self.clock.spare < HICCUP

    @property
    def in_flight(self) -> int:
        """Rounds that are to be in flight now."""
        # Whoever needs the host would sit out one more of them.
        return self.depth + (self.hurried and not self.gathering.needs_host)

    def _admit(self, requests: Sequence[Request]) -> None:
        """Requests, new or resumed, enter their slots."""
        self.round.keeping_up.catch_up()
        now = time.perf_counter()
        for request in requests:
            if request.queued_seconds is None:
                request.queued_seconds = now - request.arrived
                self.admitted.append((len(request.prompt), request.cached))
        uploads = self.uploads
        slots = self.state.admit(requests, uploads)
        self.controller.admit(requests, slots, uploads)
        self.round.books.offers.forget(slots, uploads)
        # Proposers look for what they know of a prefix hit in its blocks.
        self.reservations.admit(requests)
        found = [request.computed for request in requests]
        if (tell := self.round.keeping_up.entering(found)) is not None:
            uploads.add(tell, slots)
        self.without_drafters += sum(bool(request.declined) for request in requests)
        room = [request.max_length - request.length for request in requests]
        self.planner.admit(slots, np.array(room))
        for request in requests:
            self._reported.clear(request.slot)
            self._grammars.forget(request.slot)
            if not request.prompt_scored:
                # Perhaps preempted halfway through its prompt.
                request.forget_scores()

    # --- launching ----------------------------------------------------------------------------

    def launch(self) -> bool:
        """Launch a round. False where there is nobody for it, or no room before a report is
        read."""
        while (batch := self._gather()) is not None:
            hosted = {}
            if batch.group.masked:
                # What the host has on offer for a request comes behind its entry.
                self.uploads.send()
                hosted = self._write_masks(batch)
            situation = self._situation(batch)
            decision = self.planner.decide(situation)
            shorter = batch.beside(decision.drafts, self.gathering.most_rows)
            if shorter is not batch:
                batch, situation = shorter, self._situation(shorter)
            with self.kv.transaction() as transaction:
                reach = self.reservations.make(transaction, batch, decision)
                if reach is None and decision.drafts:
                    decision = replace(decision, drafts=0)
                    reach = self.reservations.make(transaction, batch, decision)
                if reach is not None:
                    self.flights.append(self._run(batch, decision, situation, reach, hosted))
                    transaction.keep()
                    return True
            if self.flights:
                # What these hold more than they need comes back when they are read.
                return False
            if not self.reservations.give_back(self.scheduler.running):
                self.scheduler.preempt()
                self.preempted += 1
        return False

    def _gather(self) -> Batch | None:
        """Who takes part in the next round."""
        if self._changes != self.scheduler.changes:
            # Who left gave up blocks, which are about to be somebody else's.
            self.round.keeping_up.catch_up()
        batch = self.gathering.next([flight.batch for flight in self.flights], self.hurried)
        self._changes = self.scheduler.changes
        return batch

    def _run(
        self,
        batch: Batch,
        decision: Decision,
        situation: Situation,
        reach: Reach,
        hosted: dict[int, tuple[int, int]],
    ) -> Flight:
        if self._batch_set is not batch:
            group = batch.group
            self.round.set_batch(group.slots, batch.quota, group.scored)
            self._batch_set = batch
        self.uploads.send()
        size = self.rounds.size(batch, decision, situation.context)
        scored: list[int] = []
        reads = None
        if batch.chunks:
            scored = prompt_targets(batch)
            reads = prompt_reads(batch, scored, self.state.device)
        if reads is not None:
            widths = (request.params.prompt_logprobs or 0 for request in batch.group.requests)
            size = replace(size, prompt_logprobs=max(widths))
        report = self.rounds.launch(size, reach.keys, reads)
        self.clock.launched(len(batch.chunks), self.planner.decided)
        self.clock.leave_out(self.rounds.apart_seconds)
        if batch.chunks:
            self._count_chunks(batch)
        self.reservations.launched(batch, reach)
        slots, upkeep = situation.slots, self.scheduler.upkeep
        if upkeep is not None and slots is not None and len(slots):
            row_seconds = self.round.keeping_up.row_seconds.mean
            upkeep.launched(slots, decision, batch.kind, batch.prompt_rows, row_seconds)
        changes, left = self.scheduler.changes, self.scheduler.left[batch.group.slots]
        return Flight(
            batch, size, decision, situation, reach, scored, hosted, changes, left, report
        )

    def _write_masks(self, batch: Batch) -> dict[int, tuple[int, int]]:
        """Of those that sample. Returns by slot who offers how many drafts on the host."""
        sampling = [
            request
            for request, rows in zip(batch.group.requests, batch.quota, strict=True)
            if request.grammar is not None and rows == missing(request)
        ]
        return self._grammars.write(sampling) if sampling else {}

    def _count_chunks(self, batch: Batch) -> None:
        """Rows of prompts are final as soon as they are launched: whoever comes later finds them in
        the prefix cache, and reads them behind this round."""
        for request, rows in zip(batch.group.requests, batch.chunks, strict=False):
            request.computed += rows
            self.kv.keep(self.kv.leases[request.request_id])
            if not request.in_prompt:
                # Its last row alone is a current token's: drafts may follow it.
                self.gathering.forget()

    def _situation(self, batch: Batch) -> Situation:
        known = self._reported.of(batch) if self._offered else (None, None, None)
        chances, whose, parents = known
        return Situation(
            requests=batch.samples,
            prompt_rows=batch.prompt_rows if self.rounds.recorded else batch.prompt_load,
            chances=chances,
            whose=whose,
            hosted=self._reported.hosted(batch),
            proposers=batch.group.proposers,
            draft_limit=batch.group.draft_limit,
            context=self.reservations.mean_length(batch),
            kind=batch.kind,
            slots=batch.sampling_slots,
            prompts=len(batch.chunks),
            parents=parents,
        )

    # --- landing ------------------------------------------------------------------------------

    def land(self) -> Landing:
        """Read the oldest round. The caller ends the requests that it ended before it launches
        another one."""
        flight = self.flights.popleft()
        batch, report = flight.batch, flight.report
        host = self.clock.wait_begins()
        report.wait()
        self.clock.report_came()
        if batch.chunks:
            read_prompt_scores(report, batch, flight.scored)
        columns, slots = self.round.books.columns, batch.group.slots
        committed = report.rows[: len(slots), columns.COUNT]
        seconds = timed = report.seconds()
        # Mostly nobody has left, and of one request comparing takes as long as all the rest.
        if self.scheduler.changes != flight.changes:
            slots = np.where(self.scheduler.left[slots] == flight.left, slots, -1)
            committed = np.where(slots >= 0, committed, 0)
            if MOST_GONE * len(slots) < np.count_nonzero(slots < 0):
                # The device did without them: rounds of so many take longer than that.
                timed = None
        landing = read_report(
            report,
            batch,
            committed,
            self._draftings,
            columns,
            self.state.max_drafts if flight.size.verifies else 0,
            flight.hosted,
        )
        self._note_offers(flight, slots)
        self.reservations.landed(batch, slots, flight.reach, committed)
        outcome = Landed(
            device_seconds=timed,
            host=host,
            verified=landing.verified,
            accepted=landing.accepted,
            drafting=landing.drafting,
        )
        self.clock.compare(host, timed)
        ends, proposing = len(landing.ended), bool(flight.decision.proposers)
        requests = flight.situation.requests
        self.clock.read(HostSample(requests, outcome.drafting, ends, 0.0, proposing))
        self.planner.landed(flight.decision, flight.situation, outcome)
        landing.seconds = seconds
        landing.size, landing.decision = flight.size, flight.decision
        landing.prompt_rows = batch.prompt_rows
        return landing

    def _note_offers(self, flight: Flight, slots: np.ndarray) -> None:
        group = flight.batch.group
        # A crowd's is long to read, while drafts do not pay most rounds leave none, and as long as
        # a decision holds nobody asks.
        asked = bool(flight.decision.proposers) and self.planner.needs_offers(flight.decision)
        self._offered = asked or group.masked
        if not group.proposers or not self._offered:
            return
        known = self._reported.note(flight.report, slots)
        if not group.masked:
            return
        requests, columns = group.requests, self.round.books.columns
        for place in np.flatnonzero(known):
            if requests[place].grammar is not None:
                row = flight.report.rows[place].tolist()
                whose, tokens, parents = columns.read_offer(row)
                self._grammars.note(requests[place].slot, whose, tokens, parents)

    def drop(self) -> None:
        """Forget what is in flight, and have every request recomputed from the tokens that were
        read: a round failed, and nobody knows what it left in the slots, in blocks of KV and in
        the host's own books."""
        self.flights.clear()
        self.state.forget_written()
        self.controller.forget_written()
        self._batch_set = None
        self.round.keeping_up.backlog.clear()
        self.scheduler.restart()
