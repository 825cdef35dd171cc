"""Requests of other APIs as chat requests, which is what is generated from."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, PrivateAttr, ValidationError, model_validator

from surefoot.errors import SurefootError
from surefoot.server.chat_schema import ChatRequest
from surefoot.server.errors import field_path
from surefoot.server.fields import GenerationFields

Model = TypeVar("Model", bound=BaseModel)
_HEAD = re.compile(r"\w+")


class TranslatedRequest(GenerationFields):
    """A request with a chat request that means the same, made when it is read."""

    _chat: ChatRequest | None = PrivateAttr(default=None)

    chat_names: ClassVar[Mapping[str, str]] = {}
    """This request's fields by the chat request's; what is inside of them has no names here."""

    @abstractmethod
    def as_chat(self) -> dict[str, Any]:
        """Fields of the chat request, beside those that are shared. Raises SurefootError."""

    @model_validator(mode="after")
    def _translate(self) -> Self:
        if self._chat is not None:
            # FastAPI has it looked at once more.
            return self
        try:
            self._chat = ChatRequest.model_validate({**self.shared(), **self.as_chat()})
        except ValidationError as error:
            raise told(error, "", self.named) from None
        return self

    @property
    def chat(self) -> ChatRequest:
        assert self._chat is not None
        return self._chat

    def came_as(self, size: int) -> None:
        """See ``Body``."""
        super().came_as(size)
        self.chat.came_as(size)

    def named(self, option: str) -> str:
        """A field of the chat request by its name here."""
        head = _HEAD.match(option)
        return option if head is None else self.chat_names.get(head[0], option)


def told(error: ValidationError, where: str, named: Any = lambda option: option) -> SurefootError:
    """The first of pydantic's complaints about a part of a request that begins at ``where``."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SurefootError):
        return SurefootError(named(f"{where}{cause.option}"), cause.problem, cause.fix)
    path = field_path(first["loc"]) or ""
    unknown = first["type"] == "extra_forbidden"
    problem = "is no field of this" if unknown else first["msg"]
    return SurefootError(named(f"{where}{path}" or "body"), problem)


def read_part(
    part: Any, where: str, kinds: Mapping[str, type[Model]], default: str = "", advice: str = ""
) -> Model:
    """A typed part of a request, such as an item or a block, by its ``type``. Raises
    SurefootError, naming ``where``."""
    if not isinstance(part, dict):
        raise SurefootError(where, "is no object", advice)
    kind = part.get("type", default)
    model = kinds.get(kind) if isinstance(kind, str) else None
    if model is None:
        shown = f"is of type {kind[:40]!r}" if isinstance(kind, str) and kind else "has no type"
        raise SurefootError(where, f"{shown}, which is not taken here", advice)
    try:
        return model.model_validate(part)
    except ValidationError as error:
        raise told(error, f"{where}.") from None


class Conversation:
    """Messages of a chat request, put together from parts in order: what an assistant says, thinks
    and calls one after the other is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str, **more: Any) -> None:
        """A message of its own."""
        self.messages.append({"role": role, "content": text, **more})

    def think(self, text: str) -> None:
        """Of the assistant."""
        self._assistant("content", "tool_calls", "reasoning_content")["reasoning_content"] = text

    def answer(self, text: str) -> None:
        """Of the assistant."""
        self._assistant("content", "tool_calls")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Of a tool, by the assistant."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self, *without: str) -> dict[str, Any]:
        """Its message, a new one unless the last one is and has none of these."""
        last: dict[str, Any] = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in without):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def texts_of(parts: Any, where: str, kinds: Mapping[str, type[Any]], separator: str = "\n") -> str:
    """One text of a text, or of a list of parts that have texts. Raises SurefootError."""
    kind = next(iter(kinds))
    advice = f'send text, or parts {{"type": "{kind}", "text": "..."}}: this model reads text only'
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, Sequence):
        raise SurefootError(where, "is neither text nor a list of parts", advice)
    found = [
        read_part(part, f"{where}[{place}]", kinds, advice=advice)
        for place, part in enumerate(parts)
    ]
    return separator.join(part.text for part in found)
