"""The front's requests: prompts sent to the core, and what it says of them handed on."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

from surefoot.engine.output import TextStream
from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from surefoot.server.core_process import CoreDied, CoreProcess
from surefoot.server.generation import Choice, Generation, Overloaded, ShuttingDown
from surefoot.server.messages import (
    Abort,
    Accepted,
    Add,
    Failed,
    Ready,
    Refused,
    Round,
    SwitchedOff,
)
from surefoot.server.metrics import Metrics

logger = logging.getLogger("surefoot.server")


class Front:
    """Hands requests to the core and its news to the requests."""

    def __init__(
        self, core: CoreProcess, ready: Ready, tokenizer: Tokenizer, max_queue: int
    ) -> None:
        self.core = core
        self.ready = ready
        self.tokenizer = tokenizer
        self._most = ready.max_num_seqs + max_queue
        self.metrics = Metrics(ready)
        self.dead: CoreDied | None = None
        self._choices: dict[str, Choice] = {}
        self._ids = itertools.count()

    @property
    def active(self) -> int:
        """Choices that run or wait."""
        return len(self._choices)

    @property
    def methods(self) -> list[str]:
        """What a request's ``speculation.method`` may be."""
        loaded = self.ready.proposers
        return ["auto", "off", *(x for x in loaded if x not in self.metrics.switched_off)]

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        speculation: SpeculationParams,
        priority: int = 0,
        shown: frozenset[int] = frozenset(),
        pools: bool = False,
    ) -> Generation:
        """Start generating; returns when the core has accepted everything. Those with a lower
        ``priority`` run first. ``shown``: special tokens that are part of the text in any case.
        ``pools``: the prompts' embeddings are wanted.

        Raises SurefootError for what the engine refuses, Overloaded, and CoreDied.
        """
        if self.dead is not None:
            raise CoreDied(*self.dead.args)
        self.check_room(len(prompts), params.n)
        generation = Generation([list(prompt) for prompt in prompts], params, speculation)
        for tokens in generation.prompts:
            prompt = tuple(tokens)
            ids = [self._open(generation, prompt, shown) for _ in range(params.n)]
            generation.unanswered += len(ids)
            self.core.send(Add(ids, tokens, params, speculation, priority, pools))
        try:
            while generation.unanswered:
                await generation.change()
        except BaseException:
            self.cancel(generation)
            raise
        generation.wake()
        self.metrics.count_arrival(generation)
        return generation

    def check_room(self, prompts: int, n: int) -> None:
        """Whether that many prompts, with ``n`` texts each, may wait. Raises SurefootError for more
        than ever may, and Overloaded."""
        count = prompts * n
        self.check_count(count, "n" if n > 1 else "prompt")
        if self.active + count > self._most:
            self.metrics.rejected += 1
            # Half of what runs ends within about this long.
            raise Overloaded(max(1, round(self.metrics.typical_seconds() / 2)))

    def check_count(self, texts: int, option: str) -> None:
        """Refuse, naming ``option``, more texts than ever run and wait."""
        if texts > self._most:
            problem = f"asks for {texts} texts, more than run and wait at once"
            raise SurefootError(option, problem, f"{self._most} do")

    def _open(self, generation: Generation, prompt: tuple[int, ...], shown: frozenset[int]) -> str:
        index = len(generation.choices)
        params = generation.params
        request = Request(
            request_id=str(next(self._ids)),
            prompt=prompt,
            params=params,
            speculation=generation.speculation,
            seed=0,  # the core's business
            max_length=self.ready.max_model_len,
            end_tokens=self.ready.end_tokens,
            choice=index % params.n,
        )
        choice = Choice(index, request, TextStream(request, self.tokenizer, shown), generation)
        generation.choices.append(choice)
        self._choices[request.request_id] = choice
        return request.request_id

    def cancel(self, generation: Generation) -> None:
        """Stop whatever of it still runs, for a client that left or a request that failed."""
        ids = []
        for choice in generation.choices:
            if self._choices.pop(choice.request.request_id, None) is not None:
                ids.append(choice.request.request_id)
                choice.request.finish(FinishReason.ABORT)
                self.metrics.count_end(choice)
        if ids and self.dead is None:
            self.core.send(Abort(ids))

    async def listen(self) -> None:
        """Take the core's messages until it dies, which every open request is told."""
        try:
            while True:
                message = await self.core.receive()
                if isinstance(message, Round):
                    self._enter(message)
                elif isinstance(message, Accepted):
                    self._answered(message.ids, None)
                elif isinstance(message, Refused):
                    error = SurefootError(message.option, message.problem, message.fix)
                    self._answered(message.ids, error)
                elif isinstance(message, SwitchedOff):
                    self.metrics.switched_off.update(message.proposers)
                    names = ", ".join(message.proposers)
                    logger.warning(
                        "proposer %s is switched off, as it failed: %s", names, message.error
                    )
                elif isinstance(message, Failed):
                    raise CoreDied(f"{message.option}: {message.problem}")
        except Exception as error:
            # Whatever it was: without this loop every request would wait for ever.
            died = isinstance(error, CoreDied)
            self.dead = error if died else CoreDied(f"{type(error).__name__}: {error}")
            for choice in list(self._choices.values()):
                choice.generation.fail(CoreDied(*self.dead.args))

    def _answered(self, ids: list[str], error: SurefootError | None) -> None:
        for name in ids:
            choice = self._choices.get(name)
            if choice is None:
                continue
            generation = choice.generation
            generation.unanswered -= 1
            if error is not None:
                # The core does not know it: nothing to abort.
                del self._choices[name]
                generation.fail(error)
            elif not generation.unanswered:
                generation.wake()

    def _enter(self, message: Round) -> None:
        now = time.perf_counter()
        stopped = []
        for news in message.news:
            choice = self._choices.get(news.id)
            if choice is None:
                # Cancelled while the round ran.
                continue
            kept = choice.stream.kept
            choice.enter(news, self.ready.proposers)
            self.metrics.count_news(choice, news, choice.stream.kept - kept, now)
            if choice.finished:
                del self._choices[news.id]
                self.metrics.count_end(choice)
                if news.finish is None:
                    stopped.append(news.id)
            choice.generation.wake()
        self.metrics.totals = message.totals
        if stopped:
            self.core.send(Abort(stopped))

    def give_up(self) -> None:
        """End everything that is open: the server has waited long enough."""
        for generation in {id(c.generation): c.generation for c in self._choices.values()}.values():
            self.cancel(generation)
            generation.fail(ShuttingDown("the server is shutting down"))
