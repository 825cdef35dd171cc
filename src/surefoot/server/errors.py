"""Errors as OpenAI's clients expect them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi.responses import Response

from surefoot.errors import SurefootError
from surefoot.server.core_process import CoreDied
from surefoot.server.generation import Overloaded, ShuttingDown

_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# What pydantic puts into a location for the member of a union that it tried.
_TAGS = frozenset({"str", "int", "float", "bool", "none"})
RETRY_WHEN_DEAD = 10
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class TimedOut(Exception):
    """A request took longer than the server allows."""


class ApiError(Exception):
    """An error to be answered as it stands. ``param`` is the request's field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "") -> Response:
        """For a request of ``path``, whose clients may expect errors of Anthropic's form."""
        anthropic = path.startswith(ANTHROPIC_PATH)
        return Response(
            msgspec.json.encode(anthropic_body(self) if anthropic else self.body()),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """As Anthropic's clients expect it."""
    kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else error.kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def api_error(error: Exception) -> ApiError:
    """The answer to what a request ran into."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SurefootError):
        return ApiError(400, str(error), param=error.option, code="invalid_value")
    if isinstance(error, Overloaded):
        retry = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), kind="rate_limit_error", code="overloaded", headers=retry)
    if isinstance(error, CoreDied):
        retry = {"Retry-After": str(RETRY_WHEN_DEAD)}
        message = f"the engine has died: {error}"
        return ApiError(503, message, kind="server_error", code="engine_died", headers=retry)
    if isinstance(error, ShuttingDown):
        retry = {"Retry-After": str(RETRY_WHEN_DEAD)}
        return ApiError(503, str(error), kind="server_error", code="shutting_down", headers=retry)
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), kind="server_error", code="timeout")
    return ApiError(500, "internal error", kind="server_error", code="internal_error")


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's complaints, by the name of the field."""
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SurefootError):
        return api_error(cause)
    param = field_path(first["loc"][1:])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        message = f"{param}: is no field of this request"
        return ApiError(400, message, param=param, code="unknown_parameter")
    message = f"{param or 'body'}: {first['msg']}"
    return ApiError(400, message, param=param, code="invalid_type")


def field_path(location: Sequence[Any]) -> str | None:
    """``("messages", 0, "content", "str")`` as ``messages[0].content``; None for the body."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _TAGS or (path and not _FIELD.fullmatch(part)):
            break
        else:
            path += f".{part}" if path else part
    return path or None
