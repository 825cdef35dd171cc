"""What a model's chat template tells of how its answers are written."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.chat_template import template_variables
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.answer_parser import AnswerParser
from surefoot.server.tool_formats import (
    ARGUMENTS,
    CALL_ID,
    FORMATS,
    REASONING,
    ReasoningFormat,
    ToolFormat,
)
from surefoot.structured import StructuredOutputsParams

# What templates hold that write calls in ways which are not read: markers that are none of the
# formats', and what stands in calls that are no JSON.
_MARKER = re.compile(
    r"[<\[]/?([^\s<>\[\]{}'\"/]*tool.?calls?[^\s<>\[\]{}'\"]*)[>\]]", re.IGNORECASE
)
_READ = ("tool_call", "TOOL_CALLS")
_UNREAD = ("<function=", "<arg_key>", "<|START_ACTION|>", "<use_mcp_tool>", "functools[")
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation's token ids, whether the answer begins inside of reasoning, and
    whether it may have some."""

    ids: list[int]
    inside: bool
    may_think: bool


@dataclass(frozen=True)
class ChatStyle:
    """``tools``: None where calls are written in a way that is not read here; ``reasoning``: None
    for a model that does none; ``variables``: what the template reads; ``special``: markers that
    are special tokens, and their ids."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    variables: frozenset[str]
    special: Mapping[str, int]

    @classmethod
    def styles(cls, tokenizer: Tokenizer, tool_format: str | None = None) -> dict[bool, ChatStyle]:
        """Those of conversations without tools and with."""
        templates = tokenizer.settings.templates
        usual = templates.get("default") or ""
        with_tools = templates.get("tool_use") or usual
        return {
            False: cls.of(usual, tokenizer, tool_format),
            True: cls.of(with_tools, tokenizer, tool_format),
        }

    @classmethod
    def of(cls, template: str, tokenizer: Tokenizer, tool_format: str | None = None) -> ChatStyle:
        """``tool_format``: of ``FORMATS``, whatever the template says; None: what it says."""
        tools = _tool_format(template) if tool_format is None else FORMATS[tool_format]
        if tools is not None and tools.named:
            between = tuple(text for text in (CALL_ID, ARGUMENTS) if text in template)
            if between:
                tools = replace(tools, between=between, separator="", listed=False, brackets=False)
        reasoning = next((form for form in REASONING if form.closing in template), None)
        markers = [*(tools.markers if tools else ())]
        markers += [reasoning.opening, reasoning.closing] if reasoning else []
        ids = {marker: tokenizer.id_of(marker) for marker in markers}
        special = {
            marker: token
            for marker, token in ids.items()
            if token is not None and token in tokenizer.special_ids
        }
        return cls(tools, reasoning, template_variables(template), special)

    @property
    def switch(self) -> str | None:
        """The template's variable that says whether the model is to reason; None: it has none."""
        return next((name for name in _SWITCHES if name in self.variables), None)

    @property
    def description(self) -> str:
        """What of this a user may have to know; "" for nothing."""
        parts = []
        if "tools" in self.variables:
            name = self.tools.name if self.tools else None
            parts.append(
                f"tool calls read as {name}" if name else "no tools: its calls are not read"
            )
        if self.reasoning is not None:
            parts.append(f"reasoning from {self.reasoning.opening} to {self.reasoning.closing}")
        return ", ".join(parts)

    def check_tools(self) -> None:
        """Raises SurefootError where calls could not be read."""
        if self.tools is None:
            raise SurefootError(
                "tools",
                "this model writes calls in a way that is not read here",
                f"start the server with --tool-call-parser {'|'.join(FORMATS)} if it knows one",
            )

    def thinks(self, prompt: str) -> bool:
        """Whether a prompt has opened the reasoning, so that the answer begins inside of it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.opening)

    def thinks_on(self, begun: str) -> bool:
        """Whether an answer that is continued has begun to reason, and not ended that."""
        form = self.reasoning
        return form is not None and begun.rfind(form.opening) > begun.rfind(form.closing)

    def may_think(self, prompt: str) -> bool:
        """Whether an answer to a prompt may have reasoning."""
        return self.reasoning is not None and not prompt.rstrip().endswith(self.reasoning.closing)

    def behind_reasoning(
        self, wanted: StructuredOutputsParams | None, prompt: ChatPrompt
    ) -> StructuredOutputsParams | None:
        """What an answer has to fit, with room for reasoning before it."""
        if wanted is None or self.reasoning is None or not prompt.may_think:
            return wanted
        opening = "" if prompt.inside else self.reasoning.opening
        return replace(wanted, reasoning=(opening, self.reasoning.closing))

    def parser(self, names: Collection[str] | None, inside: bool) -> AnswerParser:
        """For an answer. ``names``: of the tools, None for an answer without calls; ``inside``: as
        ``thinks`` says."""
        tools = None if names is None else self.tools
        return AnswerParser(tools, names or (), self.reasoning, inside)

    def reasoning_variables(self, effort: str | None, enabled: bool | None) -> dict[str, Any]:
        """The template's variables for ``reasoning_effort`` and ``enable_thinking``. Raises
        SurefootError where it has none for them."""
        values: dict[str, Any] = {}
        switch = self.switch
        if effort is not None:
            if "reasoning_effort" in self.variables:
                values["reasoning_effort"] = effort
            elif switch is not None:
                values[switch] = effort != "none"
            else:
                problem = "this model's chat template has no variable for it"
                raise SurefootError("reasoning_effort", problem, "drop it")
        if enabled is not None:
            if switch is None:
                problem = "this model's chat template has no such switch"
                raise SurefootError("enable_thinking", problem, "drop it")
            if values.get(switch, enabled) != enabled:
                raise SurefootError("enable_thinking", "contradicts reasoning_effort", "give one")
            values[switch] = enabled
        return values


def _tool_format(template: str) -> ToolFormat | None:
    others = [name for name in _MARKER.findall(template) if name not in _READ]
    if others or any(text in template for text in _UNREAD):
        return None
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return FORMATS["llama3_json"]
    return FORMATS["json"]
