"""Who takes part in the next round: continuous batching, chunked prefill, preemption. No torch.

Running requests with a current token come first, then chunks of unfinished prefills, then new
requests in order of arrival, all in one flat batch of at most ``max_num_batched_tokens`` rows
before drafts. A shortage of KV first costs drafts, then preempts the youngest request, which is
recomputed later; it is never an error for the user.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.kv.transaction import KVManager, Transaction
from surefoot.request import FinishReason, Request, Status

DraftSizer = Callable[[Sequence[Request], int], Mapping[str, int]]
"""(requests with a current token, rows of the round without drafts) -> drafts by request id."""
ChunkSizer = Callable[[int], int]
"""Requests with a current token -> the most rows of a prefill chunk beside them."""


@dataclass
class Span:
    """One request's rows in a round, starting at its first position without KV.

    ``rows`` counts known tokens (a prefill chunk, or 1: the current token), ``drafts`` those that
    follow. ``samples``: the rows reach the current token, so the round commits tokens.
    """

    request: Request
    rows: int
    drafts: int = 0
    samples: bool = True


@dataclass
class Plan:
    """A round: prefill chunks first, then spans of requests with a current token."""

    transaction: Transaction
    spans: list[Span] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(span.rows + span.drafts for span in self.spans)


class Scheduler:
    def __init__(self, kv: KVManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_rows: ChunkSizer | None = None
        """Keeps chunks so short that running requests keep their pace; None: nothing is known."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals: dict[str, int] = {}
        self._next_arrival = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self._arrivals[request.request_id] = self._next_arrival
        self._next_arrival += 1
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason, stop: int | str | None = None) -> None:
        """End a request in any state and free what it holds. Ended ones are left alone."""
        if request.finished:
            return
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        del self._arrivals[request.request_id]
        request.finish(reason, stop)

    def can_admit(self) -> bool:
        """Whether the next waiting request would probably be let in."""
        if not self._free_slots:
            return False
        for request in self.waiting:
            leader = request.leader
            if leader is None or leader.finished or leader.output:
                room = self.kv.pool.num_free - len(self.running)
                return self.kv.blocks_for(request.length) <= room or not self.running
        return False

    def schedule(self, draft_sizes: DraftSizer) -> Plan:
        """Plan a round and reserve its KV. The caller runs it inside ``plan.transaction`` and
        reports with ``apply``."""
        plan = Plan(self.kv.transaction())
        decoding = [request for request in self.running if not request.prefilling]
        budget = self.max_num_batched_tokens - len(decoding)
        if decoding and self.chunk_rows is not None and self._prefill_is_due():
            budget = min(budget, max(1, self.chunk_rows(len(decoding))))
        chunks = []
        for request in self.running:
            if request.prefilling and budget > 0:
                chunks.append(Span(request, min(request.length - request.computed, budget)))
                budget -= chunks[-1].rows
        needed = sum(self._missing_blocks(request, 1) for request in decoding)
        needed += sum(self._missing_blocks(span.request, span.rows) for span in chunks)
        for request in self._admit(budget, needed):
            plan.admitted.append(request)
            if request.prefilling:
                chunks.append(Span(request, min(request.length - request.computed, budget)))
                budget -= chunks[-1].rows
            else:
                decoding.append(request)
                budget -= 1
        for span in chunks:
            span.samples = span.request.computed + span.rows == span.request.length
        plan.spans = chunks + [Span(request, 1) for request in decoding]
        drafts = draft_sizes(decoding, plan.rows) if decoding else {}
        for span in plan.spans[len(chunks) :]:
            span.drafts = drafts.get(span.request.request_id, 0)
        self._reserve(plan)
        return plan

    def _prefill_is_due(self) -> bool:
        return bool(self.waiting) or any(request.prefilling for request in self.running)

    def _admit(self, budget: int, needed: int) -> list[Request]:
        """Start waiting requests whose whole known text fits beside what the round needs."""
        admitted: list[Request] = []
        skipped: list[Request] = []
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting.popleft()
            leader = request.leader
            if leader is not None and not leader.finished and not leader.output:
                skipped.append(request)
                continue
            # Prompt logprobs need every prompt row to run.
            request.computed = self.kv.open(
                request.request_id, request.tokens, request.prompt_scored, request.drafters
            )
            missing = self._missing_blocks(request, request.length - request.computed)
            if needed + missing > self.kv.pool.num_free:
                self.kv.close(request.request_id)
                request.computed = 0
                skipped.append(request)
                break
            needed += missing
            budget -= min(request.length - request.computed, budget)
            if request.preemptions == 0:
                request.cached = request.computed
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            self.running.append(request)
            admitted.append(request)
        self.waiting.extendleft(reversed(skipped))
        self.running.sort(key=self._arrival)
        return admitted

    def _reserve(self, plan: Plan) -> None:
        while plan.spans:
            wanted = {s.request.request_id: s.rows + s.drafts for s in plan.spans}
            if plan.transaction.reserve(wanted):
                return
            if any(span.drafts for span in plan.spans):
                for span in plan.spans:
                    span.drafts = 0
                continue
            victim = max(self.running, key=self._arrival)
            plan.spans = [span for span in plan.spans if span.request is not victim]
            plan.preempted.append(victim)
            self._preempt(victim)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status = Status.WAITING
        request.preemptions += 1
        request.computed = 0
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        self.kv.close(request.request_id)

    def _arrival(self, request: Request) -> int:
        return self._arrivals[request.request_id]

    def _missing_blocks(self, request: Request, rows: int) -> int:
        lease = self.kv.leases[request.request_id]
        return max(0, self.kv.blocks_for(lease.committed + rows) - len(lease.blocks))

    def apply(self, plan: Plan, committed: Mapping[str, Sequence[int]]) -> None:
        """Enter a round's outcome: the tokens each sampling span committed, by request id."""
        for span in plan.spans:
            request = span.request
            known = request.tokens
            if span.samples:
                tokens = committed[request.request_id]
                request.output.extend(tokens)
                known.extend(tokens)
                computed = request.length - 1
            else:
                computed = request.computed + span.rows
            plan.transaction.commit(request.request_id, known[request.computed : computed])
            request.computed = computed

    def check_integrity(self) -> None:
        """Assert that slots, leases and states agree."""
        self.kv.check_integrity()
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        assert {r.request_id for r in self.running} == set(self.kv.leases)
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status is Status.WAITING for request in self.waiting)
        for request in self.running:
            assert request.computed == self.kv.leases[request.request_id].committed
            assert 0 <= request.computed < request.length
