"""Anthropic's messages: content blocks, whole and as events; and errors as its clients expect
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from surefoot.server.answer_parser import AnswerParser
from surefoot.server.blocks import Block, BlocksFormat
from surefoot.server.errors import ApiError
from surefoot.server.failures import messages_failure
from surefoot.server.generation import Choice, Generation
from surefoot.server.usage import usage

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormat(BlocksFormat):
    """A content block for each block."""

    def __init__(self, answer_id: str, model: str, parser: AnswerParser) -> None:
        super().__init__(parser)
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.first``: what was found in the prefix cache is known by now."""
        ends = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **ends, "usage": _usage(choice.generation)}
        yield {"type": "message_start", "message": message}

    def opened(self, block: Block) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.opened``."""
        content = _content(block, {})
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        """See ``BlocksFormat.grown``."""
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def closed(self, block: Block) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.closed``."""
        yield {"type": "content_block_stop", "index": block.index}

    def last(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.last``."""
        used = _usage(choice.generation)
        yield {"type": "message_delta", "delta": self._ends(choice), "usage": used}
        yield {"type": "message_stop"}

    def body(self, choice: Choice) -> dict[str, Any]:
        """See ``BlocksFormat.body``."""
        content = [_content(block, _input(block)) for block in self.blocks]
        used = _usage(choice.generation)
        return {**self._head, "content": content, **self._ends(choice), "usage": used}

    def failure(self, error: ApiError) -> bytes:
        """See ``Format.failure``."""
        return messages_failure(error)

    def _ends(self, choice: Choice) -> dict[str, Any]:
        output = choice.output()
        stopped = output.stop_reason if isinstance(output.stop_reason, str) else None
        if output.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if output.finish_reason == "abort":
            # Why is told where a client that looks for it finds it.
            return {"stop_reason": "refusal", "stop_sequence": stopped}
        if stopped is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
        return {"stop_reason": "tool_use" if self.called else "end_turn", "stop_sequence": None}


def _content(block: Block, given: dict[str, Any]) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _input(block: Block) -> dict[str, Any]:
    """Of a call, in the words of Anthropic's documents where it is no JSON object."""
    if block.kind != "call":
        return {}
    try:
        return msgspec.json.decode(block.text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"INVALID_JSON": block.text}


def _usage(generation: Generation) -> dict[str, Any]:
    used = usage(generation)
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used["completion_tokens"],
        "speculation": used["speculation"],
    }
