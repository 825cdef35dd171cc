"""The event with which a stream ends after an error, in the form of each API's clients."""

from __future__ import annotations

from typing import Any

from surefoot.server.answer import event
from surefoot.server.errors import ANTHROPIC_PATH, ApiError, anthropic_body

RESPONSES_PATH = "/v1/responses"
LAST_NUMBER = (1 << 31) - 1
"""Of an event that is behind all others of its stream, however many these are."""


def choices_failure(error: ApiError) -> bytes:
    """Of a stream of completions or chat completions."""
    return event(error.body())


def messages_failure(error: ApiError) -> bytes:
    """Of a stream of Anthropic's messages."""
    body = anthropic_body(error)
    return event(body, body["type"])


def responses_failure(error: ApiError, number: int = LAST_NUMBER) -> bytes:
    """Of a stream of OpenAI's responses, whose events are numbered."""
    told: dict[str, Any] = {"code": error.code, "message": error.message, "param": error.param}
    body = {"type": "error", **told, "sequence_number": number}
    return event(body, body["type"])


def failure_of(path: str, error: ApiError) -> bytes:
    """Of whichever stream the endpoint at ``path`` answers with."""
    if path == ANTHROPIC_PATH:
        return messages_failure(error)
    if path == RESPONSES_PATH:
        return responses_failure(error)
    return choices_failure(error)
