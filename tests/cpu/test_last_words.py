"""What becomes of streams when their server is killed: its guard ends them, where it can."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from guarded_harness import NUMBERED, SECONDS, Cut, GuardedServer, running, wait
from ray_harness import alive

MESSAGES = 300
"""More than a guard that is stopped has room for."""


@pytest.fixture
def server() -> Iterator[GuardedServer]:
    with running() as found:
        yield found


def error_of(event: bytes) -> dict[str, Any]:
    """Of an event: its data."""
    assert event.endswith(b"\n\n") and event.count(b"data: ") == 1
    return json.loads(event.partition(b"data: ")[2])


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_streams_of_a_killed_server_end_with_the_error_of_their_api(loop: str) -> None:
    paths = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
    with running(loop) as server:
        server.connect().answer("/short")
        streams = [server.begin(path) for path in paths]
        assert server.held() == 4
        server.kill()
        ends = []
        for client, chunks in streams:
            *events, last = chunks
            assert events == NUMBERED[2 : len(events) + 2]
            assert client.rest() == b""
            ends.append(last)
    for end in ends[:2]:
        error = error_of(end)["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "replica_died",
            "server_error",
            None,
        )
        assert "can be sent again" in error["message"]
    assert ends[2].startswith(b"event: error\n") and ends[3].startswith(b"event: error\n")
    messages, responses = map(error_of, ends[2:])
    assert messages["type"] == "error" and messages["error"]["type"] == "api_error"
    assert responses["type"] == "error" and responses["code"] == "replica_died"
    assert responses["sequence_number"] > 1 << 30


@pytest.mark.parametrize("moment", ["before-2", "after-2", "before-3", "after-5"])
def test_a_stream_ends_well_whenever_its_server_dies(server: GuardedServer, moment: str) -> None:
    """Before and after pieces: those that were sent are whole, and the error follows."""
    when, _, number = moment.partition("-")
    *events, last = server.connect().answer(f"/slow?dies={moment}")
    assert events == NUMBERED[: int(number) - (when == "before")]
    assert error_of(last)["error"]["code"] == "replica_died"


def test_before_its_first_byte_an_answer_is_left_to_others(server: GuardedServer) -> None:
    client = server.connect()
    client.post("/slow?dies=before-0")
    assert client.rest() == b""


def test_nothing_is_written_behind_an_answers_end(server: GuardedServer) -> None:
    """Not even when the server dies the moment it has sent it."""
    client = server.connect()
    expected = [*NUMBERED[:3], b"data: [DONE]\n\n"]
    for _ in range(3):
        assert client.answer("/short") == expected
        server.wait_for_held(0)
    assert client.answer("/short?dies=after-5") == expected
    assert client.rest() == b""


def test_an_idle_connection_is_closed_without_a_word(server: GuardedServer) -> None:
    client = server.connect()
    client.answer("/short")
    server.kill()
    assert client.rest() == b""


def test_clients_that_have_left_are_not_held(server: GuardedServer) -> None:
    clients = [server.begin("/slow")[0] for _ in range(5)]
    server.wait_for_held(5)
    for client in clients:
        client.close()
    server.wait_for_held(0)


def test_a_reader_that_is_too_slow_gets_nothing_into_the_middle(server: GuardedServer) -> None:
    """Part of a piece never left the server: there is room again when it dies, but not for it."""
    client = server.connect(receive_bytes=1 << 12)
    client.post("/large")
    client.head()
    server.wait_for_held(1)
    # The server fills the kernel's queue, and cannot go on while it is stopped.
    time.sleep(0.3)
    server.process.send_signal(signal.SIGSTOP)
    seen = 0
    client.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        while True:
            seen += len(client.socket.recv(1 << 20))
    assert seen
    server.kill()
    client.socket.settimeout(SECONDS)
    assert client.socket.recv(1 << 20) == b""


def test_a_dead_guard_does_streams_no_harm(server: GuardedServer) -> None:
    _, chunks = server.begin("/slow")
    os.kill(server.guard, signal.SIGKILL)
    wait(lambda: not alive(server.guard))
    assert [next(chunks) for _ in range(5)] == NUMBERED[2:7]
    client = server.connect()
    for _ in range(3):
        assert len(client.answer("/short")) == 4
    assert server.logged().count("guard is gone") == 1
    with pytest.raises(Cut):
        list(chunks)


def test_a_guard_that_is_late_is_not_waited_for(server: GuardedServer) -> None:
    left, _ = server.begin("/slow")
    os.kill(server.guard, signal.SIGSTOP)
    client = server.connect()
    began = time.monotonic()
    for _ in range(MESSAGES):
        client.answer("/short")
    assert time.monotonic() - began < SECONDS / 2
    # What the guard has no room for is told later.
    left.close()
    time.sleep(0.1)
    os.kill(server.guard, signal.SIGCONT)
    server.wait_for_held(0)
    _, chunks = server.begin("/slow")
    server.wait_for_held(1)
    assert server.logged().count("could not be told") == 1
    assert error_of(list(chunks)[-1])["error"]["code"] == "replica_died"


def test_a_guard_outlives_what_ends_its_server(server: GuardedServer) -> None:
    """Signals for both, and for the server's children, as Ray sends them."""
    assert os.getsid(server.guard) != os.getsid(server.process.pid)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    assert children.read_text() == ""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(server.guard, number)
    client, chunks = server.begin("/slow")
    server.kill()
    assert error_of(list(chunks)[-1])["error"]["code"] == "replica_died"
    assert client.rest() == b""
