"""Who runs: the queue, slots, admission by room in the KV pool, preemption. No torch.

Requests are let in by priority (lower first), and within one by order of arrival, once their whole
known text has room. A shortage of KV later preempts the last one in that order, which is recomputed
when there is room again; it is never an error for the user.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from surefoot.kv.transaction import KVManager
from surefoot.request import FinishReason, Request, Status

if TYPE_CHECKING:
    from surefoot.speculation.upkeep import Upkeep


class Scheduler:
    def __init__(self, kv: KVManager, max_num_seqs: int, upkeep: Upkeep | None = None) -> None:
        """``upkeep``: chooses who is let in without drafters; None: nobody."""
        self.kv = kv
        self.upkeep = upkeep
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Like ``waiting`` in order of priority, and within one of arrival."""
        self.changes = 0
        """How often ``running`` changed."""
        self.left = np.zeros(max_num_seqs, dtype=np.int64)
        """How often each slot was left."""
        self._entered: list[Request] = []
        """Running requests whose prompts may not have all their blocks."""
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals: dict[Request, int] = {}
        """Of all requests that have not ended, in order."""
        self._next_arrival = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self._arrivals[request] = self._next_arrival
        self._next_arrival += 1
        self._wait(request)

    def finish(self, request: Request, reason: FinishReason, stop: int | str | None = None) -> None:
        """End a request in any state and free what it holds. Ended ones are left alone."""
        if request.finished:
            return
        running = request.status is Status.RUNNING
        # First, so that it stays ended whatever fails.
        request.finish(reason, stop)
        if self._arrivals.pop(request, None) is None:
            return  # It never was added.
        if running:
            self._leave(request)
        else:
            self.waiting.remove(request)

    def admit(self, rows: int) -> list[Request]:
        """Let in waiting requests, in order, while a round has ``rows`` left for their prompts and
        the pool has room for their whole known texts beside a block for each running request and
        what other prompts will still need."""
        admitted: list[Request] = []
        skipped: list[Request] = []
        if not self.waiting or not self._free_slots or rows <= 0:
            return admitted
        promised = self._promised_at_most()
        exact = False
        while self.waiting and self._free_slots and rows > 0:
            request = self.waiting.popleft()
            leader = request.leader
            if leader is not None and not leader.finished and not leader.output:
                skipped.append(request)
                continue
            if self.upkeep is not None:
                running = len(self.running)
                load = running + len(self.waiting) + len(skipped) + 1
                self.upkeep.choose(request, running, min(load, self.max_num_seqs))
            # Prompt logprobs need every prompt row to run.
            self.kv.open(request.request_id, request, request.prompt_scored, request.drafters)
            missing = self._missing_blocks(request)
            if promised + missing > self.kv.pool.num_free and not exact:
                promised, exact = self._promised(), True
            if promised + missing > self.kv.pool.num_free:
                self.kv.close(request.request_id)
                request.computed = 0
                skipped.append(request)
                break
            promised += missing
            rows -= request.length - request.computed
            if request.preemptions == 0:
                request.cached = request.computed
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            self.running.append(request)
            self._entered.append(request)
            admitted.append(request)
        self.waiting.extendleft(reversed(skipped))
        if admitted:
            self.changes += 1
            if self.upkeep is not None:
                self.upkeep.enter(admitted)
            running = self.running
            first = len(running) - len(admitted)
            # Mostly those that came last are let in last.
            if first and self.rank(running[first - 1]) > self.rank(admitted[0]):
                running.sort(key=self.rank)
        return admitted

    @property
    def due(self) -> int:
        """Waiting requests for which there are slots."""
        return min(len(self.waiting), len(self._free_slots))

    def due_rows(self, most: int) -> int:
        """Rows of the prompts of those that are ``due``; it stops counting at ``most``."""
        rows = 0
        for request in itertools.islice(self.waiting, self.due):
            # Second choices find the first one's prompt in the prefix cache.
            rows += request.length if request.leader is None else 0
            if rows >= most:
                break
        return rows

    def preempt(self) -> Request:
        """The last running request in order goes back to the queue and gives up its blocks."""
        request = max(self.running, key=self.rank)
        self._leave(request)
        request.status = Status.WAITING
        request.preemptions += 1
        request.computed = 0
        self._wait(request)
        return request

    def restart(self) -> None:
        """All that have not ended wait again, in order, and hold nothing; whatever state this was
        left in."""
        self.changes += 1
        self.left += 1
        self.running.clear()
        self._free_slots[:] = range(self.max_num_seqs - 1, -1, -1)
        self.kv.clear()
        for request in list(self._arrivals):
            if request.finished:
                del self._arrivals[request]
                continue
            request.preemptions += request.status is Status.RUNNING
            request.status = Status.WAITING
            request.slot, request.computed = -1, 0
        self.waiting = deque(sorted(self._arrivals, key=self.rank))

    def _leave(self, request: Request) -> None:
        self.changes += 1
        self.running.remove(request)
        self.left[request.slot] += 1
        self._free_slots.append(request.slot)
        request.slot = -1
        self.kv.close(request.request_id)

    def _wait(self, request: Request) -> None:
        """Put a request in its place in the queue."""
        rank, place = self.rank(request), len(self.waiting)
        # Those that come to a queue mostly belong at its end.
        while place and self.rank(self.waiting[place - 1]) > rank:
            place -= 1
        self.waiting.insert(place, request)

    def rank(self, request: Request) -> tuple[int, int]:
        """Lower ones come first."""
        return request.priority, self._arrivals[request]

    def _missing_blocks(self, request: Request) -> int:
        """Blocks that the known text lacks; one, at least, if it has none for its next token."""
        lease = self.kv.leases[request.request_id]
        return max(0, self.kv.blocks_for(request.length) - len(lease.blocks))

    def _promised_at_most(self) -> int:
        """``_promised``, or more: who decodes may lack a block for its next token."""
        # Hundreds may run, and somebody comes in every other round.
        self._entered = [
            each for each in self._entered if each.status is Status.RUNNING and each.in_prompt
        ]
        missing = sum(map(self._missing_blocks, self._entered))
        return missing + len(self.running) - len(self._entered)

    def _promised(self) -> int:
        """``_missing_blocks`` of all that run."""
        # Without a call for each: where the pool is full, every round asks.
        leases, size = self.kv.leases, self.kv.block_size
        missing = (
            -(-(len(each.prompt) + len(each.output)) // size) - len(leases[each.request_id].blocks)
            for each in self.running
        )
        return sum(count for count in missing if count > 0)

    def check_integrity(self) -> None:
        """Assert that slots, leases and states agree."""
        self.kv.check_integrity()
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        assert {r.request_id for r in self.running} == set(self.kv.leases)
        assert self._promised_at_most() >= self._promised()
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status is Status.WAITING for request in self.waiting)
        assert {*self.running, *self.waiting} == set(self._arrivals)
        for queue in (list(self.waiting), self.running):
            assert queue == sorted(queue, key=self.rank)
        for request in self.running:
            assert self.kv.leases[request.request_id].text is request
            assert 0 <= request.computed <= request.length
