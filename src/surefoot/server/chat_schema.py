"""Fields of chat requests, and messages as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.chat_style import ChatStyle
from surefoot.server.fields import Ids, Strict
from surefoot.server.schema import RequestFields, structure_fields, structured_outputs
from surefoot.server.tool_choice import forced_calls
from surefoot.structured import StructuredOutputsParams

# What clients send back from an answer's message though it says nothing.
_NEUTRAL_MESSAGE = {
    "refusal": (None,),
    "audio": (None,),
    "function_call": (None,),
    "annotations": (None, []),
}
# Names that ``render_chat`` gives to a template itself.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "template", "self"}
)


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
        arguments = json.loads(call.function.arguments or "{}")
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
    """Arguments are made to fit only where a call is required; elsewhere ``true`` is refused."""


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


class ChatRequest(RequestFields):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    """``required``, or a tool: the answer is a call, whose arguments fit the schema."""
    parallel_tool_calls: bool | None = None
    """Whether an answer that is required to be a call may be several."""
    chat_template: str | None = None
    """Instead of the model's; only if the server trusts its clients."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    """Both become variables of the chat template, if it has them."""
    include_reasoning: bool = True
    """Whether the answer tells what the model thinks before it."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on where the last message ends."""
    add_special_tokens: bool = False
    parse_special: bool = False
    """Whether special tokens written in messages and tools are parsed as such, as Hugging Face
    does; else they are text."""

    option_names: ClassVar[Mapping[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def tool_names(self) -> list[str] | None:
        """Of the tools that may be called; None where none may."""
        return [tool.function.name for tool in self.tools or ()] if self.uses_tools else None

    def variables(self, style: ChatStyle) -> dict[str, Any]:
        """For the chat template. Raises SurefootError for what it has no variable for."""
        given = dict(self.chat_template_kwargs or {})
        own = style.reasoning_variables(self.reasoning_effort, self.enable_thinking)
        for name, value in own.items():
            if given.setdefault(name, value) != value:
                field = "enable_thinking" if self.reasoning_effort is None else "reasoning_effort"
                raise SurefootError(field, f"contradicts chat_template_kwargs.{name}", "give one")
        return given

    def _forced(self, style: ChatStyle) -> StructuredOutputsParams | None:
        """What the answer has to be for a call to be made; None where none has to. Raises
        SurefootError."""
        choice, tools = self.tool_choice, self.tools or []
        if choice in (None, "auto", "none"):
            for index, tool in enumerate(tools):
                if tool.function.strict and self.uses_tools:
                    raise SurefootError(
                        f"tools[{index}].function.strict",
                        "is honoured only where a call is required",
                        "set tool_choice to required, or drop it",
                    )
            if self.parallel_tool_calls is False and self.uses_tools:
                raise SurefootError(
                    "parallel_tool_calls",
                    "can be false only where a call is required",
                    "set tool_choice to required, or drop it",
                )
            return None
        if not tools:
            raise SurefootError("tool_choice", "needs tools", "give some")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            tools = [tool for tool in tools if tool.function.name == name]
            if not tools:
                raise SurefootError("tool_choice", f"there is no tool {name[:200]!r}")
        many = self.parallel_tool_calls is not False and choice == "required"
        named = [(tool.function.name, tool.function.parameters) for tool in tools]
        assert style.tools is not None
        return forced_calls(style.tools, style.special, named, many)

    def names(self) -> dict[str, str]:
        """See ``RequestFields.names``."""
        names = super().names()
        if self.tool_choice not in (None, "auto", "none"):
            names |= {"structured_outputs.grammar": "tools", "structured_outputs": "tool_choice"}
        return names

    def structure(self, style: ChatStyle) -> StructuredOutputsParams | None:
        """What the answer has to fit; None for anything. A call of a tool is no text of a grammar.
        Raises SurefootError."""
        given = structured_outputs(self)
        if given is not None and self.uses_tools:
            [name, *_] = [name for name, _, _ in structure_fields(self)] or ["structured_outputs"]
            raise SurefootError(name, "does not go with tools", "set tool_choice to none")
        return self._forced(style) or given

    def limit(self) -> int | None:
        """Most tokens of the answer, under either name. Raises SurefootError for two values."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise SurefootError("max_tokens", "differs from max_completion_tokens", "give one")
        return old if new is None else new

    def width(self) -> int | None:
        """How many likely tokens to report at each position; None for no logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise SurefootError("top_logprobs", "needs logprobs", "set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Strict):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template: str | None = None
    """Instead of the model's; only if the server trusts its clients."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on where the last message ends."""
    parse_special: bool = False
    """See ``ChatRequest``."""
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Ids


def plain_tools(tools: Sequence[ToolDefinition] | None) -> list[dict[str, Any]] | None:
    """As a chat template reads them."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def render_messages(
    tokenizer: Tokenizer,
    style: ChatStyle,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    chat_template: str | None = None,
) -> str:
    """The prompt's text. Raises SurefootError for what the template cannot take: the model's, if
    no other ``chat_template`` is given."""
    for name in variables or {}:
        if name in _RESERVED:
            raise SurefootError(f"chat_template_kwargs.{name}", "has its own field or none")
    if tools:
        style.check_tools()
    return tokenizer.render_chat(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        chat_template=chat_template,
        **(variables or {}),
    )
