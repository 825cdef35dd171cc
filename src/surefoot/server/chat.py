"""Chat completions."""

from __future__ import annotations

from typing import Any

from surefoot.server.answer import Delta
from surefoot.server.chat_schema import ChatRequest
from surefoot.server.choices import ChoicesFormat
from surefoot.server.completions import sources
from surefoot.server.generation import Choice, Generation
from surefoot.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from surefoot.server.tool_calls import ToolCall, ToolCallParser


class ChatFormat(ChoicesFormat):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, answer_id: str, model: str, request: ChatRequest, texts: TokenTexts) -> None:
        super().__init__(answer_id, model)
        self.request = request
        self.texts = texts
        self._parsers: dict[int, ToolCallParser] = {}

    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        parts = self._parts(choice, delta)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        text = "".join(part for part in parts if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [call.json() for call in calls]
        return {
            "index": choice.index,
            "message": message,
            **self._rest(choice, delta),
        }

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """One chunk for each part, the last one with everything that is not text."""
        parts = self._parts(choice, delta)
        rest = self._rest(choice, delta)
        deltas = [_part_delta(part) for part in parts]
        # Held-back text is no news, but what was asked for by token is.
        tells = rest["finish_reason"] or rest["logprobs"] or len(rest) > 3
        if not deltas:
            if not tells and delta.first:
                return []
            deltas = [{}]
        if delta.first == 0:
            deltas[0] = {"role": "assistant", "content": "", **deltas[0]}
        quiet = {"logprobs": None, "finish_reason": None}
        chunks = [{"index": choice.index, "delta": item, **quiet} for item in deltas]
        chunks[-1].update(rest)
        if delta.first == 0 and self.request.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(choice.request.prompt)
        return chunks

    def extras(self, generation: Generation) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.request.prompt_logprobs is not None:
            scores = generation.prompt_logprobs(0)
            extras["prompt_logprobs"] = prompt_logprobs(self.texts, scores)
        if self.request.return_token_ids:
            extras["prompt_token_ids"] = generation.prompts[0]
        return extras

    def _parts(self, choice: Choice, delta: Delta) -> list[str | ToolCall]:
        if not self.request.uses_tools:
            return [delta.text] if delta.text else []
        parser = self._parsers.setdefault(choice.index, ToolCallParser())
        return parser.feed(delta.text, final=delta.finish_reason is not None)

    def _rest(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A choice's fields beside its text."""
        reason = delta.finish_reason
        parser = self._parsers.get(choice.index)
        if reason == "stop" and parser is not None and parser.count:
            reason = "tool_calls"
        rest: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": choice.output().stop_reason if reason else None,
        }
        if self.request.logprobs:
            rest["logprobs"] = chat_logprobs(
                self.texts, choice.request.logprobs[delta.first : delta.last]
            )
        if self.request.return_token_ids:
            rest["token_ids"] = choice.request.output[delta.first : delta.last]
        if self.request.wants_sources:
            rest["surefoot"] = sources(choice, delta)
        return rest


def _part_delta(part: str | ToolCall) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return {"tool_calls": [{"index": part.index, **part.json()}]}
    return {"content": part}
