"""Tool calls in a model's text, in the style of Hermes and Qwen: ``<tool_call>{"name": …,
"arguments": {…}}</tool_call>``, any number of them, text around them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON, as OpenAI passes it."""

    index: int
    id: str
    name: str
    arguments: str

    def json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class ToolCallParser:
    """Cuts text into what is meant for the reader and tool calls, as it grows.

    What joins to no call, malformed ones included, comes out as text, unchanged; only white space
    next to a call is dropped.
    """

    def __init__(self) -> None:
        self.count = 0
        self._text = ""
        self._gap = ""
        """White space before the call that is being read."""
        self._inside = False
        self._after_call = False

    def feed(self, text: str, final: bool) -> list[str | ToolCall]:
        """What is certain after ``text``; ``final`` when nothing follows."""
        self._text += text
        found: list[str | ToolCall] = []
        while self._read_call(found, final) if self._inside else self._read_text(found, final):
            pass
        return found

    def _read_call(self, found: list[str | ToolCall], final: bool) -> bool:
        """Take a call off the text; returns whether something may follow."""
        body, close, rest = self._text.partition(CLOSE)
        if not close and not final:
            return False
        call = self._parse(body)
        found.append(f"{self._gap}{OPEN}{body}{close}" if call is None else call)
        self._after_call = call is not None
        self._text, self._gap, self._inside = rest, "", False
        return bool(rest)

    def _read_text(self, found: list[str | ToolCall], final: bool) -> bool:
        """Take what neither begins a call nor is white space that may precede one off the text;
        returns whether a call follows."""
        if self._after_call:
            self._text = self._text.lstrip()
            self._after_call = not self._text
        head, opened, rest = self._text.partition(OPEN)
        if not opened and not final:
            head = head[: len(head) - _overlap(head)]
        solid = head if final and not opened else head.rstrip()
        if solid:
            found.append(solid)
        if opened:
            self._text, self._gap, self._inside = rest, head[len(solid) :], True
        else:
            self._text = self._text[len(solid) :]
        return bool(opened)

    def _parse(self, body: str) -> ToolCall | None:
        try:
            call = msgspec.json.decode(body.strip(), type=_Call)
        except (msgspec.DecodeError, RecursionError):
            return None
        arguments = msgspec.json.encode(call.arguments).decode()
        self.count += 1
        return ToolCall(self.count - 1, f"call_{secrets.token_hex(12)}", call.name, arguments)


def _overlap(text: str) -> int:
    """Length of the longest tail of ``text`` that begins ``OPEN``."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return size
    return 0
