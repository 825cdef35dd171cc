"""Answers that are a sequence of blocks: reasoning, text, calls of tools, in the order in which the
model writes them. OpenAI's responses and Anthropic's messages are that, each in its own words."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.server.answer import Format, event, take
from surefoot.server.answer_events import CallArguments, CallStart, Content, Event, Reasoning
from surefoot.server.answer_parser import AnswerParser
from surefoot.server.generation import Choice, Generation

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """``text`` so far: of a call its arguments, JSON as the model writes it, which may be cut off
    or wrong; ``name`` and ``call_id`` are a call's."""

    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


class BlocksFormat(Format):
    """A stream of events that have types; an answer of one text."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.blocks: list[Block] = []
        self._is_open = False

    @abstractmethod
    def opened(self, block: Block) -> Iterator[dict[str, Any]]:
        """What a stream tells when a block begins."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> dict[str, Any]:
        """What it tells of more of a block's text."""

    @abstractmethod
    def closed(self, block: Block) -> Iterator[dict[str, Any]]:
        """What it tells when a block ends."""

    @abstractmethod
    def last(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """What it tells at the end of the answer, behind its last block."""

    @abstractmethod
    def body(self, choice: Choice) -> dict[str, Any]:
        """The whole answer; the blocks are complete."""

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """What it tells before the first block, once there is something to tell."""
        yield from ()

    def written(self, body: dict[str, Any]) -> bytes:
        """An event of the stream, as it is sent."""
        return event(body, body["type"])

    def whole(self, generation: Generation) -> dict[str, Any]:
        """See ``Format.whole``."""
        [choice] = generation.choices
        for _ in self._told(choice, whole=True):
            pass
        return self.body(choice)

    def news(self, generation: Generation) -> bytes:
        """See ``Format.news``."""
        [choice] = generation.choices
        return b"".join(map(self.written, self._told(choice)))

    def end(self, generation: Generation) -> bytes:
        """See ``Format.end``."""
        return b"".join(map(self.written, self.last(generation.choices[0])))

    @property
    def called(self) -> bool:
        """Whether some tool is called."""
        return any(block.kind == "call" for block in self.blocks)

    def reasoning_tokens(self, generation: Generation) -> int:
        """How many tokens were reasoning, with the marker that ends it."""
        return generation.choices[0].tokens_before(self._parser.reasoned)

    def _told(self, choice: Choice, whole: bool = False) -> Iterator[dict[str, Any]]:
        begins, delta = not choice.taken, take(choice, whole)
        if delta is None:
            return
        if begins:
            yield from self.first(choice)
        final = delta.finish_reason is not None
        for item in self._parser.feed(delta.text, final=final):
            yield from self._take(item)
        if final:
            yield from self._close()

    def _take(self, item: Event) -> Iterator[dict[str, Any]]:
        match item:
            case Content(text):
                yield from self._text("text", text)
            case Reasoning(text):
                yield from self._text("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self._open(Block(len(self.blocks), "call", "", name, call_id))
            case CallArguments(_, text):
                yield self._grow(text)

    def _text(self, kind: Kind, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._open(Block(len(self.blocks), kind))
        yield self._grow(text)

    def _grow(self, text: str) -> dict[str, Any]:
        block = self.blocks[-1]
        block.text += text
        return self.grown(block, text)

    def _open(self, block: Block) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self.blocks.append(block)
        self._is_open = True
        yield from self.opened(block)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            yield from self.closed(self.blocks[-1])
