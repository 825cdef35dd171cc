"""Which texts a request may get: the grammar it asks for, by vLLM's names. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from surefoot.errors import SurefootError

MAX_GRAMMAR_CHARACTERS = 1 << 18
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The text fits exactly one of these, unless ``max_tokens`` cuts it.

    ``json``: a JSON Schema, as an object or as text; ``json_object``: any JSON object; ``regex``:
    matched from end to end, in the syntax of Rust's regex crate (no look-around, no
    back-references); ``choice``: one of these texts; ``grammar``: a context-free grammar, in Lark's
    or llama.cpp's GBNF notation. What the grammar library cannot honour is refused, never ignored.

    Between two tokens of JSON there is at most one space, or one or two line breaks and then up to
    32 spaces or tabs, unless the schema's ``x-guidance`` (llguidance's options) has a
    ``whitespace_pattern`` or ``whitespace_flexible``, or ``disable_any_whitespace`` allows none.

    ``reasoning``: two markers; any text between them may come first, with a little white space
    around it, and the rest is what fits. With "" as the first marker the prompt has it already:
    such a text comes first, up to the second marker.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    reasoning: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            problem = f"has both {given[0]} and {given[1]}" if given else "asks for nothing"
            raise SurefootError("structured_outputs", problem, f"give one of {', '.join(KINDS)}")
        if self.json is not None:
            # One spelling for all equal schemas, hashable and the same in every process.
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise SurefootError(f"structured_outputs.{name}", "is no text")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", _markers(self.reasoning))
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise SurefootError(
                "structured_outputs.disable_any_whitespace", f"does nothing for {self.kind}"
            )
        if self.characters > MAX_GRAMMAR_CHARACTERS:
            raise SurefootError(self.option, f"has over {MAX_GRAMMAR_CHARACTERS} characters")

    @property
    def kind(self) -> str:
        """The one of ``KINDS`` that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def option(self) -> str:
        """What errors name."""
        return f"structured_outputs.{self.kind}"

    @property
    def characters(self) -> int:
        """Of the grammar as it was given."""
        texts = (str(self.json or ""), self.regex or "", self.grammar or "", *(self.choice or ()))
        return sum(map(len, texts))

    @classmethod
    def of(
        cls, value: StructuredOutputsParams | Mapping[str, Any] | None
    ) -> StructuredOutputsParams | None:
        """From an instance, a mapping with the fields' names, or None."""
        if value is None or isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise SurefootError("structured_outputs", f"{value!r} is no mapping")
        known = [item.name for item in fields(cls)]
        for name in value:
            if name not in known:
                raise SurefootError(
                    f"structured_outputs.{name}", "is no option", f"known: {', '.join(known)}"
                )
        return cls(**value)


def _schema_text(schema: Any) -> str:
    option = "structured_outputs.json"
    if isinstance(schema, str) and len(schema) > MAX_GRAMMAR_CHARACTERS:
        raise SurefootError(option, f"has over {MAX_GRAMMAR_CHARACTERS} characters")
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value)
    except (ValueError, TypeError, RecursionError) as error:
        raise SurefootError(option, f"is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise SurefootError(option, "is no JSON Schema", "give an object")
    return text


def _choices(choice: Any) -> tuple[str, ...]:
    option = "structured_outputs.choice"
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise SurefootError(option, "is no list of texts" if choice else "is empty", "list texts")
    if any(not isinstance(text, str) or not text for text in choice):
        raise SurefootError(option, "has an entry that is no text, or an empty one")
    return tuple(choice)


def _markers(markers: Any) -> tuple[str, ...]:
    pair = isinstance(markers, Sequence) and not isinstance(markers, str)
    given = tuple(markers) if pair else ()
    if len(given) != 2 or not all(isinstance(text, str) for text in given) or not given[1]:
        raise SurefootError("structured_outputs.reasoning", "is no pair of markers")
    return given


class TextGrammar(Protocol):
    """Where one request's text stands in its grammar (``sampling.grammar`` has the real one)."""

    def sync(self, output: Sequence[int]) -> None:
        """Follow the committed tokens ``output``, all of them; what was followed before is a
        prefix of it."""
        ...

    def restart(self) -> None:
        """Forget the committed tokens, and whatever was being tried: the next ``sync`` follows all
        of the text."""
        ...

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows behind the committed tokens, up to and
        including the first end token."""
        ...

    def forced(self, most: int) -> tuple[list[int], list[float]]:
        """Up to ``most`` tokens of the only text that can follow the committed tokens, as far as
        there is only one, and how likely each of them is, in 0..1, to be how a model cuts it."""
        ...

    def write_masks(self, drafts: Sequence[int], bits: Any) -> None:
        """Write into ``bits``, a C-contiguous int32 array [len(drafts) + 1, words], which tokens
        may follow the committed tokens and each prefix of the allowed ``drafts``: bit t % 32 of
        word t // 32 stands for token t."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the committed tokens are a whole text of the grammar."""
        ...

    @property
    def problem(self) -> str:
        """Why the text can go on no more though it is not whole; "" if it can."""
        ...
