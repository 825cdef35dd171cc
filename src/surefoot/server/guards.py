"""What a request must pass before it is read: the key, and the size of its body. Plain ASGI, so
that disconnections reach the endpoints unchanged."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from surefoot.server import playground
from surefoot.server.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", *playground.PATHS})
"""Need no key: what load balancers ask, and the page on which a person enters the key."""


class ApiKey:
    """Asks for ``Authorization: Bearer KEY``."""

    def __init__(self, app: App, key: str) -> None:
        self.app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = _header(scope, b"authorization") or b""
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401,
                    "the API key is missing or wrong",
                    code="invalid_api_key",
                    kind="authentication_error",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more than ``limit`` bytes, by their announced length or as they come."""

    def __init__(self, app: App, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = _header(scope, b"content-length") or b"0"
        if not announced.isdigit() or int(announced[:20]) > self.limit:
            await self._refusal().response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise self._refusal()
            return message

        await self.app(scope, counted, send)

    def _refusal(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self.limit} bytes",
            code="body_too_large",
            # What is left of the body must not be taken for the next request.
            headers={"Connection": "close"},
        )


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
