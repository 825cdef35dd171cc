"""How models write calls of tools, and reasoning, by their chat templates."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """Calls are JSON objects with the tool's name and its arguments, alone or as a list."""

    name: str
    opening: str = ""
    """What stands before calls; "" for nothing."""
    closing: str = ""
    """What stands behind a call, beside white space; "" for nothing."""
    bare: bool = False
    """Whether an answer may begin with a call without ``opening``. As any JSON may stand there,
    only objects that name a tool of the request are calls."""
    named: bool = False
    """Whether a call may also be the name behind ``opening``, and then the arguments."""
    short_ids: bool = False
    """Whether the template takes only ids of nine letters and digits."""
    # How calls are written that a grammar makes; all of this is read, whatever is said here.
    key: str = "arguments"
    """Of a call's object."""
    between: tuple[str, ...] = ()
    """Markers between a name and its arguments; () for an object."""
    separator: str = "\n"
    """Between calls."""
    listed: bool = False
    """Whether several calls stand behind one opening marker."""
    brackets: bool = False
    """Whether these are a JSON list."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and have to be seen."""
        inner = (CALL_ID, ARGUMENTS) if self.named else ()
        return tuple(text for text in (self.opening, self.closing, *inner) if text)

    def new_id(self) -> str:
        """For another call."""
        if self.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


CALL_ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"
FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat(
            "llama3_json",
            "<|python_tag|>",
            bare=True,
            key="parameters",
            separator="; ",
            listed=True,
        ),
        ToolFormat(
            "mistral",
            "[TOOL_CALLS]",
            named=True,
            short_ids=True,
            separator=", ",
            listed=True,
            brackets=True,
        ),
        ToolFormat("json", bare=True, separator=", ", listed=True, brackets=True),
    )
}


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around what a model thinks, at the beginning of its answer."""

    opening: str
    closing: str


REASONING = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))
