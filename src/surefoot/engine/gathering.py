"""Who takes part in the next round: prompt chunks, and requests with a current token."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from surefoot.engine.batch import Batch, Group, Members, Wishes, group, join
from surefoot.engine.chunks import ChunkLimits
from surefoot.engine.scheduler import Scheduler
from surefoot.request import Request, Status

SCORED_ROWS = 1.0
"""What a prompt's row takes longer if its logprobs are wanted, in rows: the head is computed for
it."""
TOGETHER_ROUNDS, TOGETHER_PART = 4, 16
"""To let one request in takes the host as long as to let several in, and longer than all else of a
small model's round. Where it has no time to spare, whoever comes within so many rounds of the last
one waits for the end of these, unless they are more than this part of those that decode."""


class Gathering:
    """Batches of the running requests; waiting ones are let in as far as a round has rows."""

    def __init__(
        self,
        scheduler: Scheduler,
        names: Mapping[int, str],
        max_drafts: int,
        most_rows: int,
        limits: ChunkLimits,
        admit: Callable[[Sequence[Request]], None],
    ) -> None:
        """``names`` of the proposers that may offer, by index; it may lose some. ``max_drafts`` of
        a request, ``most_rows``: known rows of a round. ``limits`` of prompts' rows beside requests
        that decode. ``admit`` is told who was let in."""
        self.scheduler = scheduler
        self.names = names
        self.max_drafts = max_drafts
        self.most_rows = most_rows
        self.limits = limits
        self.admit = admit
        self._since_let_in = TOGETHER_ROUNDS
        """Rounds since it was last tried to let somebody in."""
        self._changes = -1
        """The scheduler's count of changes that the next three are of; -1: none."""
        self._prompts: list[Request] = []
        self._free = Members(scheduler.left)
        """Those that decode and need nothing of the host."""
        self._synchronous: list[Request] = []
        """Those that decode under a grammar."""
        self._batch: Batch | None = None
        """Of the free ones, once it was needed."""
        self._joined: tuple[Batch | None, list[Request], Batch] | None = None
        """The last batch of these and of some under a grammar, who often take part together; None:
        somebody came or left, or has another slot."""

    @property
    def needs_host(self) -> bool:
        """Whether somebody decodes under a grammar."""
        return bool(self._synchronous)

    def forget(self) -> None:
        """Some request is in another state than it was."""
        self._changes = -1

    def next(self, in_flight: Collection[Batch], hurried: bool = False) -> Batch | None:
        """The next round's spans, beside the rounds that are launched already; None: there is
        nobody. ``hurried``: whether the host has no time to spare."""
        self._sort()
        self._since_let_in += 1
        if self.scheduler.waiting:
            count = sum(map(len, self._able(in_flight)))
            if not (hurried and self._can_wait(count)):
                self._let_in(count)
        decoding = self._decoding(in_flight)
        if not self._prompts:
            return decoding
        room = self._prompt_room(0 if decoding is None else decoding.count)
        requests: list[Request] = []
        chunks: list[int] = []
        load = 0.0
        for request in self._prompts:
            if room <= 0:
                break
            requests.append(request)
            weight = self._weight(request)
            most = room if decoding is None else max(1, int(room / weight))
            rows = min(missing(request), most)
            chunks.append(rows)
            load += weight * rows
            room -= rows if decoding is None else math.ceil(weight * rows)
        pairs = zip(requests, chunks, strict=True)
        ending = sum(missing(request) == rows for request, rows in pairs)
        group = self._group(requests)
        if decoding is not None:
            group = join(group, decoding.group)
        return Batch(group, tuple(chunks), ending, round(load))

    def _can_wait(self, count: int) -> bool:
        """Whether those who could come in now may come in a little later, and together, while so
        many decode."""
        recent = self._since_let_in < TOGETHER_ROUNDS
        return recent and TOGETHER_PART * self.scheduler.due <= count

    def _let_in(self, count: int) -> None:
        """As many as there is room for beside so many that decode."""
        self._since_let_in = 0
        left = self._prompt_room(count) - sum(map(missing, self._prompts))
        if fresh := self.scheduler.admit(left):
            Wishes.note(fresh)
            self.admit(fresh)
            self._sort(fresh)

    def _sort(self, fresh: Sequence[Request] = ()) -> None:
        """Who is where, if that has changed, since ``fresh`` were let in."""
        if self._changes == self.scheduler.changes:
            return
        self._joined = None
        others = [
            each
            for each in (*self._synchronous, *self._prompts, *fresh)
            if each.status is Status.RUNNING
        ]
        prompts = [each for each in others if each.in_prompt]
        decoding = [each for each in others if not each.in_prompt]
        if fresh:
            prompts.sort(key=self.scheduler.rank)
        self._prompts = prompts
        self._synchronous = [each for each in decoding if each.grammar is not None]
        # Whoever decodes goes on with it while it runs: hundreds need not be asked again.
        free = [each for each in decoding if each.grammar is None]
        if self._free.drop_left() or free:
            self._free.join(free)
            self._batch = None
        self._changes = self.scheduler.changes

    def _group(self, requests: Sequence[Request]) -> Group:
        return group(requests, self.names, self.max_drafts)

    def _able(self, in_flight: Collection[Batch]) -> tuple[Sequence[Request], list[Request]]:
        """Of those with a current token who can take part: the free ones, and others."""
        free = self._free.requests
        if all(
            request.length + sum(request in batch.group.requests for batch in in_flight)
            >= request.max_length
            for request in free
        ):
            # The rounds in flight end them all.
            free = ()
        return free, [
            request
            for request in self._synchronous
            if not any(request in batch.group.requests for batch in in_flight)
        ]

    def _decoding(self, in_flight: Collection[Batch]) -> Batch | None:
        """Those with a current token that can take part."""
        free, others = self._able(in_flight)
        if free and self._batch is None:
            self._batch = Batch(self._free.group(self.names, self.max_drafts), (), 0)
        batch = self._batch if free else None
        if not others:
            return batch
        if self._joined is None or self._joined[0] is not batch or self._joined[1] != others:
            group = self._group(others)
            group = group if batch is None else join(group, batch.group)
            self._joined = batch, others, Batch(group, (), 0)
        return self._joined[2]

    def _weight(self, request: Request) -> float:
        """Rows at the beginning of a prompt that take as long as the request's next one."""
        scores = request.params.prompt_logprobs is not None and not request.prompt_scored
        return 1.0 + self.limits.rows_per_key * request.computed + (SCORED_ROWS if scores else 0.0)

    def _prompt_room(self, count: int) -> int:
        """The most rows of prompt chunks in the next round, in which so many decode."""
        if not count:
            return self.most_rows
        short = self.limits.short(count, self._pending())
        return max(1, min(self.most_rows - count, short))

    def _pending(self) -> int:
        """Rows of prompts that wait for nothing but rounds, as far as one round goes."""
        return sum(map(missing, self._prompts)) + self.scheduler.due_rows(self.most_rows)


def missing(request: Request) -> int:
    """Known tokens without KV, the current one included."""
    return request.length - request.computed
