"""Fields of OpenAI's responses. Nothing is kept: the whole conversation is in each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from surefoot.errors import SurefootError
from surefoot.server.fields import Strict, at_most
from surefoot.server.refusals import NEUTRAL, Neutral
from surefoot.server.translating import Conversation, TranslatedRequest, read_part, texts_of

_STATELESS = "send all earlier items in input: nothing is kept here"
_INCLUDED = frozenset({"reasoning.encrypted_content"})
"""Reasoning is told, and taken back, as it is."""


class _Part(Strict):
    """What answers have beside their text comes back with them."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(Strict):
    type: str = "message"
    id: str | None = None
    status: str | None = None


class _Message(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    phase: str | None = None


class _Call(_Item):
    call_id: str
    name: str
    arguments: str


class _Output(_Item):
    call_id: str
    output: str | list[Any]


class _Reasoning(_Item):
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


_ITEMS: Mapping[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _Output,
    "reasoning": _Reasoning,
}
_PARTS = {"input_text": _Part, "output_text": _Part}


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextField(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningField(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    """Reasoning is told as it is."""


class ObfuscationOptions(Strict):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(TranslatedRequest):
    """``/v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    """A text, or items: messages, function calls, their outputs, reasoning."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Functions."""
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] | None = None
    """Told back."""
    stream_options: ObfuscationOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    neutral: ClassVar[Neutral] = {
        **NEUTRAL,
        "previous_response_id": ((None,), _STATELESS),
        "conversation": ((None,), _STATELESS),
        "prompt": ((None,), "send the prompt's text in input: no prompts are kept here"),
        "background": ((None, False), "keep the connection open, or stream"),
        "truncation": ((None, "disabled"), 'use "truncate_prompt_tokens": -1'),
        "max_tool_calls": ((None,), "stop asking when there were enough calls"),
        "top_logprobs": ((None, 0), "use /v1/chat/completions, which has it"),
    }
    chat_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "structured_outputs": "text.format",
    }

    def as_chat(self) -> dict[str, Any]:
        """See ``TranslatedRequest``."""
        for name in self.include or ():
            if name not in _INCLUDED:
                advice = (
                    "use /v1/chat/completions, which has logprobs" if "logprobs" in name else ""
                )
                raise SurefootError("include", f"{name[:80]!r} is not offered here", advice)
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": self._tools(),
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._format(),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return fields

    def named(self, option: str) -> str:
        """See ``TranslatedRequest``."""
        return super().named(option.replace("].function", "]"))

    def _messages(self) -> list[dict[str, Any]]:
        talk = Conversation()
        if self.instructions is not None:
            talk.say("system", self.instructions)
        if isinstance(self.input, str):
            talk.say("user", self.input)
            return talk.messages
        for place, given in enumerate(self.input):
            where = f"input[{place}]"
            advice = f"send {', '.join(_ITEMS)}"
            item = read_part(given, where, _ITEMS, "message", advice)
            match item:
                case _Message():
                    text = texts_of(item.content, f"{where}.content", _PARTS)
                    if item.role == "assistant":
                        talk.answer(text)
                    else:
                        talk.say(item.role, text)
                case _Call():
                    talk.call(item.call_id, item.name, item.arguments)
                case _Output():
                    text = texts_of(item.output, f"{where}.output", _PARTS)
                    talk.say("tool", text, tool_call_id=item.call_id)
                case _Reasoning():
                    if item.content is None and item.encrypted_content is not None:
                        problem = "is encrypted, which only its maker can read"
                        raise SurefootError(where, problem, "drop it")
                    parts = texts_of(
                        item.content or [], f"{where}.content", {"reasoning_text": _Part}
                    )
                    talk.think(parts)
        return talk.messages

    def _tools(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        found = []
        for place, given in enumerate(self.tools):
            advice = "give functions: this server runs no tools of its own"
            tool = read_part(given, f"tools[{place}]", {"function": FunctionTool}, advice=advice)
            function = tool.model_dump(exclude_none=True, exclude={"type"})
            found.append({"type": "function", "function": function})
        return found

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            return {"type": "function", "function": {"name": choice.name}}
        return choice

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.schema_ is None:
            raise SurefootError("text.format.schema", "is missing")
        return {"type": "json_schema", "json_schema": {"schema": form.schema_}}
