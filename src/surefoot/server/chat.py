"""Chat completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.server.answer import Delta
from surefoot.server.answer_events import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    ToolCall,
)
from surefoot.server.answer_parser import AnswerParser
from surefoot.server.chat_schema import ChatRequest
from surefoot.server.choices import ChoicesFormat
from surefoot.server.completions import sources
from surefoot.server.generation import Choice, Generation
from surefoot.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from surefoot.server.usage import usage


class ChatFormat(ChoicesFormat):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: ChatRequest,
        texts: TokenTexts,
        new_parser: Callable[[], AnswerParser],
    ) -> None:
        """``new_parser`` makes one for each choice."""
        super().__init__(answer_id, model, request)
        self.request = request
        self.texts = texts
        self._new_parser = new_parser
        self._parsers: dict[int, AnswerParser] = {}

    def usage(self, generation: Generation) -> dict[str, Any]:
        """See ``ChoicesFormat.usage``."""
        reasoning = [
            generation.choices[index].tokens_before(parser.reasoned)
            for index, parser in self._parsers.items()
            if parser.reasons
        ]
        return usage(generation, self.hidden, sum(reasoning) if reasoning else None)

    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        answer = Answer.of(self._events(choice, delta))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content,
            "refusal": None,
            **_reasoning(answer.reasoning),
        }
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [call.json() for call in answer.calls]
        return {
            "index": choice.index,
            "message": message,
            **self._rest(choice, delta),
        }

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """One chunk for each event, the last one with everything that is not text."""
        events = self._events(choice, delta)
        rest = self._rest(choice, delta)
        deltas = [_event_delta(event) for event in events]
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

    def _events(self, choice: Choice, delta: Delta) -> list[Event]:
        if choice.index not in self._parsers:
            self._parsers[choice.index] = self._new_parser()
        parser = self._parsers[choice.index]
        events = parser.feed(delta.text, final=delta.finish_reason is not None)
        if self.request.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _rest(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A choice's fields beside its text."""
        reason = delta.finish_reason
        if reason == "stop" and self._parsers[choice.index].calls:
            reason = "tool_calls"
        rest: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": choice.output().stop_reason if reason else None,
        }
        if self.request.logprobs:
            rest["logprobs"] = chat_logprobs(self.texts, choice.logprobs(delta.first, delta.last))
        if self.request.return_token_ids:
            rest["token_ids"] = choice.request.output[delta.first : delta.last]
        if self.request.wants_sources:
            rest["surefoot"] = sources(choice, delta)
        return rest


def _event_delta(event: Event) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, id, name):
            return {"tool_calls": [{"index": index, **ToolCall(id, name).json()}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, Any]:
    """Under the name that most clients know, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}
