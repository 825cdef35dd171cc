"""A request and its life cycle; its parameters are those of ``params``. No torch here."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from surefoot.params import MAX_LOGPROBS, MAX_SEED, SamplingParams, SpeculationParams
from surefoot.structured import TextGrammar

__all__ = [
    "MAX_LOGPROBS",
    "MAX_SEED",
    "Drafting",
    "FinishReason",
    "Request",
    "SamplingParams",
    "SpeculationParams",
    "SpeculationStats",
    "Status",
    "TokenLogprobs",
]


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Drafting(NamedTuple):
    """What one round did with one request's drafts: whose were verified (None for no drafts), how
    many were on offer for the next round, verified, and accepted, and whose were on offer; and of
    those that the host had on offer for this very round, how many and whose."""

    proposer: str | None = None
    offered: int = 0
    verified: int = 0
    accepted: int = 0
    offerer: str | None = None
    hosted: int = 0
    host: str | None = None


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request. ``rounds`` are those that committed tokens."""

    rounds: int = 0
    offered: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_by_proposer: dict[str, int] = field(default_factory=dict)
    verified_by_proposer: dict[str, int] = field(default_factory=dict)

    def count(self, drafting: Drafting) -> None:
        """Enter a round that committed tokens."""
        self.rounds += 1
        self.offered += drafting.offered + drafting.hosted
        if (name := drafting.proposer) is not None:
            self.verified += drafting.verified
            self.accepted += drafting.accepted
            by_proposer = self.verified_by_proposer
            by_proposer[name] = by_proposer.get(name, 0) + drafting.verified
            by_proposer = self.accepted_by_proposer
            by_proposer[name] = by_proposer.get(name, 0) + drafting.accepted

    def kept(self, sources: Sequence[str | None]) -> SpeculationStats:
        """Of a text of which only tokens by these proposers (None: the target's own) are left, as
        a stop string cut it: the drafts behind that were verified, but not accepted."""
        by_proposer = dict.fromkeys(self.accepted_by_proposer, 0)
        for name in sources:
            if name is not None:
                by_proposer[name] += 1
        accepted = sum(by_proposer.values())
        # A round's last token is the target's own, unless the text ends with a draft.
        cut = bool(sources) and sources[-1] is not None
        rounds = len(sources) - accepted + cut
        return replace(self, rounds=rounds, accepted=accepted, accepted_by_proposer=by_proposer)

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round, the target's own included."""
        return (self.rounds + self.accepted) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one position: of the token there, its rank (1 = most likely), and of the most
    likely tokens in falling order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class PromptPool:
    """The sum of the last, normed hidden states of a prompt's first ``rows`` tokens, float64."""

    rows: int = 0
    total: Sequence[float] = ()

    def add(self, rows: int, total: Sequence[float]) -> None:
        """Those of the next ``rows`` tokens."""
        self.total = [a + b for a, b in zip(self.total, total, strict=True)] if self.rows else total
        self.rows += rows

    @property
    def mean(self) -> list[float]:
        return [value / self.rows for value in self.total]


@dataclass(eq=False, slots=True)
class Request:
    """One text being generated: a choice of a user's prompt, with its own seed and choice index.

    ``max_length`` bounds prompt and output together. ``computed`` counts the leading tokens whose
    KV is written; the last token of a running request is its current token.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationParams
    seed: int
    max_length: int
    end_tokens: tuple[int, ...] = ()
    choice: int = 0
    leader: Request | None = None
    """The first choice of the same prompt: the others wait for its prefill and share its blocks."""
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    slot: int = -1
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    queued_seconds: float | None = None
    """From then until it was let in for the first time."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    priority: int = 0
    """Lower ones are let in first."""
    pooling: PromptPool | None = None
    """What is kept of the prompt's hidden states, where they are wanted; then the one token that it
    generates means nothing."""
    drafters: frozenset[str] = frozenset()
    """Proposers with KV of their own that serve it: they may draft for it, and keep up with it."""
    declined: frozenset[str] = frozenset()
    """Others that its choice of speculation allows, without which it was let in."""
    grammar: TextGrammar | None = None
    """Where the output stands in its grammar, or other rules for its tokens, if it has any."""
    wishes: Any = None
    """What it wants of its rounds (``engine.batch.Wishes``), since it was let in."""
    upkeep: int = 0
    """What it counts as there (``speculation.upkeep``); 0: as nothing."""
    landed: list[tuple[int, Drafting]] = field(default_factory=list)
    """What rounds that committed tokens did with drafts, as far as nobody asked, and how many
    tokens the output had before each. A round enters it before its tokens, if it had to do with
    drafts: one that had not gave one token. (Hundreds of requests have one every few milliseconds,
    and few are asked.)"""
    _stats: SpeculationStats = field(default_factory=SpeculationStats)
    _proposed_by: list[str | None] = field(default_factory=list)

    @property
    def stats(self) -> SpeculationStats:
        """What speculation did for it."""
        self._count_landed()
        return self._stats

    @property
    def proposed_by(self) -> list[str | None]:
        """Per output token: the proposer whose accepted draft it was, None for the target's own."""
        self._count_landed()
        # A text may end with a draft, and then that round has no token of the target's.
        del self._proposed_by[len(self.output) :]
        return self._proposed_by

    def _count_landed(self) -> None:
        for before, drafting in self.landed:
            self._count_plain(before)
            self._stats.count(drafting)
            self._proposed_by += [*[drafting.proposer] * drafting.accepted, None]
        self.landed.clear()
        self._count_plain(len(self.output))

    def _count_plain(self, tokens: int) -> None:
        """Up to so many tokens of the output, rounds had nothing to do with drafts."""
        rounds = max(0, tokens - len(self._proposed_by))
        self._stats.rounds += rounds
        self._proposed_by += [None] * rounds

    def allows(self, proposer: str) -> bool:
        """Whether the proposer may draft for it."""
        return proposer not in self.declined and self.speculation.allows(proposer)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def known(self, first: int, end: int) -> list[int]:
        """Tokens ``first`` to ``end`` (exclusive) of the text."""
        prompt = len(self.prompt)
        if first >= prompt:
            return self.output[first - prompt : end - prompt]
        return [*self.prompt[first:end], *self.output[: max(end - prompt, 0)]]

    @property
    def prompt_scored(self) -> bool:
        """Whether nothing is wanted of the prompt's rows, or all logprobs are there."""
        wanted = self.params.prompt_logprobs is not None
        scored = not wanted or len(self.prompt_logprobs) == len(self.prompt) - 1
        return scored and self.pooling is None

    @property
    def in_prompt(self) -> bool:
        """Whether it has rows of its prompt before it, beside the current token's; that one counts
        where all are pooled."""
        # Not by ``length``: of every request this is asked several times a round.
        rest = len(self.prompt) + len(self.output) - self.computed
        return rest > (1 if self.pooling is None else 0)

    def forget_scores(self) -> None:
        """The prompt will run again from the start."""
        self.prompt_logprobs.clear()
        if self.pooling is not None:
            self.pooling = PromptPool()

    @property
    def end(self) -> FinishReason | None:
        """Whether the text ends with its last token, and by what: what rounds find out, too."""
        if self.output and self.output[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.max_length else None

    def settle(self) -> None:
        """Entering a round's tokens was broken off somewhere: of a token whose logprobs and source
        are not there as well, nothing is left."""
        if self.params.logprobs is not None:
            count = min(len(self.logprobs), len(self.output))
            del self.logprobs[count:], self.output[count:]
        self._count_landed()
        del self._proposed_by[len(self.output) :]
        if self.grammar is not None:
            self.grammar.restart()

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends this request: the model's end tokens unless ignored, and its own."""
        ends = () if self.params.ignore_eos else self.end_tokens
        return tuple(dict.fromkeys((*ends, *(self.params.stop_token_ids or ()))))

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.status = Status.FINISHED
