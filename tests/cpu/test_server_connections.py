"""What a connection may send before anybody looks at it, and how long it may take."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from surefoot.server import connections
from surefoot.server.connections import (
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    MOST_PIPELINED,
    MOST_SMALL_PIECES,
    READ_SECONDS,
    SMALL_PIECE,
)

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class Clock:
    """The part of an event loop that connections use; time goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[Any] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._ids = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (self.now + seconds, next(self._ids), timer))
        return timer

    def create_task(self, work: Any) -> Any:
        work.close()
        self.started.append(work)
        return Task()

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.call()
        self.now = end


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Task:
    def add_done_callback(self, call: Any) -> None:
        pass


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Client:
    """A connection, and the bytes that arrive on it."""

    def __init__(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("nobody runs it here")

        self.clock: Any = Clock()
        self.transport: Any = Transport()
        config = uvicorn.Config(app, lifespan="off", ws="none")
        self.protocol = connections.BoundedConnection(config, ServerState(), {}, self.clock)
        self.protocol.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        if not self.transport.closed:
            self.protocol.data_received(data)

    def answer(self) -> None:
        """The application answers the request."""
        self.protocol.cycle.response_complete = True
        self.protocol.on_response_complete()

    @property
    def status(self) -> bytes:
        return self.transport.written[9:12]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.mark.parametrize("size", [10, 1000, 200_000])
@pytest.mark.parametrize("kind", ["one header", "many headers", "small headers", "url"])
def test_endless_heads_are_refused(client: Client, kind: str, size: int) -> None:
    head = {
        "one header": GET + b"X: " + b"x" * (MOST_HEAD_BYTES + 1),
        "many headers": GET + b"X: 0123456789\r\n" * (MOST_HEAD_BYTES // 8),
        "small headers": GET + b"X:\r\n" * MOST_HEADERS,
        "url": b"GET /" + b"x" * (MOST_HEAD_BYTES + 1),
    }[kind]
    for at in range(0, len(head), size):
        client.send(head[at : at + size])
    client.send(b"\r\n\r\n")
    assert client.transport.closed and client.status == b"431"
    assert not client.clock.started


def test_a_large_head_is_not_endless(client: Client) -> None:
    client.send(GET + b"X: 0123456789\r\n" * (MOST_HEADERS - 1) + b"\r\n")
    client.answer()
    client.send(GET + b"X: " + b"x" * (MOST_HEAD_BYTES - 100) + b"\r\n\r\n")
    assert not client.transport.closed and len(client.clock.started) == 2


def test_endless_trailers_are_cut_off(client: Client) -> None:
    client.send(CHUNKED + b"5\r\nhello\r\n0\r\n")
    for _ in range(70):
        client.send(b"X: 1\r\n" + b"Y" * 1000)
    assert client.transport.closed


def test_a_body_in_crumbs_is_cut_off(client: Client) -> None:
    client.send(CHUNKED)
    for size in (SMALL_PIECE, 1):
        piece = b"%x\r\n" % size + b"x" * size + b"\r\n"
        for count in (MOST_SMALL_PIECES, 1):
            assert not client.transport.closed
            client.send(piece * count)
            client.protocol.cycle.body.clear()
    assert client.transport.closed


def test_few_requests_wait_for_one_that_runs(client: Client) -> None:
    client.send((GET + b"\r\n") * (1 + MOST_PIPELINED))
    assert not client.transport.closed
    client.send((GET + b"\r\n") * 1000)
    assert client.transport.closed and len(client.protocol.pipeline) == MOST_PIPELINED


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET", GET])
def test_half_a_request_is_not_waited_for(client: Client, sent: bytes) -> None:
    """However slowly it goes on; after an answer, too."""
    for first in (True, False):
        if not first:
            client = Client()
            client.send(GET + b"\r\n")
            client.answer()
        if sent:
            client.send(sent)
        client.clock.wait(READ_SECONDS - 1)
        assert not client.transport.closed or not sent
        if sent.startswith(b"GET"):
            client.send(b"/" if sent == b"GET" else b"X")
        client.clock.wait(1)
        assert client.transport.closed


def test_a_running_request_is_not_timed(client: Client) -> None:
    client.send(GET + b"\r\n" + GET)
    client.clock.wait(1000)
    assert not client.transport.closed
    client.answer()
    client.clock.wait(2 * READ_SECONDS)
    assert client.transport.closed, "half a request came meanwhile"


def test_bodies_may_be_slow_but_must_go_on(client: Client) -> None:
    client.send(POST)
    for _ in range(30):
        client.send(b"x" * 20_000)
        # The application takes what has come.
        client.protocol.cycle.body.clear()
        client.clock.wait(20_000 / 1024)
        assert not client.transport.closed
    for _ in range(2 * round(READ_SECONDS)):
        client.clock.wait(1)
        client.send(b"x")
    assert client.transport.closed


def test_what_the_server_does_not_read_is_not_late(client: Client) -> None:
    client.send(POST + b"x" * 100_000)
    assert client.protocol.flow.read_paused
    client.clock.wait(1000)
    assert not client.transport.closed
