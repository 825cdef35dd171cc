"""Streams that do not break off when a replica's process is killed: its guard ends them with an
error event (``surefoot.ray.guard``)."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from surefoot.ray import guard
from surefoot.ray.guarding import Guard, HeldStream
from surefoot.server.access import App, Receive, Scope, Send
from surefoot.server.errors import ApiError
from surefoot.server.failures import failure_of

EVENTS = b"text/event-stream"


class LastWords:
    """ASGI middleware that has a guard hold each stream of events from its first bytes to before
    its last. It is meant to be the outermost one, in front of nothing but uvicorn's HTTP/1.1
    connections, as Ray Serve starts them; whatever else there is stays as it is."""

    def __init__(self, app: App, guard: Guard) -> None:
        self.app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams go out with what the guard has to know written down before each piece."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["http_version"] != "1.1":
            await self.app(scope, receive, send)
            return
        stream: HeldStream | None = None

        async def guarded(message: Any) -> None:
            nonlocal stream
            if message["type"] == "http.response.start" and _streams_events(message):
                stream = await self._start(scope, receive, send, message)
                return
            if stream is not None and message["type"] == "http.response.body":
                if message.get("more_body", False):
                    stream.grow(_chunk_bytes(len(message.get("body", b""))))
                else:
                    # Before the answer's end is sent: nothing may ever be written behind it.
                    stream.close()
            await send(message)

        try:
            await self.app(scope, receive, guarded)
        finally:
            if stream is not None:
                stream.close()

    async def _start(
        self, scope: Scope, receive: Receive, send: Send, message: Any
    ) -> HeldStream | None:
        """Send an answer's head, and have the stream held that begins with it."""
        transport = _transport(receive)
        if transport is None:
            self._guard.warn("not all come over connections of its own, but by Ray's proxy")
        elif transport.get_extra_info("sslcontext") is not None:
            self._guard.warn("connections are encrypted")
            transport = None
        before = None if transport is None else _sent(transport)
        await send(message)
        if transport is None or before is None:
            return None
        # Until here HAProxy has had no byte, and would ask another replica.
        sent = _sent(transport)
        if sent is None:
            return None
        if sent == before or transport.get_write_buffer_size():
            # The count would be wrong for good. Ray may send by another thread.
            self._guard.warn("an answer's first bytes did not leave at once")
            return None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return self._guard.hold(_socket(transport).fileno(), sent, _last_words(path))


def _streams_events(message: Any) -> bool:
    """Whether an answer is server-sent events, in chunks of HTTP/1.1."""
    headers = {name.lower(): value for name, value in message.get("headers", ())}
    kind = headers.get(b"content-type", b"").partition(b";")[0]
    return kind == EVENTS and b"content-length" not in headers


def _chunk_bytes(size: int) -> int:
    """Of a piece of a body of ``size`` bytes, as it is sent."""
    return size + len(f"{size:x}\r\n\r\n") if size else 0


def _last_words(path: str) -> bytes:
    """What the guard writes: the error event as a chunk, and the end of the chunks."""
    died = ApiError(
        503,
        "the replica's process has died; the request can be sent again",
        kind="server_error",
        code="replica_died",
    )
    body = failure_of(path, died)
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def _transport(receive: Receive) -> asyncio.Transport | None:
    """Of the connection on which a request has come; None where it is not found. ASGI does not
    tell, and the client's address in the scope is what a header says, if there is one; but
    ``receive`` is a method of uvicorn's object for the request, once what Ray puts around it is
    taken off."""
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    return getattr(cycle, "transport", None)


def _socket(transport: asyncio.Transport) -> socket.socket:
    return transport.get_extra_info("socket")


def _sent(transport: asyncio.Transport) -> int | None:
    """Bytes that have been sent so far; None where the client has left."""
    if transport.is_closing():
        return None
    try:
        return guard.sent(_socket(transport))
    except OSError:
        return None
