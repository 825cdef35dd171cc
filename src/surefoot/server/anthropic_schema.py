"""Fields of Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from surefoot.errors import SurefootError
from surefoot.server.chat_style import ChatStyle
from surefoot.server.fields import StopStrings, Strict
from surefoot.server.refusals import NEUTRAL, Neutral
from surefoot.server.translating import Conversation, TranslatedRequest, read_part, texts_of


class _Cached(Strict):
    """Prompts are cached anyway."""

    cache_control: Any = None


class _Text(_Cached):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class _ToolUse(_Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: None = None


class _ToolResult(_Cached):
    """``is_error`` says nothing to a chat template: what went wrong is in the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class _Thinking(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


_USER: Mapping[str, type[Strict]] = {"text": _Text, "tool_result": _ToolResult}
_ASSISTANT: Mapping[str, type[Strict]] = {
    "text": _Text,
    "tool_use": _ToolUse,
    "thinking": _Thinking,
}
_TEXT = {"text": _Text}


_EFFORTS: Mapping[str | None, Any] = {
    **{name: name for name in (None, "low", "medium", "high", "xhigh")},
    "max": "xhigh",
}


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class CustomTool(_Cached):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Arguments are streamed as they come in any case."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(Strict):
    """Whether a model thinks is its template's business; how much, its own."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Goes to the template if that has a variable for it."""
    format: OutputFormat | None = None


class CountRequest(TranslatedRequest):
    """``/v1/messages/count_tokens``."""

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    """Without effect, as the next three."""
    inference_geo: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    neutral: ClassVar[Neutral] = {
        **NEUTRAL,
        "service_tier": ((None, "auto", "standard_only"), "use priority"),
        "container": ((None,), "drop it: nothing is run here"),
        "speed": ((None, "standard"), "use priority"),
        "diagnostics": ((None,), "look at the server's metrics"),
        "mcp_servers": ((None, []), "call them yourself, and give the model tools for them"),
        "context_management": (
            (None, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
            "edit the messages yourself",
        ),
    }
    chat_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "structured_outputs": "output_config.format",
    }

    def as_chat(self) -> dict[str, Any]:
        """See ``TranslatedRequest``. What ends with a turn of the assistant is continued."""
        choice = self.tool_choice
        parallel = None if choice is None or not choice.disable_parallel_tool_use else False
        goes_on = self.messages[-1].role == "assistant"
        form = self.output_config.format if self.output_config else None
        return {
            "messages": self._messages(),
            "tools": self._tools(),
            "tool_choice": self._choice(),
            "parallel_tool_calls": parallel,
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
            "response_format": None
            if form is None
            else {"type": "json_schema", "json_schema": {"schema": form.schema_}},
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def named(self, option: str) -> str:
        """See ``TranslatedRequest``."""
        option = option.replace("].function.parameters", "].input_schema")
        return super().named(option.replace("].function", "]"))

    def settle(self, style: ChatStyle) -> None:
        """Have the chat request ask for as much thinking as the template can be told. Raises
        SurefootError where the model cannot be kept from thinking."""
        wanted = None if self.thinking is None else self.thinking.type != "disabled"
        if wanted is False and style.reasoning is not None and style.switch is None:
            problem = "cannot be disabled: this model's chat template has no such switch"
            raise SurefootError("thinking", problem, "drop it")
        if style.switch is not None:
            self.chat.enable_thinking = wanted
        if self.output_config is not None and "reasoning_effort" in style.variables:
            self.chat.reasoning_effort = _EFFORTS[self.output_config.effort]

    def _messages(self) -> list[dict[str, Any]]:
        talk = Conversation()
        if self.system:
            talk.say("system", texts_of(self.system, "system", _TEXT))
        for place, turn in enumerate(self.messages):
            where = f"messages[{place}].content"
            if isinstance(turn.content, str):
                speak = talk.answer if turn.role == "assistant" else _user(talk)
                speak(turn.content)
                continue
            kinds = _ASSISTANT if turn.role == "assistant" else _USER
            advice = f"send {', '.join(kinds)}: this model reads text only"
            texts: list[str] = []
            for number, given in enumerate(turn.content):
                block = read_part(given, f"{where}[{number}]", kinds, advice=advice)
                if not isinstance(block, _Text) and texts:
                    self._say(talk, turn.role, texts)
                match block:
                    case _Text():
                        texts.append(block.text)
                    case _ToolUse():
                        talk.call(block.id, block.name, json.dumps(block.input))
                    case _ToolResult():
                        parts = texts_of(block.content or "", f"{where}[{number}].content", _TEXT)
                        talk.say("tool", parts, tool_call_id=block.tool_use_id)
                    case _Thinking():
                        talk.think(block.thinking)
            if texts:
                self._say(talk, turn.role, texts)
        return talk.messages

    @staticmethod
    def _say(talk: Conversation, role: str, texts: list[str]) -> None:
        text = "\n".join(texts)
        texts.clear()
        if role == "assistant":
            talk.answer(text)
        else:
            talk.say(role, text)

    def _tools(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        found = []
        for place, given in enumerate(self.tools):
            where = f"tools[{place}]"
            if isinstance(given, dict) and given.get("type") is None:
                given = {**given, "type": "custom"}
            advice = "give tools with an input_schema: this server runs none of its own"
            tool = read_part(given, where, {"custom": CustomTool}, advice=advice)
            function = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            found.append({"type": "function", "function": function})
        return found

    def _choice(self) -> Any:
        choice = self.tool_choice
        if choice is None or choice.type != "tool":
            names = {"auto": "auto", "any": "required", "none": "none"}
            return None if choice is None else names[choice.type]
        if choice.name is None:
            raise SurefootError("tool_choice.name", "is missing", "name the tool")
        return {"type": "function", "function": {"name": choice.name}}


class MessagesRequest(CountRequest):
    """``/v1/messages``."""

    max_tokens: int
    stop_sequences: StopStrings | None = None

    def as_chat(self) -> dict[str, Any]:
        """See ``TranslatedRequest``."""
        more = {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**super().as_chat(), **more}


def _user(talk: Conversation) -> Any:
    return lambda text: talk.say("user", text)
