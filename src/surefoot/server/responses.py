"""OpenAI's responses: items, whole and as events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from surefoot.server.answer_parser import AnswerParser
from surefoot.server.blocks import Block, BlocksFormat
from surefoot.server.errors import ApiError
from surefoot.server.failures import responses_failure
from surefoot.server.generation import Choice, Generation
from surefoot.server.responses_schema import ResponsesRequest
from surefoot.server.usage import usage

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}


class ResponsesFormat(BlocksFormat):
    """An item for each block."""

    def __init__(
        self, answer_id: str, model: str, request: ResponsesRequest, parser: AnswerParser
    ) -> None:
        super().__init__(parser)
        self.answer_id = answer_id
        self.model = model
        self.request = request
        self._created = int(time.time())
        self._events = 0

    def begin(self, generation: Generation) -> bytes:
        """See ``Format.begin``."""
        response = self._response(generation, "in_progress")
        kinds = "response.created", "response.in_progress"
        return b"".join(self.written({"type": kind, "response": response}) for kind in kinds)

    def written(self, body: dict[str, Any]) -> bytes:
        """See ``BlocksFormat.written``."""
        numbered = {**body, "sequence_number": self._events}
        self._events += 1
        return super().written(numbered)

    def opened(self, block: Block) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.opened``."""
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield {
                "type": "response.content_part.added",
                **self._place(block),
                "part": _part(block),
            }

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        """See ``BlocksFormat.grown``."""
        if block.kind == "text":
            kind = "response.output_text.delta"
            return {"type": kind, **self._place(block), "delta": text, "logprobs": []}
        if block.kind == "reasoning":
            return {"type": "response.reasoning_text.delta", **self._place(block), "delta": text}
        kind = "response.function_call_arguments.delta"
        return {"type": kind, **self._place(block), "delta": text}

    def closed(self, block: Block) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.closed``."""
        place, text = self._place(block), block.text
        if block.kind == "call":
            kind = "response.function_call_arguments.done"
            yield {"type": kind, **place, "name": block.name, "arguments": text}
        else:
            if block.kind == "text":
                yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
            else:
                yield {"type": "response.reasoning_text.done", **place, "text": text}
            yield {"type": "response.content_part.done", **place, "part": _part(block)}
        item = self._item(block, "completed")
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def last(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """See ``BlocksFormat.last``."""
        response = self.body(choice)
        yield {"type": f"response.{response['status']}", "response": response}

    def body(self, choice: Choice) -> dict[str, Any]:
        """See ``BlocksFormat.body``."""
        output = choice.output()
        if output.finish_reason == "abort":
            error = {"code": "server_error", "message": str(output.stop_reason)}
            return {**self._response(choice.generation, "failed"), "error": error}
        if output.finish_reason != "length":
            return self._response(choice.generation, "completed")
        details = {"reason": "max_output_tokens"}
        response = self._response(choice.generation, "incomplete")
        return {**response, "incomplete_details": details}

    def failure(self, error: ApiError) -> bytes:
        """See ``Format.failure``."""
        return responses_failure(error, self._events)

    def _response(self, generation: Generation, status: str) -> dict[str, Any]:
        request, params = self.request, generation.params
        response = {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [self._item(block, "completed") for block in self.blocks],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in request.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if status != "in_progress":
            response["usage"] = self._usage(generation)
        return response

    def _text_format(self) -> dict[str, Any]:
        form = self.request.text and self.request.text.format
        if form is None:
            return {"type": "text"}
        return form.model_dump(by_alias=True, exclude_none=True)

    def _usage(self, generation: Generation) -> dict[str, Any]:
        used = usage(generation)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens(generation)},
            "total_tokens": used["total_tokens"],
            "speculation": used["speculation"],
        }

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.answer_id.removeprefix('resp_')}_{block.index}"

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {**head, "type": "function_call", **call}


def _part(block: Block) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[block.kind], "text": block.text}
    if block.kind == "text":
        part |= {"annotations": [], "logprobs": []}
    return part
