"""Answers of numbered choices, OpenAI's older form: completions and chat completions."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from surefoot.server.answer import Delta, Format, event, take
from surefoot.server.errors import ApiError
from surefoot.server.failures import choices_failure
from surefoot.server.generation import Choice, Generation
from surefoot.server.schema import RequestFields
from surefoot.server.usage import usage


class ChoicesFormat(Format):
    """``object`` and ``chunk_object`` name the kinds of answers."""

    object: str
    chunk_object: str
    hidden = False
    """Whether the generated tokens are left out: a prompt was only to be scored."""

    def __init__(self, answer_id: str, model: str, request: RequestFields) -> None:
        self._include_usage, self._usage_so_far = request.include_usage, request.continuous_usage
        self.head = {"id": answer_id, "object": "", "created": int(time.time()), "model": model}

    @abstractmethod
    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A finished choice as it stands in ``choices``, given all of its text."""

    @abstractmethod
    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """The same piece by piece, for a stream; none where there is nothing to tell yet."""

    def chosen(self, generation: Generation) -> list[Choice]:
        """Which choices a whole answer has, in its order."""
        return generation.choices

    def extras(self, generation: Generation) -> dict[str, Any]:
        """Fields of a whole answer beside ``choices`` and ``usage``."""
        return {}

    def usage(self, generation: Generation) -> dict[str, Any]:
        """What the answer used so far."""
        return usage(generation, self.hidden)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """See ``Format.whole``."""
        choices = [
            {**self.entry(choice, whole_delta(choice)), "index": index}
            for index, choice in enumerate(self.chosen(generation))
        ]
        return {
            **self.head,
            "object": self.object,
            "choices": choices,
            **self.extras(generation),
            "usage": self.usage(generation),
        }

    def news(self, generation: Generation) -> bytes:
        """See ``Format.news``."""
        events, usual = [], {}
        if self._include_usage:
            usual = {"usage": self.usage(generation) if self._usage_so_far else None}
        for choice in generation.choices:
            delta = take(choice)
            if delta is None:
                continue
            for chunk in self.chunks(choice, delta):
                events.append(event({**self._chunk_head, "choices": [chunk], **usual}))
        return b"".join(events)

    def end(self, generation: Generation) -> bytes:
        """See ``Format.end``."""
        last = b"data: [DONE]\n\n"
        if not self._include_usage:
            return last
        totals = self.usage(generation)
        return event({**self._chunk_head, "choices": [], "usage": totals}) + last

    def failure(self, error: ApiError) -> bytes:
        """See ``Format.failure``."""
        return choices_failure(error)

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self.head, "object": self.chunk_object}


def whole_delta(choice: Choice) -> Delta:
    """All of a finished choice that was told nothing of."""
    delta = take(choice, whole=True)
    assert delta is not None
    return delta
