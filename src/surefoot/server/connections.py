"""HTTP connections that keep within limits: uvicorn's, with bounds on what a client may send before
anybody has looked at it, and on how long it may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 1 << 16
"""Of a request's line and headers, or of what stands between two pieces of its body."""
MOST_HEADERS = 200
READ_SECONDS = 30.0
"""For a connection's first request to arrive, and for the head of any to be complete."""
LEAST_BYTES_PER_SECOND = 1024
"""At which the rest of a body has to come, after another ``READ_SECONDS``."""
MOST_SMALL_PIECES, SMALL_PIECE = 1024, 256
"""Pieces of less than ``SMALL_PIECE`` bytes in which a body may come."""
MOST_PIPELINED = 16
"""Requests that wait behind one that is answered on the same connection."""


class BoundedConnection(HttpToolsProtocol):
    """Refuses endless heads with status 431, and closes connections on which half a request has
    come, or none."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unread = 0
        """Bytes since the parser last came to something."""
        self._head = self._pieces = 0
        self._too_large = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread > MOST_HEAD_BYTES:
            self._too_large = True
            self.send_400_response("")
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            # uvicorn has stopped its own timer, whether this begins a request or not.
            self._expect()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError
        self._head = self._pieces = 0
        if self._timer is None:
            self._expect()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MOST_HEADERS:
            self._too_large = True
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()
        self._expect_nothing()
        self._expect()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._pieces += len(body) < SMALL_PIECE
        if self._pieces > MOST_SMALL_PIECES:
            raise ValueError
        super().on_body(body)
        self._deadline += len(body) / LEAST_BYTES_PER_SECOND

    def on_message_complete(self) -> None:
        self._unread = 0
        self._expect_nothing()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to what is no HTTP."""
        self._expect_nothing()
        if self.cycle is not None and not self.cycle.response_complete:
            # The answer to an earlier request is under way.
            self.transport.close()
        elif self._too_large:
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            self.transport.write(head + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MOST_HEAD_BYTES:
            self._too_large = True
            # Ends the parser's work.
            raise ValueError

    def _expect(self) -> None:
        self._deadline = self.loop.time() + READ_SECONDS
        self._timer = self.loop.call_later(READ_SECONDS, self._look)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _answering(self) -> bool:
        """Whether a request that has come whole is being answered."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _look(self) -> None:
        """Close the connection if its time is up."""
        now = self.loop.time()
        if self.flow.read_paused or self._answering:
            # Not the client is late, or it has an answer to wait for meanwhile.
            self._deadline = max(self._deadline, now + READ_SECONDS)
        if now >= self._deadline:
            self._timer = None
            self.transport.close()
        else:
            self._timer = self.loop.call_later(self._deadline - now, self._look)
