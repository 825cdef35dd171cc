"""What a user may ask of a text: how its tokens are chosen, and who may draft. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from surefoot.errors import SurefootError
from surefoot.structured import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 50
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 256, 8192
MAX_STOP_CHARACTERS = 8192
"""Of all stop strings together, as each token's text is held to them."""
MAX_STOP_TOKENS, MAX_BIASES = 128, 1024
"""Every round looks at them for every text."""


@dataclass(frozen=True)
class Range:
    """``low`` to ``high``, both included unless ``open_low``; of whole numbers, None is no limit
    but that of 64 bits: beyond them nothing is a number any more to a tensor or a message."""

    low: float
    high: float | None
    whole: bool = False
    open_low: bool = False

    @property
    def most(self) -> float:
        return MAX_SEED if self.high is None else self.high

    def check(self, name: str, value: Any) -> None:
        """Raises SurefootError for what is outside."""
        kinds = int if self.whole else int | float
        good = isinstance(value, kinds) and not isinstance(value, bool)
        if good and self.low <= value <= self.most and not (self.open_low and value == self.low):
            return
        if self.whole:
            limit = f"from {self.low}" + (f" to {self.high}" if self.high is not None else "")
            wanted = f"use a whole number {limit}"
        else:
            wanted = f"use {'(' if self.open_low else '['}{self.low}, {self.high}]"
        raise SurefootError(name, f"{value!r} is out of range", wanted)


RANGES: Mapping[str, Range] = {
    "n": Range(1, 128, whole=True),
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, open_low=True),
    "top_k": Range(-1, None, whole=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, open_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(0, MAX_SEED, whole=True),
    "max_tokens": Range(1, None, whole=True),
    "min_tokens": Range(0, None, whole=True),
    "logprobs": Range(0, MAX_LOGPROBS, whole=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, whole=True),
}
"""Of the numbers in ``SamplingParams``."""
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})
"""Which of them may be None."""


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
    filters; ``prompt_logprobs`` likewise for the prompt. ``bad_words`` do not occur in the output
    as the tokenizer writes them, by themselves or behind a space: a token that would complete one
    is not sampled. Other tokens than ``allowed_token_ids`` are not sampled, end tokens included.
    ``structured_outputs`` (or a mapping with its fields) is the grammar that the text has to fit;
    the other two then leave its end alone.
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
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            self._check_structure()
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                bounds.check(name, value)
        if self.max_tokens is not None:
            Range(0, self.max_tokens, whole=True).check("min_tokens", self.min_tokens)
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise SurefootError("logit_bias", f"has over {MAX_BIASES} entries")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or not 0 <= token <= MAX_SEED:
                raise SurefootError("logit_bias", f"{token!r} is no token id", "use whole numbers")
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise SurefootError("logit_bias", f"bias {bias!r} is outside -100 to 100")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise SurefootError("stop", "stop strings must be non-empty text")
        if sum(map(len, self.stop_strings)) > MAX_STOP_CHARACTERS:
            raise SurefootError("stop", f"has over {MAX_STOP_CHARACTERS} characters together")
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKENS:
            raise SurefootError("stop_token_ids", f"has over {MAX_STOP_TOKENS} entries")
        self._check_ids("stop_token_ids")
        self._check_rules()

    def _check_rules(self) -> None:
        words = self.bad_words or ()
        if isinstance(words, str) or any(not isinstance(text, str) or not text for text in words):
            raise SurefootError("bad_words", "must be non-empty texts", "give a list of them")
        if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_CHARACTERS:
            raise SurefootError(
                "bad_words",
                f"are over {MAX_BAD_WORDS} words, or {MAX_BAD_CHARACTERS} characters together",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise SurefootError("allowed_token_ids", "are none", "name some, or drop it")
        self._check_ids("allowed_token_ids")

    def _check_ids(self, name: str) -> None:
        ids = getattr(self, name) or ()
        # Without a loop, as there may be as many as the model has.
        whole = all(issubclass(kind, int) for kind in {*map(type, ids)})
        if not ids or (whole and min(ids) >= 0 and max(ids) <= MAX_SEED):
            return
        wrong = next(x for x in ids if not isinstance(x, int) or not 0 <= x <= MAX_SEED)
        raise SurefootError(name, f"{wrong!r} is no token id")

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
    def hosted(self) -> bool:
        """Whether what may come next depends on the host, token by token."""
        ruled = self.allowed_token_ids is not None or bool(self.bad_words)
        return ruled or self.structured_outputs is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalised(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from named values; unknown names are an error that lists the known ones."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise SurefootError(name, "is no sampling parameter", f"known: {', '.join(known)}")
        return cls(**values)


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
            Range(0, None, whole=True).check("max_draft_tokens", self.max_draft_tokens)

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
