"""Which streams a replica's guard is told of, and how it counts their bytes."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from surefoot.ray import guard
from surefoot.ray.last_words import LastWords


class Connection:
    """As much of uvicorn's as the middleware looks at. ``leaves``: whether what is sent does."""

    def __init__(self, leaves: bool = True, waiting: int = 0, **extra: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.peer = socket.create_connection(listener.getsockname())
        extra["socket"], _ = listener.accept()
        self.calls: list[str] = []
        self._leaves = leaves
        self.transport = SimpleNamespace(
            get_extra_info=extra.get,
            is_closing=lambda: False,
            get_write_buffer_size=lambda: waiting,
        )
        self._socket: socket.socket = extra["socket"]

    async def receive(self) -> Any:
        return {"type": "http.request"}

    async def send(self, message: Any) -> None:
        self.calls.append("send")
        if self._leaves:
            self._socket.sendall(message.get("body", b"head"))


class Witness:
    """A guard that only takes down what it is asked for."""

    def __init__(self, calls: list[str]) -> None:
        self.holds: list[tuple[int, int, bytes]] = []
        self.problems: list[str] = []
        self._calls = calls

    def hold(self, *stream: Any) -> Any:
        self.holds.append(stream)
        calls = self._calls
        return SimpleNamespace(
            grow=lambda size: calls.append(f"grow {size}"), close=lambda: calls.append("close")
        )

    def warn(self, problem: str) -> None:
        self.problems.append(problem)


def witnessed(
    connection: Connection, headers: list[tuple[bytes, bytes]] | None = None, **scope: Any
) -> Witness:
    """What a guard is told of an answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = [(b"Content-Type", b"text/event-stream")]
        head = {"type": "http.response.start", "headers": kind if headers is None else headers}
        await send(head)
        for size in (0, 9, 10, 255, 256):
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    witness: Any = Witness(connection.calls)
    usual = {"type": "http", "method": "POST", "http_version": "1.1", "path": "/v1/messages"}
    wrapped = LastWords(app, witness)
    asyncio.run(wrapped(usual | scope, connection.receive, connection.send))
    return witness


def test_the_path_is_the_applications() -> None:
    witness = witnessed(Connection(), path="/there/v1/messages", root_path="/there")
    [(_, sent, words)] = witness.holds
    assert b'"type":"api_error"' in words and words.endswith(b"\r\n0\r\n\r\n")
    assert sent == len(b"head")


def test_streams_of_other_processes_connections_are_not_held() -> None:
    connection = Connection()
    connection.receive = lambda: None  # type: ignore[method-assign, assignment]
    witness = witnessed(connection)
    assert not witness.holds and "proxy" in witness.problems[0]


def test_rays_receive_is_seen_through() -> None:
    connection = Connection()
    proxy: Any = SimpleNamespace(_receive=connection.receive)
    connection.receive = proxy
    assert witnessed(connection).holds


def test_pieces_are_counted_before_they_are_sent() -> None:
    """As chunks: their size in hexadecimal, and two ends of lines. And the guard is told of the end
    before it is there."""
    connection = Connection()
    witnessed(connection)
    sizes = 0, 9 + 5, 10 + 5, 255 + 6, 256 + 7
    pieces = [call for size in sizes for call in (f"grow {size}", "send")]
    assert connection.calls == ["send", *pieces, "close", "send", "close"]


@pytest.mark.parametrize(
    ("options", "scope", "problem"),
    [
        ({}, {"method": "GET"}, None),
        ({}, {"http_version": "1.0"}, None),
        ({}, {"headers": [(b"content-type", b"application/json")]}, None),
        (
            {},
            {"headers": [(b"content-type", b"text/event-stream"), (b"Content-Length", b"3")]},
            None,
        ),
        ({"sslcontext": "any"}, {}, "encrypted"),
        ({"leaves": False}, {}, "did not leave"),
        ({"waiting": 1}, {}, "did not leave"),
    ],
    ids=str,
)
def test_what_cannot_be_ended_is_not_held(
    options: dict[str, Any], scope: dict[str, Any], problem: str | None
) -> None:
    witness = witnessed(Connection(**options), **scope)
    assert not witness.holds
    assert len(witness.problems) == (problem is not None)
    assert problem is None or problem in witness.problems[0]


def test_sent_bytes_are_counted_once() -> None:
    """Whether the peer has them or not."""
    connection = Connection()
    own, peer = connection._socket, connection.peer
    own.setblocking(False)
    begin, total = guard.sent(own), 0
    for _ in range(200):
        try:
            total += own.send(b"x" * 30000)
        except BlockingIOError:
            peer.recv(1 << 20)
        assert guard.sent(own) - begin == total
