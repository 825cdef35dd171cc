"""Reads calls of tools from a text that grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec

from surefoot.server.answer_events import CallArguments, CallStart, Event
from surefoot.server.json_end import JsonEnd
from surefoot.server.tool_formats import ARGUMENTS, CALL_ID, ToolFormat

_STRING = r'"(?:[^"\\]|\\.)*+"'
_MEMBERS = rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*'
# Up to the name, and up to the arguments.
_NAME = re.compile(rf'{_MEMBERS}"name"\s*:\s*({_STRING})')
_HEAD = re.compile(rf'{_NAME.pattern}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_FIRST_KEY = re.compile(r'\{\s*("[a-z]*+"?)?')
_KEYS = tuple(f'"{key}"' for key in ("name", "type", "id", "arguments", "parameters"))
_PLAIN_NAME = re.compile(r"[\w.:/-]+")
_SPACE = re.compile(r"\s*")


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallParser:
    """Reads one or more calls that follow each other, from behind the format's opening marker, or
    from the beginning of an answer.

    ``names``: what is no call of one of these is none; None for any.
    """

    def __init__(self, form: ToolFormat, names: Collection[str] | None, index: int) -> None:
        """``index``: of the first call."""
        self.index = index
        """Of the next call."""
        self.over = False
        """Whether what follows is no call."""
        self._form = form
        self._names = names
        self._first = index
        self._listed = False
        self._last = False
        """Whether no call can follow without a marker."""
        self._stage: Callable[[str, int, bool], int | None] = self._read_head
        self._object: JsonEnd | None = None
        """Of the call that is read as a whole, or the rest of one."""
        self._scanned = 0
        """Characters of it, from its beginning."""
        self._arguments = JsonEnd(form.closing)
        self._wrapped = False
        self._events: list[Event] = []

    @property
    def found(self) -> bool:
        """Whether there was a call."""
        return self.index > self._first

    def read(self, text: str, final: bool) -> tuple[list[Event], int]:
        """What is certain of ``text``, and how much of it that took; the rest has to be given
        again, with more behind it unless ``final``."""
        at = 0
        while not self.over:
            place = self._stage(text, at, final)
            if place is None:
                break
            at = place
        events, self._events = self._events, []
        return events, at

    # Stages: each takes the text from a place on and returns the place behind what it took, or
    # None where more text is needed. What cannot be a call ends the parser, and is not taken.

    def _read_head(self, text: str, at: int, final: bool) -> int | None:
        """From before a call to its arguments, or to its end."""
        again = self.found
        place = _skip(text, at)
        if again and text[place : place + 1] in (",", ";"):
            place = _skip(text, place + 1)
        listed = not again and text[place : place + 1] == "["
        if listed:
            place = _skip(text, place + 1)
        behind: int | None = None
        if place < len(text):
            if text[place] == "{":
                behind = self._read_object(text, place, final)
            elif self._form.named and not again and not listed:
                behind = self._read_plain_name(text, place)
            else:
                behind = -1
        if behind == -1 or (behind is None and final):
            self.over = True
            return at
        self._listed |= listed and behind is not None
        return behind

    def _read_object(self, text: str, at: int, final: bool) -> int | None:
        """See ``_read_head``; -1 where there is no call."""
        if not _may_be_call(text, at):
            return -1
        found = _NAME.match(text, at)
        if found is not None:
            name = _decoded(found[1])
            if not self._known(name):
                return -1
            head = _HEAD.match(text, at)
            if head is not None:
                self._wrapped = True
                return self._begin(name, head.end())
        # The arguments come first, or not at all.
        if self._object is None:
            self._object = JsonEnd(self._form.closing)
        end = self._object.scan(text, at + self._scanned, final)
        self._scanned = end - at
        if not self._object.ended:
            return None
        call = _decoded_call(text[at:end]) if self._object.whole else None
        if call is None or not self._known(call[0]):
            return -1
        self._begin(call[0], end)
        self._events.append(CallArguments(self.index - 1, call[1]))
        self._stage = self._read_between
        return end

    def _read_plain_name(self, text: str, at: int) -> int | None:
        """See ``_read_object``: a name, perhaps with markers behind it, before the arguments."""
        found = _PLAIN_NAME.match(text, at)
        if found is None:
            return -1
        place = found.end()
        for marker in (CALL_ID, ARGUMENTS):
            rest = text[place:]
            if rest.startswith(marker):
                place += len(marker)
                if marker == CALL_ID:
                    id_ = _PLAIN_NAME.match(text, place)
                    place = place if id_ is None else id_.end()
            elif marker.startswith(rest):
                return None
        place = _skip(text, place)
        if place == len(text):
            return None
        if text[place] != "{" or not self._known(found[0]):
            return -1
        self._last = True
        return self._begin(found[0], place)

    def _known(self, name: str) -> bool:
        return bool(name) and (self._names is None or name in self._names)

    def _begin(self, name: str, behind: int) -> int:
        self._events.append(CallStart(self.index, self._form.new_id(), name))
        self.index += 1
        self._arguments = JsonEnd(self._form.closing)
        self._object, self._scanned = None, 0
        self._stage = self._read_arguments
        return behind

    def _read_arguments(self, text: str, at: int, final: bool) -> int | None:
        end = self._arguments.scan(text, at, final)
        if end > at:
            self._events.append(CallArguments(self.index - 1, text[at:end]))
        if self._arguments.ended:
            self._stage = self._read_rest if self._wrapped else self._read_between
            self._wrapped = False
        elif final:
            self.over = True
        elif end == at:
            return None
        return end

    def _read_rest(self, text: str, at: int, final: bool) -> int | None:
        """What stands in a call's object behind its arguments."""
        place = _skip(text, at)
        if place == len(text) and not final:
            return None
        end: int | None = at
        if text.startswith("}", place):
            end = place + 1
        elif text.startswith(",", place):
            if self._object is None:
                self._object = JsonEnd(self._form.closing, depth=1)
            end = self._object.scan(text, at + self._scanned, final)
            self._scanned = end - at
            if not self._object.ended and not final:
                return None
            if not self._object.whole:
                end = at
            self._object, self._scanned = None, 0
        self._stage = self._read_between
        return end

    def _read_between(self, text: str, at: int, final: bool) -> int | None:
        """What stands behind a call."""
        place, closing = _skip(text, at), self._form.closing
        rest = text[place : place + max(1, len(closing))]
        if not final and (not rest or (closing.startswith(rest) and rest != closing)):
            return None
        if rest and rest == closing:
            self.over = True
            return place + len(closing)
        if self._listed and rest[:1] == "]":
            self._listed, self._last = False, True
            return place + 1
        if rest[:1] in ("{", ",", ";") and not self._last:
            self._stage = self._read_head
            return at
        self.over = True
        return at


def _skip(text: str, at: int) -> int:
    """The place behind white space."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _may_be_call(text: str, at: int) -> bool:
    """Whether an object may be a call, by its first key."""
    found = _FIRST_KEY.match(text, at)
    assert found is not None
    key = found[1] or ""
    if found.end() < len(text):
        return key in _KEYS
    return any(known.startswith(key) for known in _KEYS)


def _decoded(literal: str) -> str:
    """A JSON string's text; "" where it is none."""
    try:
        return msgspec.json.decode(literal, type=str)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return ""


def _decoded_call(text: str) -> tuple[str, str] | None:
    """(name, arguments) of a JSON object; None where it is no call."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    arguments = (bytes(call.arguments) or bytes(call.parameters)).decode()
    if arguments in ("", "null"):
        arguments = "{}"
    if arguments.startswith('"'):
        # The object as a text, as OpenAI passes it.
        arguments = _decoded(arguments).strip()
    return (call.name, arguments) if arguments.startswith("{") else None
