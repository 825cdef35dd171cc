"""Reasoning and calls of tools in a model's text, which comes in any pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection

from surefoot.server.answer_events import Content, Event, Reasoning, joined
from surefoot.server.call_parser import CallParser
from surefoot.server.tool_formats import ReasoningFormat, ToolFormat


class AnswerParser:
    """Cuts an answer's text into events, which are the same, but for where texts are cut, however
    the text arrives.

    Reasoning may only begin the answer. What looks like a call but has no head of one stays
    content, unchanged; behind a head, what follows is arguments, be they JSON or not. Markers, and
    white space next to reasoning and calls, are dropped.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        names: Collection[str] = (),
        reasoning: ReasoningFormat | None = None,
        inside: bool = False,
    ) -> None:
        """``tools``, ``reasoning``: None where neither is looked for; ``names``: of the tools;
        ``inside``: whether the prompt has opened the reasoning already."""
        self._tools = tools
        self._names = frozenset(names)
        self._thinks = reasoning
        self._text = ""
        self._calls: CallParser | None = None
        self._before = ""
        """What stood before the calls that are being read, should there be none."""
        self._begins = True
        """Whether no content was seen yet."""
        self._drops_space = inside
        self._step: Callable[[bool], tuple[list[Event], bool]] = self._content
        if reasoning is not None:
            self._step = self._reasoning if inside else self._beginning
        self.calls = 0
        """How many calls have begun."""
        self._fed = 0
        self._reasoned = 0

    @property
    def reasons(self) -> bool:
        """Whether reasoning is looked for."""
        return self._thinks is not None

    @property
    def reasoned(self) -> int:
        """How many characters of the text are reasoning so far, with its markers."""
        return self._fed if self._step == self._reasoning else self._reasoned

    def feed(self, text: str, final: bool) -> list[Event]:
        """What is certain after ``text``; ``final`` when nothing follows."""
        self._text += text
        self._fed += len(text)
        events: list[Event] = []
        more = True
        while more:
            found, more = self._step(final)
            events += found
        return joined(events)

    # Steps: the events of the text's beginning, which is taken off, and whether another step may
    # take more.

    def _beginning(self, final: bool) -> tuple[list[Event], bool]:
        """Where reasoning may begin."""
        assert self._thinks is not None
        opening, text = self._thinks.opening, self._text.lstrip()
        if text.startswith(opening):
            self._text = text[len(opening) :]
            self._step, self._drops_space = self._reasoning, True
        elif opening.startswith(text) and not final:
            return [], False
        else:
            self._step = self._content
        return [], True

    def _reasoning(self, final: bool) -> tuple[list[Event], bool]:
        assert self._thinks is not None
        text, gap, closed = self._until(self._thinks.closing, final)
        if closed:
            self._step, self._drops_space = self._content, True
            self._reasoned = self._fed - len(self._text)
        else:
            self._text = gap + self._text
        return [Reasoning(text)] if text else [], closed

    def _content(self, final: bool) -> tuple[list[Event], bool]:
        form = self._tools
        if form is None:
            text, self._text = self._spaceless(), ""
            return [Content(text)] if text else [], False
        if self._begins and form.bare:
            start = self._spaceless().lstrip()
            if not start and not final:
                return [], False
            if start[:1] in ("{", "["):
                self._begin_calls(self._text[: len(self._text) - len(start)], start)
                return [], True
        self._begins = False
        text, gap, opened = self._until(form.opening, final)
        if opened:
            self._begin_calls(gap + form.opening, self._text)
        else:
            self._text = gap + self._text
        return [Content(text)] if text else [], opened

    def _begin_calls(self, before: str, text: str) -> None:
        assert self._tools is not None
        names = self._names if self._begins and self._tools.bare else None
        self._begins = False
        self._calls = CallParser(self._tools, names, self.calls)
        self._before, self._text = before, text
        self._step = self._read_calls

    def _read_calls(self, final: bool) -> tuple[list[Event], bool]:
        calls = self._calls
        assert calls is not None
        events: list[Event]
        events, taken = calls.read(self._text, final)
        self._text, self.calls = self._text[taken:], calls.index
        if not calls.over:
            return events, False
        self._step, self._calls = self._content, None
        if calls.found:
            self._drops_space = True
        else:
            events = [Content(self._before)] if self._before else []
            self._drops_space = False
        return events, True

    def _spaceless(self) -> str:
        if self._drops_space:
            self._text = self._text.lstrip()
            self._drops_space = not self._text
        return self._text

    def _until(self, marker: str, final: bool) -> tuple[str, str, bool]:
        """Take off the text before ``marker`` that is certain, the white space behind it, and, if
        it is there, the marker: returns both, and whether it is. ``marker`` "" never is."""
        head, found, rest = self._spaceless(), "", ""
        if marker:
            head, found, rest = head.partition(marker)
        held = ""
        if not found and not final:
            size = len(head) - _overlap(head, marker)
            head, held = head[:size], head[size:]
        text = head if final and not found else head.rstrip()
        self._text = rest if found else held
        return text, head[len(text) :], bool(found)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest tail of ``text`` that begins ``marker``, and is not all of it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
