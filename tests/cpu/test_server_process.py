"""What a server does when things go wrong: clients that leave, a core that dies, full queues."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from server_harness import (
    LIMIT,
    Server,
    emoji_model,
    running_server,
    wait_for,
)
from surefoot.cli.main import app

LONG: dict[str, Any] = {"prompt": [5, 6, 7, 8] * 4, "max_tokens": 256, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emoji_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[Server]:
    """One text at a time and few that wait."""
    with running_server(model, "--max-queue", "2", max_num_seqs=1) as server:
        yield server


def open_stream(server: Server, **body: Any) -> socket.socket:
    """A raw connection on which a stream has begun to arrive; nothing more of it is read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT)
    content = json.dumps({**LONG, **body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


class Background:
    """A request on a thread; ``answer`` is its response, or None if the connection broke."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, {**LONG, **body}))
        self._thread.start()

    def _ask(self, server: Server, body: dict[str, Any]) -> None:
        try:
            self.answer = server.post("/v1/completions", **body)
        except httpx.TransportError:
            self.answer = None

    def join(self) -> httpx.Response | None:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the request hangs"
        return self.answer


def test_a_client_that_leaves_frees_its_blocks(slow: Server) -> None:
    for whole in (False, True):
        tokens = slow.metric("surefoot_generation_tokens_total")
        if whole:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{slow.url}/v1/completions", json={**LONG, "n": 2}, timeout=0.3)
        else:
            connection = open_stream(slow)
            wait_for(lambda: slow.metric("surefoot_requests_running") == 1)
            connection.close()
        slow.wait_idle()
        assert slow.metric("surefoot_generation_tokens_total") - tokens < 256
        ended = slow.get("/metrics").text
        assert 'surefoot_requests_finished_total{finished_reason="length"' in ended
    assert slow.metric("surefoot_kv_usage_ratio") == 0
    assert slow.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_full_queue_says_when_to_come_back(slow: Server) -> None:
    requests = [Background(slow) for _ in range(3)]
    wait_for(lambda: slow.metric("surefoot_requests_waiting") == 2)
    refused = slow.post("/v1/completions", **LONG)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert slow.metric("surefoot_requests_rejected_total") == 1
    never = slow.post("/v1/completions", **{**LONG, "n": 4})
    assert never.status_code == 400 and never.json()["error"]["param"] == "n"
    for request in requests:
        answer = request.join()
        assert answer is not None and answer.status_code == 200


def test_sigterm_lets_requests_finish(slow: Server) -> None:
    # The last test with this server.
    running = [Background(slow), Background(slow)]
    wait_for(lambda: slow.metric("surefoot_requests_waiting") == 1)
    core, started = slow.core, time.monotonic()
    assert slow.stop() == 0
    assert time.monotonic() - started < 25, "it waited for the timeout"
    for request in running:
        answer = request.join()
        assert answer is not None and answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 256
    assert not Path(f"/proc/{core}").exists()


def test_a_slow_reader_holds_up_nobody(model: Path) -> None:
    with running_server(model, draft_policy="auto") as server:
        assert "surefoot_estimated_saved_seconds" in server.get("/metrics").text
        # Logprobs make a stream large enough to fill the sockets' buffers many times over.
        readers = [open_stream(server, logprobs=50, echo=True, n=8) for _ in range(2)]
        for _ in range(3):
            assert server.complete(prompt="a", max_tokens=4)["usage"]["completion_tokens"] == 4
        # Even unread, its texts are generated to the end and give their blocks back.
        server.wait_idle()
        for reader in readers:
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += reader.recv(1 << 20)
            assert data.count(b'"finish_reason":"length"') == 8 and b"[DONE]" in data
            reader.close()


def test_a_dead_core_ends_requests_and_server(model: Path) -> None:
    with running_server(model, max_num_seqs=1) as server:
        kill_core(server)


def kill_core(server: Server) -> None:
    stream = open_stream(server)
    waiting = Background(server)
    wait_for(lambda: server.metric("surefoot_requests_waiting") == 1)
    os.kill(server.core, signal.SIGKILL)
    answer = waiting.join()
    assert answer is not None and answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"
    data = b""
    while chunk := stream.recv(1 << 16):
        data += chunk
    assert b"engine_died" in data and b"[DONE]" not in data
    assert server.process.wait(LIMIT) == 1
    assert any("engine died" in line for line in server.lines)


def test_patience_ends(model: Path) -> None:
    with running_server(model, "--shutdown-timeout", "0.2", max_num_seqs=1) as server:
        requests = [Background(server, n=8) for _ in range(4)]
        wait_for(lambda: server.metric("surefoot_requests_waiting") == 31)
        # Not even a client that does not read keeps the server.
        unread = open_stream(server, logprobs=50)
        assert server.stop() == 0
        unread.close()
        answers = [request.join() for request in requests]
        assert {answer.status_code for answer in answers if answer is not None} == {503}


def test_sigterm_while_loading(model: Path) -> None:
    command = [sys.executable, "-m", "surefoot.cli", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: children.read_text().split())
    [core] = children.read_text().split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 143
    wait_for(lambda: not Path(f"/proc/{core}").exists())


def test_time_limit(model: Path) -> None:
    with running_server(model, "--request-timeout", "0.4", max_num_seqs=1) as server:
        late = server.post("/v1/completions", **LONG, n=8)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        streamed = server.post("/v1/completions", **LONG, n=8, stream=True)
        assert '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text
        server.wait_idle()
        assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_key_origin_size_and_name_and_a_core_that_does_not_outlive(model: Path) -> None:
    arguments = ["--api-key", "secret", "--cors-origin", "http://page", "--max-body", "1KiB"]
    with running_server(model, *arguments, "--served-model-name", "x") as server:
        url = f"{server.url}/v1/completions"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = httpx.post(url, json={"prompt": "a"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 401
        client = httpx.Client(headers={"authorization": "Bearer secret", "origin": "http://page"})
        answer = client.post(url, json={"prompt": "a", "max_tokens": 1, "model": "x"})
        assert answer.status_code == 200 and answer.json()["model"] == "x"
        assert answer.headers["access-control-allow-origin"] == "http://page"
        large = {"prompt": "x" * 2000}
        assert client.post(url, json=large).status_code == 413
        chunks = (json.dumps(large).encode()[at : at + 100] for at in range(0, 2014, 100))
        headers = {"content-type": "application/json"}
        assert client.post(url, content=chunks, headers=headers).status_code == 413
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        assert httpx.options(url, headers=preflight).status_code == 200
        other = {"origin": "http://other", "access-control-request-method": "POST"}
        assert "access-control-allow-origin" not in httpx.options(url, headers=other).headers
        core = server.core
        server.process.kill()
        wait_for(lambda: not Path(f"/proc/{core}").exists())


def test_mistakes_at_the_start_are_one_line(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        free = [str(model), "--port", "0"]
        for arguments, name in (
            ([str(model), "--port", port], "--port"),
            (["nowhere", "--port", "0"], "--model"),
            ([*free, "--max-model-len", "9999"], "--max-model-len"),
            ([*free, "--model", "x"], "--model"),
            ([*free, "--max-body", "1 parsec"], "--max-body"),
            ([*free, "--request-timeout", "-1"], "--request-timeout"),
        ):
            result = CliRunner().invoke(app, ["serve", *arguments])
            assert result.exit_code == 2, result.output
            said = result.stderr
            assert len(said.splitlines()) == 1 and said.startswith(f"error: {name}: "), said
