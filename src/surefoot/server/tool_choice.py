"""Calls of tools that have to be made: the grammar of an answer, in the style that ``tool_calls``
reads, with arguments that fit the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from surefoot.server.tool_calls import CLOSE, OPEN
from surefoot.structured import StructuredOutputsParams

# As templates write calls, and as models have learnt them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_calls(
    tools: Sequence[tuple[str, dict[str, Any] | None]], many: bool
) -> StructuredOutputsParams:
    """The texts that call one of ``tools``, (name, schema of the arguments; None for any object),
    or with ``many`` one or more after another."""
    rules = [f"start: call{f' ({_text(chr(10))} call)*' if many else ''}"]
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules.append(f"call: {_text(OPEN + chr(10))} ({calls}) {_text(chr(10) + CLOSE)}")
    for index, (name, schema) in enumerate(tools):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        rules.append(f"call_{index}: {_text(head)} arguments_{index} {_text('}')}")
        schema = {"type": "object"} if schema is None else schema
        spaced = {"x-guidance": _SPACING, **schema}
        # Elsewhere these three mean another notation of grammars.
        text = json.dumps(spaced).replace("::=", "\\u003a:=")
        rules.append(f"arguments_{index}: %json {text}")
    return StructuredOutputsParams(grammar="\n".join(rules) + "\n")


def _text(value: str) -> str:
    """A literal of the grammar."""
    return json.dumps(value, ensure_ascii=False)
