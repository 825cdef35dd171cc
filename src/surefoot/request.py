"""A request, its sampling parameters and its life cycle. No torch here."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from surefoot.errors import SurefootError
from surefoot.structured import StructuredOutputsParams, TextGrammar

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 50


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; names and meanings are those of vLLM.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 filter nothing;
    min_p is applied first, then top_k, then top_p, each keeping ties at its border.
    ``max_tokens`` None means up to the end of the context. ``seed`` None draws a fresh seed.
    ``stop`` strings end the text before their first occurrence (after it with
    ``include_stop_str_in_output``). ``min_tokens`` keeps end tokens and stop token ids from being
    sampled, and stop strings from ending the text, that long. ``logprobs`` k gives the k most
    likely tokens and the sampled one at each position, before grammar masks, penalties and
    filters; ``prompt_logprobs`` likewise for the prompt. ``structured_outputs`` (or a mapping with
    its fields) is the grammar that the text has to fit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            self._check_structure()
        _whole(self, "n", 1, 128)
        _number(self, "temperature", 0, 100)
        _number(self, "top_p", 0, 1, open_low=True)
        _whole(self, "top_k", -1, None)
        _number(self, "min_p", 0, 1)
        _number(self, "repetition_penalty", 0, 100, open_low=True)
        _number(self, "presence_penalty", -2, 2)
        _number(self, "frequency_penalty", -2, 2)
        if self.seed is not None:
            _whole(self, "seed", 0, MAX_SEED)
        if self.max_tokens is not None:
            _whole(self, "max_tokens", 1, None)
        _whole(self, "min_tokens", 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(self, name, 0, MAX_LOGPROBS)
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or not 0 <= token <= MAX_SEED:
                raise SurefootError("logit_bias", f"{token!r} is no token id", "use whole numbers")
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise SurefootError("logit_bias", f"bias {bias!r} is outside -100 to 100")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise SurefootError("stop", "stop strings must be non-empty text")
        for token in self.stop_token_ids or ():
            if not isinstance(token, int) or not 0 <= token <= MAX_SEED:
                raise SurefootError("stop_token_ids", f"{token!r} is no token id")

    def _check_structure(self) -> None:
        structure = StructuredOutputsParams.of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", structure)
        # Where a grammar leaves nothing but the end, these would leave nothing at all.
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise SurefootError(
                    name, "does not go with structured output", "the grammar says where a text ends"
                )

    @classmethod
    def with_defaults(
        cls, given: Mapping[str, Any], defaults: Mapping[str, Any], room: int
    ) -> SamplingParams:
        """The fields in ``given``, and for the others ``defaults``.

        ``room``: how many tokens the context has left after the prompt. A default of
        ``max_tokens`` is adapted to it and to ``min_tokens``, as a request must not fail for what
        it did not ask; a value in ``given`` is not.
        """
        values = {**defaults, **given}
        if "max_tokens" in defaults and "max_tokens" not in given:
            wanted = max(defaults["max_tokens"], given.get("min_tokens", 0))
            # Without room the prompt is at fault, and the engine will say so.
            values["max_tokens"] = min(wanted, room) if room > 0 else None
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalised(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1 or any(penalties)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from named values; unknown names are an error that lists the known ones."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise SurefootError(name, "is no sampling parameter", f"known: {', '.join(known)}")
        return cls(**values)


def _number(params: Any, name: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(params, name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise SurefootError(name, f"{value!r} is out of range", f"use {bracket}{low}, {high}]")


def _whole(params: Any, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    good = isinstance(value, int) and not isinstance(value, bool)
    # Beyond 64 bits nothing is a number any more to a tensor or a message between processes.
    if not good or not low <= value <= (MAX_SEED if high is None else high):
        limit = f"from {low}" + (f" to {high}" if high is not None else "")
        raise SurefootError(name, f"{value!r} is out of range", f"use a whole number {limit}")


@dataclass(frozen=True)
class SpeculationParams:
    """Which proposer may draft for a request, and how much.

    ``method``: ``auto`` (the controller chooses), ``off``, or the name of a loaded proposer.
    ``max_draft_tokens`` bounds the drafts verified in one round. Neither changes the text.
    """

    method: str = "auto"
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise SurefootError("speculation.method", f"{self.method!r} is no name")
        if self.max_draft_tokens is not None:
            _whole(self, "max_draft_tokens", 0, None)

    def allows(self, proposer: str) -> bool:
        """Whether the proposer may draft for the request."""
        return self.method in ("auto", proposer) and self.max_draft_tokens != 0

    @classmethod
    def of(cls, value: SpeculationParams | Mapping[str, Any] | str | None) -> SpeculationParams:
        """From an instance, a method's name, a mapping with the fields' names, or None (auto)."""
        if value is None:
            return cls()
        if isinstance(value, SpeculationParams):
            return value
        if isinstance(value, str):
            return cls(method=value)
        for name in value:
            if name not in ("method", "max_draft_tokens"):
                raise SurefootError(
                    f"speculation.{name}", "is no option", "known: method, max_draft_tokens"
                )
        return cls(**value)


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass
class SpeculationStats:
    """What speculation did for one request. ``rounds`` are those that committed tokens."""

    rounds: int = 0
    offered: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_by_proposer: dict[str, int] = field(default_factory=dict)
    verified_by_proposer: dict[str, int] = field(default_factory=dict)

    def count(self, name: str | None, offered: int, verified: int, accepted: int) -> None:
        """Enter a round that committed tokens; ``name`` proposed the drafts, None for none."""
        self.rounds += 1
        self.offered += offered
        if name is not None:
            self.verified += verified
            self.accepted += accepted
            by_proposer = self.verified_by_proposer
            by_proposer[name] = by_proposer.get(name, 0) + verified
            by_proposer = self.accepted_by_proposer
            by_proposer[name] = by_proposer.get(name, 0) + accepted

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


@dataclass(eq=False)
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
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafters: frozenset[str] = frozenset()
    """Proposers with KV of their own that may draft for it."""
    grammar: TextGrammar | None = None
    """Where the output stands in its grammar, if it has one."""
    _proposed_by: list[str | None] = field(default_factory=list)
    """As far as the last accepted draft, at least."""

    @property
    def proposed_by(self) -> list[str | None]:
        """Per output token: the proposer whose accepted draft it was, None for the target's own."""
        known = self._proposed_by
        known += [None] * (len(self.output) - len(known))
        return known

    def note_drafts(self, proposer: str | None, count: int) -> None:
        """Say whose accepted drafts the next ``count`` output tokens are, before they are added."""
        if count:
            sources = self.proposed_by
            sources += [proposer] * count

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def known(self, first: int, end: int) -> list[int]:
        """Tokens ``first`` to ``end`` (exclusive) of the text."""
        prompt = len(self.prompt)
        if end <= prompt:
            return list(self.prompt[first:end])
        return [*self.prompt[first:], *self.output[max(first - prompt, 0) : end - prompt]]

    @property
    def prompt_scored(self) -> bool:
        """Whether no prompt logprobs are wanted, or all are there."""
        wanted = self.params.prompt_logprobs is not None
        return not wanted or len(self.prompt_logprobs) == len(self.prompt) - 1

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
