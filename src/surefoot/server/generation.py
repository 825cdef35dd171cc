"""Requests as the front sees them: texts that grow."""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from surefoot.engine.output import CompletionOutput, TextStream
from surefoot.request import (
    Drafting,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationParams,
    TokenLogprobs,
)
from surefoot.server.messages import News, decode_score, decode_scores, own_logprob


class Overloaded(Exception):
    """The queue is full; try again after ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full, try again in {retry_after} s")
        self.retry_after = retry_after


class ShuttingDown(Exception):
    """The server ends before the request did."""


@dataclass
class Choice:
    """One text. ``request`` mirrors what the core knows; ``stream`` is its text."""

    index: int
    request: Request
    stream: TextStream
    generation: Generation
    first_at: float | None = None
    last_at: float = 0.0
    taken: int = 0
    """Tokens handed to the client so far."""
    told: bool = False
    """Whether the client was told of the end."""
    scores: list[bytes] = field(default_factory=list)
    """Packed logprobs, by output token."""
    prompt_scores: list[bytes] = field(default_factory=list)
    """Packed logprobs of the prompt, of the first choice."""
    embedding: list[float] | None = None
    """Of the prompt, once it is there."""
    draft_positions: list[int | None] = field(default_factory=list)
    """Per output token: its place in its round's draft, from 1; None for the target's own."""

    @property
    def finished(self) -> bool:
        return self.request.finished

    def tokens_before(self, place: int) -> int:
        """How many tokens the text's first ``place`` characters took."""
        return bisect.bisect_left(self.stream.offsets, place)

    def logprobs(self, first: int, last: int) -> Iterator[TokenLogprobs]:
        """Of these output tokens, ``last`` excluded."""
        return map(decode_score, self.scores[first:last])

    def mean_logprob(self) -> float:
        """Of the tokens of the text; minus infinity if there are none."""
        kept = [own_logprob(score) for score in self.scores[: self.stream.kept]]
        return sum(kept) / len(kept) if kept else -math.inf

    def output(self) -> CompletionOutput:
        """The text as it stands, but for its logprobs."""
        return self.stream.output()

    def enter(self, news: News, proposers: Sequence[str]) -> None:
        """A round's share: tokens, where they came from, and perhaps the end."""
        request = self.request
        name = proposers[news.proposer] if news.proposer >= 0 else None
        offered = news.offered + news.hosted
        drafting = Drafting(name, offered, news.verified, news.accepted)
        request.landed.append((len(request.output), drafting))
        request.output += news.tokens
        own = [None] * (len(news.tokens) - news.accepted)
        self.draft_positions += [*range(1, news.accepted + 1), *own]
        request.cached = news.cached or request.cached
        self.scores += news.logprobs or []
        self.prompt_scores += news.prompt_logprobs or []
        self.embedding = news.embedding
        if news.finish is not None:
            request.finish(FinishReason(news.finish), news.stop)
        self.stream.push(news.tokens, last=request.finished)
        if self.stream.stopped_by is not None:
            request.finish(FinishReason.STOP, self.stream.stopped_by)


@dataclass
class Generation:
    """All choices of one HTTP request: ``n`` for each prompt, in order."""

    prompts: list[list[int]]
    params: SamplingParams
    speculation: SpeculationParams
    choices: list[Choice] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    unanswered: int = 0
    error: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def size(self) -> int:
        """How many tokens and logprobs there are to tell."""
        width = 1 + (self.params.logprobs or 0)
        told = sum(len(choice.request.output) for choice in self.choices) * width
        if self.params.prompt_logprobs is not None:
            told += sum(map(len, self.prompts)) * (self.params.prompt_logprobs + 1) * self.params.n
        return told

    async def change(self) -> None:
        """Wait for news since the last call. Raises what ended the request, if anything did."""
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    def wake(self) -> None:
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._changed.set()

    def prompt_logprobs(self, prompt: int) -> Iterator[TokenLogprobs | None]:
        """Of a prompt's positions, None for the first; complete once a token has come."""
        packed = self.choices[prompt * self.params.n].prompt_scores
        return chain([None], chain.from_iterable(map(decode_scores, packed)))
