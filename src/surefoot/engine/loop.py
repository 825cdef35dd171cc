"""The loop: launch rounds, read what they report. One for every device and all traffic.

On a GPU up to two rounds are in flight: the host lets requests in, reserves KV for the longest
spans that can result, picks the size of the round, launches it, and only then reads the report of
the round before. It learns of ends one round late; the device has known at once. On a CPU one round
is in flight, and everything else is the same. A request whose next token needs the host (it has a
grammar) joins a round when the report of its last one has been read; its neighbours do not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from surefoot.engine.batch import Batch, Group, group, join
from surefoot.engine.landing import Landing, read_prompt_scores, read_report
from surefoot.engine.reserving import Reservations
from surefoot.engine.rounds import Report, Rounds
from surefoot.engine.scheduler import Scheduler
from surefoot.engine.structured import GrammarMasks
from surefoot.kernels.upload import upload
from surefoot.kv.transaction import KVManager
from surefoot.request import Request
from surefoot.speculation.decisions import Decision, Landed, Situation
from surefoot.speculation.fixed import FixedPlanner
from surefoot.speculation.planner import Planner
from surefoot.speculation.round import Round
from surefoot.speculation.size import Size


@dataclass(eq=False)
class Flight:
    """A launched round."""

    batch: Batch
    size: Size
    decision: Decision
    situation: Situation
    reach: np.ndarray
    """int64 [decoding spans]: positions that it may write for each request, at most."""
    scored: list[int]
    """By prompt chunk, how many prompt tokens' logprobs come back."""
    report: Report
    host_seconds: float


class Loop:
    """Keeps up to ``depth`` rounds launched."""

    def __init__(
        self,
        round_: Round,
        rounds: Rounds,
        scheduler: Scheduler,
        kv: KVManager,
        planner: Planner | FixedPlanner,
        most_rows: int,
        depth: int,
    ) -> None:
        """``most_rows``: rows of a round before drafts."""
        self.round = round_
        self.rounds = rounds
        self.scheduler = scheduler
        self.kv = kv
        self.planner = planner
        self.most_rows = most_rows
        self.depth = depth
        self.state = state = round_.state
        self.controller = round_.controller
        self.flights: deque[Flight] = deque()
        self.preempted = 0
        self.admitted: list[Request] = []
        """Let in since somebody last looked."""
        trees = any(self.controller.trees)
        self.reservations = Reservations(kv, state, state.max_drafts if trees else 0)
        self._grammars = GrammarMasks(round_.books.offers, self.controller)
        self._known = -1
        """The scheduler's count of changes that the next three are of; -1: none."""
        self._prompts: list[Request] = []
        self._free: Batch | None = None
        """Those that decode and need nothing of the host."""
        self._synchronous: list[Request] = []
        """Those that decode under a grammar."""
        self._batch_set: Batch | None = None
        # By slot, what the last report read says of the request's offer.
        self._chances = np.full((state.slots, state.max_drafts), np.nan, dtype=np.float32)
        self._whose = np.zeros(state.slots, dtype=np.int64)

    # --- who ----------------------------------------------------------------------------------

    def _gather(self) -> Batch | None:
        """The next round's spans, with whoever can be let in."""
        self._sort()
        decoding = self._decoding()
        if not self._prompts and not self.scheduler.waiting:
            return decoding
        room = self._prompt_room(decoding)
        if self.scheduler.waiting:
            left = room - sum(map(_missing, self._prompts))
            if fresh := self.scheduler.admit(left):
                self._admit(fresh)
                self._sort()
                decoding = self._decoding()
        if not self._prompts:
            return decoding
        requests: list[Request] = []
        chunks: list[int] = []
        for request in self._prompts:
            if room <= 0:
                break
            requests.append(request)
            chunks.append(min(_missing(request), room))
            room -= chunks[-1]
        pairs = zip(requests, chunks, strict=True)
        ending = sum(_missing(request) == rows for request, rows in pairs)
        members = self._group(requests)
        if decoding is not None:
            members = join(members, decoding.group)
        return Batch(members, tuple(chunks), ending)

    def _sort(self) -> None:
        """Who is where, if that has changed."""
        if self._known == self.scheduler.changes:
            return
        running = self.scheduler.running
        self._prompts = [request for request in running if _missing(request) > 1]
        decoding = [request for request in running if _missing(request) <= 1]
        self._synchronous = [request for request in decoding if request.grammar is not None]
        free = [request for request in decoding if request.grammar is None]
        self._free = Batch(self._group(free), (), 0) if free else None
        self._known = self.scheduler.changes

    def _group(self, requests: Sequence[Request]) -> Group:
        return group(requests, self.kv, self.controller.names, self.state.max_drafts)

    def _decoding(self) -> Batch | None:
        """Those with a current token that can take part."""
        free = self._free
        if free is not None and all(map(self._ends_in_flight, free.group.requests)):
            free = None
        ready = [
            request
            for request in self._synchronous
            if not any(request in flight.batch.group.requests for flight in self.flights)
        ]
        if not ready:
            return free
        members = self._group(ready)
        return Batch(members if free is None else join(members, free.group), (), 0)

    def _ends_in_flight(self, request: Request) -> bool:
        flying = sum(request in flight.batch.group.requests for flight in self.flights)
        return request.length + flying >= request.max_length

    def _prompt_room(self, decoding: Batch | None) -> int:
        """The most rows of prompt chunks in the next round."""
        if decoding is None:
            return self.most_rows
        count = decoding.count
        return max(1, min(self.most_rows - count, self.rounds.longest_chunk(count)))

    def _admit(self, requests: Sequence[Request]) -> None:
        """Requests, new or resumed, enter their slots."""
        self.admitted += requests
        slots = [request.slot for request in requests]
        self.state.admit(requests)
        index = upload(slots, self.state.device)
        self.controller.admit(index, [request.speculation for request in requests])
        self.round.books.offers.clear(index)
        # Proposers look for what they know of a prefix hit in its blocks.
        self.reservations.admit(requests)
        for proposer in self.round.proposers:
            for slot in slots:
                proposer.admit(slot)
        self._chances[slots] = np.nan
        for request in requests:
            self._grammars.forget(request.slot)
            if not request.prompt_scored:
                # Preempted halfway through its prompt, which now runs again from the start.
                request.prompt_logprobs.clear()

    # --- launching ----------------------------------------------------------------------------

    def launch(self) -> bool:
        """Launch a round. False where there is nobody for it, or no room before a report is
        read."""
        begun = time.perf_counter()
        while (batch := self._gather()) is not None:
            if batch.group.masked:
                self._write_masks(batch)
            situation = self._situation(batch)
            decision = self.planner.decide(situation)
            with self.kv.transaction() as transaction:
                reach = self.reservations.make(transaction, batch, decision)
                if reach is None and decision.drafts:
                    decision = replace(decision, drafts=0)
                    reach = self.reservations.make(transaction, batch, decision)
                if reach is not None:
                    self.flights.append(self._run(batch, decision, situation, reach, begun))
                    transaction.keep()
                    return True
            if self.flights:
                # What these hold more than they need comes back when they are read.
                return False
            if not self.reservations.give_back(self.scheduler.running):
                self.scheduler.preempt()
                self.preempted += 1
        return False

    def _run(
        self,
        batch: Batch,
        decision: Decision,
        situation: Situation,
        reach: np.ndarray,
        begun: float,
    ) -> Flight:
        requests = batch.group.requests
        if self._batch_set is not batch:
            self.round.set_batch(batch.group.slots, batch.quota)
            self._batch_set = batch
        size = self.rounds.size(batch, decision, situation.context)
        scored = [_prompt_targets(*pair) for pair in zip(requests, batch.chunks, strict=False)]
        prompt_rows = None
        if any(scored):
            widths = (request.params.prompt_logprobs or 0 for request in requests)
            size = replace(size, prompt_logprobs=max(widths))
            prompt_rows = self._prompt_rows(batch, scored)
        keys = self.reservations.most_keys(batch, reach)
        seconds = time.perf_counter() - begun
        report = self.rounds.launch(size, keys, prompt_rows)
        begun = time.perf_counter()
        self._count_chunks(batch)
        self.reservations.launched(batch, reach)
        seconds += time.perf_counter() - begun
        return Flight(batch, size, decision, situation, reach, scored, report, seconds)

    def _write_masks(self, batch: Batch) -> None:
        """Of those that sample."""
        sampling = [
            request
            for request, rows in zip(batch.group.requests, batch.quota, strict=True)
            if request.grammar is not None and rows == _missing(request)
        ]
        if sampling:
            for slot, length in self._grammars.write(sampling).items():
                self._chances[slot, length:] = 0.0

    def _prompt_rows(self, batch: Batch, scored: Sequence[int]) -> torch.Tensor:
        rows, first = [], 0
        for chunk, targets in zip(batch.chunks, scored, strict=True):
            rows.extend(range(first, first + targets))
            first += chunk
        return upload(rows, self.state.device)

    def _count_chunks(self, batch: Batch) -> None:
        """Rows of prompts are final as soon as they are launched: whoever comes later finds them in
        the prefix cache, and reads them behind this round."""
        for request, lease, rows in zip(
            batch.group.requests, batch.group.leases, batch.chunks, strict=False
        ):
            self.kv.keep(lease, request.known(request.computed, request.computed + rows))
            request.computed += rows
            if request.computed == request.length:
                self._known = -1

    def _situation(self, batch: Batch) -> Situation:
        slots = list(batch.group.slots[len(batch.chunks) :])
        chances = whose = None
        if self.state.max_drafts and slots:
            chances = torch.from_numpy(self._chances[slots])
            whose = torch.from_numpy(self._whose[slots])
            if batch.ending:
                missing = (0, 0, 0, batch.ending)
                chances = torch.nn.functional.pad(chances, missing)
                whose = torch.nn.functional.pad(whose, missing[2:])
        return Situation(
            requests=batch.samples,
            prompt_rows=batch.prompt_rows,
            chances=chances,
            whose=whose,
            proposers=batch.group.proposers,
            draft_limit=batch.group.draft_limit,
            context=self.reservations.mean_length(batch),
        )

    # --- landing ------------------------------------------------------------------------------

    def land(self) -> Landing:
        """Read the oldest round. The caller ends the requests that it ended before it launches
        another one."""
        flight = self.flights.popleft()
        batch, report = flight.batch, flight.report
        report.wait()
        begun = time.perf_counter()
        read_prompt_scores(report, batch, flight.scored)
        landing = read_report(
            report,
            batch,
            self.kv,
            self.controller.names,
            self.round.books.columns,
            self.state.max_drafts if flight.size.verifies else 0,
        )
        self._note_offers(flight)
        self.reservations.landed(batch, flight.reach)
        outcome = Landed(
            device_seconds=report.seconds(),
            host_seconds=flight.host_seconds + time.perf_counter() - begun,
            verified=landing.verified,
            accepted=landing.accepted,
            drafting=len(landing.drafting),
            ends=len(landing.ended),
        )
        self.planner.landed(flight.decision, flight.situation, outcome)
        landing.seconds = outcome.device_seconds
        landing.size, landing.decision = flight.size, flight.decision
        landing.prompt_rows = batch.prompt_rows
        return landing

    def _note_offers(self, flight: Flight) -> None:
        width, columns = self.state.max_drafts, self.round.books.columns
        if not width:
            return
        requests = flight.batch.group.requests
        slots = np.array([request.slot for request in requests])
        rows = flight.report.rows[: len(slots)].numpy()
        # Who is no longer running has no slot; who samples nothing has no offer.
        known = (slots >= 0) & (rows[:, columns.COUNT] > 0)
        chances = rows[known, columns.chances : columns.chances + width]
        self._chances[slots[known]] = np.ascontiguousarray(chances).view(np.float32)
        self._whose[slots[known]] = rows[known, columns.OFFERER]
        if not flight.batch.group.masked:
            return
        for place in np.flatnonzero(known):
            if requests[place].grammar is not None:
                whose, tokens, parents = columns.read_offer(rows[place].tolist())
                self._grammars.note(requests[place].slot, whose, tokens, parents)

    def drop(self) -> None:
        """Forget what is in flight, and have every running request recomputed from the tokens that
        were read: a round failed, and nobody knows what it left in the slots."""
        self.flights.clear()
        while self.scheduler.running:
            self.scheduler.preempt()
        self.reservations.clear()
        self._batch_set, self._known = None, -1


def _missing(request: Request) -> int:
    """Known tokens without KV, the current one included."""
    return request.length - request.computed


def _prompt_targets(request: Request, rows: int) -> int:
    """How many prompt tokens are predicted by a chunk's rows and still lack their logprob."""
    if request.prompt_scored:
        return 0
    return max(0, min(request.computed + rows, len(request.prompt) - 1) - request.computed)
