"""Calls of tools that have to be made, or to fit their schemas: the grammar of an answer, in the
format in which the model writes calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.server.tool_formats import CALL_ID, ToolFormat
from surefoot.structured import StructuredOutputsParams

Tools = Sequence[tuple[str, dict[str, Any] | None]]
"""(name, schema of the arguments; None for any object)."""
# As templates write calls, and as models have learnt them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"TEXT: /(.|\n)*/"
# Where a call needs no marker: what is none, at the beginning and behind a call.
_NO_CALL = r"BEGINNING: /\s*([^\s{\[](.|\n)*)?/"
_NO_MORE = r"REST: /\s*([^\s{,;](.|\n)*)?/"


class CallGrammar:
    """The grammars of answers that call ``tools``. ``special``: markers that are special tokens,
    and their ids; ``many``: whether an answer may be several calls."""

    def __init__(
        self, form: ToolFormat, special: Mapping[str, int], tools: Tools, many: bool
    ) -> None:
        self._form = form
        self._special = special
        self._many = many
        any_call = " | ".join(f"call_{index}" for index in range(len(tools)))
        self._rules = [f"call: {any_call}", f"calls: {self._calls()}"]
        for index, (name, schema) in enumerate(tools):
            self._rules.append(f"call_{index}: {self._call(name, f'arguments_{index}')}")
            spaced = {"x-guidance": _SPACING, **({"type": "object"} if schema is None else schema)}
            # Elsewhere these three mean another notation of grammars.
            text = json.dumps(spaced).replace("::=", "\\u003a:=")
            self._rules.append(f"arguments_{index}: %json {text}")
        if CALL_ID in form.between:
            self._rules.append("CALL_ID: /[a-zA-Z0-9]{9}/")

    def required(self) -> StructuredOutputsParams:
        """Of answers that are calls, and nothing else."""
        form, one = self._form, "calls"
        if not form.bare:
            one = f"{self._marker(form.opening)} calls"
        return self._grammar(f"start: {one}{'' if form.listed else self._more(one)}")

    def free(self) -> StructuredOutputsParams:
        """Of answers that may be anything, but the calls in them."""
        form = self._form
        if not form.bare:
            start = "(head calls)* TEXT" if self._many else "TEXT | head calls"
            return self._grammar(f"start: {start}", _ANYTHING, *self._heads("head", "TEXT"))
        start, rules = "calls | BEGINNING", [_NO_CALL]
        if form.opening:
            rules += self._heads("first", "BEGINNING")
            start += " | first calls"
            if self._many:
                rules += [_NO_MORE, *self._heads("head", "REST")]
                start += " (head calls)* REST"
        return self._grammar(f"start: {start}", *rules)

    def _grammar(self, *rules: str) -> StructuredOutputsParams:
        return StructuredOutputsParams(grammar="\n".join([*rules, *self._rules]) + "\n")

    def _more(self, one: str) -> str:
        """Perhaps more of ``one``, where there may be several calls."""
        separator = f"{_text(self._form.separator)} " if self._form.separator else ""
        return f" ({separator}{one})*" if self._many else ""

    def _heads(self, name: str, before: str) -> list[str]:
        """Rules of the text up to and including the marker before calls."""
        opening = self._form.opening
        spelled = f"{before} {_text(opening)}"
        if opening not in self._special:
            return [f"{name}[lazy]: {spelled}"]
        # The special token's text may also be spelled, and is read all the same.
        head = f"{name}: {before} {self._marker(opening)} | {name}_spelled"
        return [head, f"{name}_spelled[lazy]: {spelled}"]

    def _calls(self) -> str:
        """What stands behind the opening marker."""
        form = self._form
        if form.closing:
            return f"{_text(chr(10))} call {_text(chr(10))} {self._marker(form.closing)}"
        if not form.listed:
            return "call"
        calls = f"call{self._more('call')}"
        if not form.brackets:
            return calls
        listed = f'"[" {calls} "]"'
        if not form.bare:
            return f'" "? {listed}'
        return f"call | {listed}" if self._many else "call"

    def _call(self, name: str, arguments: str) -> str:
        form = self._form
        if not form.between:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.key}": '
            return f"{_text(head)} {arguments} {_text('}')}"
        parts = [_text(name)]
        for marker in form.between:
            parts += [self._marker(marker), *(["CALL_ID"] if marker == CALL_ID else [])]
        return " ".join([*parts, arguments])

    def _marker(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _text(text)


def _text(value: str) -> str:
    """A literal of the grammar."""
    return json.dumps(value, ensure_ascii=False)
