"""Messages and tools as chat requests bring them, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from surefoot.errors import SurefootError
from surefoot.server.fields import Strict
from surefoot.server.json_limits import TooMuch, check_text, check_value

# What clients send back from an answer's message though it says nothing.
_NEUTRAL_MESSAGE = {
    "refusal": (None,),
    "audio": (None,),
    "function_call": (None,),
    "annotations": (None, []),
}
_PARTS = 'send text, or parts {"type": "text", "text": "..."}'


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str


class CalledTool(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    """``developer`` is another name for ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for ``reasoning_content``."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v not in _NEUTRAL_MESSAGE.get(k, ())}

    def plain(self, index: int) -> dict[str, Any]:
        """For a chat template: content as one text, arguments of tool calls as objects."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        if self.tool_calls:
            plain["tool_calls"] = [
                _plain_call(call, f"messages[{index}].tool_calls[{position}]")
                for position, call in enumerate(self.tool_calls)
            ]
        return plain


def _plain_call(call: CalledTool, where: str) -> dict[str, Any]:
    try:
        text = call.function.arguments or "{}"
        check_text(text.encode())
        arguments = json.loads(text)
        check_value(arguments)
    except TooMuch as error:
        raise SurefootError(f"{where}.function.arguments", f"has {error}") from None
    except (ValueError, RecursionError):
        raise SurefootError(f"{where}.function.arguments", "is no JSON") from None
    plain = call.model_dump(exclude_none=True, exclude={"index"})
    plain["function"]["arguments"] = arguments
    return plain


class FunctionDefinition(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether arguments fit the schema wherever the tool is called; they do in any case where a
    call is required."""


class ToolDefinition(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


def _check_contents(messages: Any) -> Any:
    """Say what would work instead of contents that are no text."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        where = f"messages[{index}].content"
        if not isinstance(content, str | list | None):
            raise SurefootError(where, "is neither text nor a list of parts", _PARTS)
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                shown = f"is of type {kind[:40]!r}" if isinstance(kind, str) else "has no type"
                problem = f"{shown}, but this model reads text only"
                raise SurefootError(f"{where}[{place}]", problem, _PARTS)
    return messages


Messages = Annotated[
    list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_check_contents)
]
Tools = Annotated[list[ToolDefinition], Field(fail_fast=True)]


def plain_tools(tools: Sequence[ToolDefinition] | None) -> list[dict[str, Any]] | None:
    """As a chat template reads them."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
