"""What a model's answer consists of, piece by piece as it is generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a tool begins; calls are numbered from 0 in the order of the text."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: JSON as the model writes it, which may be cut off or wrong."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments
"""Arguments follow the start of their call; a call has ended where anything else follows."""


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours that are one text put together."""
    found: list[Event] = []
    for event in events:
        match (found[-1] if found else None, event):
            case (Content(a), Content(b)):
                found[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                found[-1] = Reasoning(a + b)
            case (CallArguments(index, a), CallArguments(same, b)) if index == same:
                found[-1] = CallArguments(index, a + b)
            case _:
                found.append(event)
    return found


@dataclass
class ToolCall:
    """A call as far as it is known. ``arguments`` is JSON, as OpenAI passes it."""

    id: str
    name: str
    arguments: str = ""

    def json(self) -> dict[str, Any]:
        """As in OpenAI's messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Answer:
    """An answer put together from its events."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Answer:
        answer = cls()
        for event in events:
            answer.add(event)
        return answer

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(_, id, name):
                self.calls.append(ToolCall(id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
