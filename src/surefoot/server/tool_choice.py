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


def forced_calls(
    form: ToolFormat, special: Mapping[str, int], tools: Tools, many: bool
) -> StructuredOutputsParams:
    """The texts that call one of ``tools``, or with ``many`` one or more after another.
    ``special``: markers that are special tokens, and their ids."""
    return StructuredOutputsParams(grammar=_calls(form, special, tools, many, "start"))


def _calls(
    form: ToolFormat, special: Mapping[str, int], tools: Tools, many: bool, start: str
) -> str:
    """The rules of one or more calls; ``start`` is the first one's name."""

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else _text(text)

    rules, any_call = [], " | ".join(f"call_{index}" for index in range(len(tools)))
    more = ""
    if form.between:
        # The name and the arguments, not in an object.
        call, more = f"{marker(form.opening)} ({any_call})", "call"
    elif form.name == "mistral":
        call = any_call
        separated = f' (", " ({any_call}))*' if many else ""
        call = f'{marker(form.opening)} " "? "[" ({any_call}){separated} "]"'
    elif form.closing:
        call = f"{marker(form.opening)} {_text(chr(10))} ({any_call}) {_text(chr(10))}"
        call += f" {marker(form.closing)}"
        more = f"{_text(chr(10))} call"
    else:
        call, more = any_call, f"{_text('; ')} (call)"
    rules.append(f"{start}: call{f' ({more})*' if many and more else ''}")
    rules.append(f"call: {call}")
    for index, (name, schema) in enumerate(tools):
        if form.between:
            parts = [_text(name)]
            for inner in form.between:
                parts += [marker(inner), "CALL_ID"] if inner == CALL_ID else [marker(inner)]
            rules.append(f"call_{index}: {' '.join(parts)} arguments_{index}")
        else:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.key}": '
            rules.append(f"call_{index}: {_text(head)} arguments_{index} {_text('}')}")
        spaced = {"x-guidance": _SPACING, **({"type": "object"} if schema is None else schema)}
        # Elsewhere these three mean another notation of grammars.
        schema_text = json.dumps(spaced).replace("::=", "\\u003a:=")
        rules.append(f"arguments_{index}: %json {schema_text}")
    if CALL_ID in form.between:
        rules.append("CALL_ID: /[a-zA-Z0-9]{9}/")
    return "\n".join(rules) + "\n"


def _text(value: str) -> str:
    """A literal of the grammar."""
    return json.dumps(value, ensure_ascii=False)
