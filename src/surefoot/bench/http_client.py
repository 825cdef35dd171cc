"""A lean HTTP/1.1 client for many streams at once: one C parser (httptools) and no layers above it,
so that it takes a small part of a core where thousands of events come in a second. Connections are
used again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    import httptools


@dataclass
class Exchange:
    """A request that was written, and what is known of its answer. ``on_body`` gets the body piece
    by piece, as it comes."""

    on_body: Callable[[bytes], None]
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    status: int = 0


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time. Its other methods are called by the parser."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.closed = False

    def start(self, request: bytes, exchange: Exchange) -> None:
        import httptools

        self.exchange = exchange
        self.parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.transport.close()  # Nobody asked.
            return
        try:
            self.parser.feed_data(data)
        except Exception as error:
            self._end(OSError(f"no HTTP: {error}"))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end(exc or OSError("the connection was closed before the answer's end"))

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.exchange is not None:
            self.exchange.on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_keep_alive():
            self.closed = True
            self.transport.close()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None or exchange.done.done():
            return
        if error is None:
            exchange.done.set_result(None)
        else:
            exchange.done.set_exception(error)


class Client:
    """Talks to the server at ``url``, http or https. ``key`` goes along as a bearer token."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            import httptools  # noqa: F401
        except ImportError:
            raise SurefootError("url", "needs httptools", "pip install surefoot[server]") from None
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise SurefootError("url", f"{url!r} is no address: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise SurefootError("url", f"{url!r} is no address", "use http://host:port")
        self.url, self.host = url, host
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")
        head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        self._head = head + (f"Authorization: Bearer {key}\r\n" if key else "")
        self._idle: list[Connection] = []

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A request's bytes."""
        first = f"{method} {self.path}{path} HTTP/1.1\r\n{self._head}"
        return f"{first}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, request: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send what ``encode`` made and hand on the answer's body; its status, at its end. Raises
        OSError where that does not come."""
        connection = await self._connect()
        exchange = Exchange(on_body)
        connection.start(request, exchange)
        await exchange.done
        if not connection.closed:
            self._idle.append(connection)
        return exchange.status

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self.host, self.port, ssl=self.tls or False
        )
        return connection

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()
