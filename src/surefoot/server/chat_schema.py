"""Fields of chat requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.chat_messages import Messages, NamedTool, Tools
from surefoot.server.chat_style import ChatStyle
from surefoot.server.fields import Body, Ids
from surefoot.server.schema import RequestFields, structure_fields, structured_outputs
from surefoot.server.tool_choice import CallGrammar
from surefoot.structured import StructuredOutputsParams

# Names that ``render_chat`` gives to a template itself.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "template", "self"}
)


class ChatRequest(RequestFields):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    """``required``, or a tool: the answer is a call, whose arguments fit the schema."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may be several calls."""
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

    @property
    def _must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def _fits_calls(self) -> bool:
        """Whether calls have to be as the tools, or the request, want them."""
        if not self.uses_tools or self._must_call:
            return self._must_call
        strict = any(tool.function.strict for tool in self.tools or ())
        return strict or self.parallel_tool_calls is False

    def _call_grammar(self, style: ChatStyle) -> StructuredOutputsParams | None:
        """What the answer has to be for its calls to be right; None for anything. Raises
        SurefootError."""
        choice, tools = self.tool_choice, self.tools or []
        if not self._fits_calls:
            return None
        if not tools:
            raise SurefootError("tool_choice", "needs tools", "give some")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            tools = [tool for tool in tools if tool.function.name == name]
            if not tools:
                raise SurefootError("tool_choice", f"there is no tool {name[:200]!r}")
        style.check_tools()
        assert style.tools is not None
        # Where nobody asked for it, a schema binds nothing.
        named = [
            (tool.function.name, tool.function.parameters)
            if self._must_call or tool.function.strict
            else (tool.function.name, None)
            for tool in tools
        ]
        many = self.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        grammar = CallGrammar(style.tools, style.special, named, many)
        return grammar.required() if self._must_call else grammar.free()

    def names(self) -> dict[str, str]:
        """See ``RequestFields.names``."""
        names = super().names()
        if self._fits_calls:
            field = "tool_choice" if self._must_call else "tools"
            names |= {"structured_outputs.grammar": "tools", "structured_outputs": field}
        return names

    def structure(self, style: ChatStyle) -> StructuredOutputsParams | None:
        """What the answer has to fit; None for anything. A call of a tool is no text of a grammar.
        Raises SurefootError."""
        given = structured_outputs(self)
        if given is not None and self.uses_tools:
            [name, *_] = [name for name, _, _ in structure_fields(self)] or ["structured_outputs"]
            raise SurefootError(name, "does not go with tools", "set tool_choice to none")
        return self._call_grammar(style) or given

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


class TokenizeRequest(Body):
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


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Ids


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
