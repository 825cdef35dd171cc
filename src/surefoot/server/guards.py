"""What a request must pass before it is read: its host, the key, and the size of its body. Plain
ASGI, so that disconnections reach the endpoints unchanged."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from surefoot.server import playground
from surefoot.server.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", *playground.PATHS})
"""Need no key: what load balancers ask, and the page on which a person enters the key."""


class ApiKey:
    """Asks for ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients send it,
    with one of ``keys``."""

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = (_header(scope, b"authorization") or b"").partition(b" ")
            bearer = given if scheme.lower() == b"bearer" else b""
            both = bearer, _header(scope, b"x-api-key") or b""
            # Every key is looked at, so that the time does not tell which came near.
            found = [hmac.compare_digest(text, key) for key in self._keys for text in both]
            if not any(found):
                error = ApiError(
                    401,
                    "the API key is missing or wrong",
                    code="invalid_api_key",
                    kind="authentication_error",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Hosts:
    """Refuses requests for another host than ``allowed`` (``*.example.com`` stands for all below
    it), and those of a page from one that is neither allowed nor among ``origins``: the name of a
    page's host may lead to this machine."""

    def __init__(self, app: App, allowed: Sequence[str], origins: Sequence[str] = ()) -> None:
        self.app = app
        self._allowed = [name.lower() for name in allowed]
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = (_header(scope, b"host") or b"").decode("latin-1")
            origin = (_header(scope, b"origin") or b"").decode("latin-1")
            problem = None
            if not self._allows(f"//{host}"):
                problem = f"host {host[:200]!r}"
            elif origin and not self._may_call(origin):
                problem = f"origin {origin[:200]!r}"
            if problem is not None:
                message = f"{problem} is not allowed; see --allowed-hosts and --cors-origin"
                error = ApiError(403, message, code="host_not_allowed", kind="permission_error")
                await error.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _may_call(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins or self._allows(origin)

    def _allows(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return any(
            name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in self._allowed
        )


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
            await self._refusal().response(scope["path"])(scope, receive, send)
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
