"""What a server does when things go wrong: clients that leave, a core that dies, full queues."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import surefoot.server.serve
from cache_harness import own_cache, quantized_model
from server_harness import (
    LIMIT,
    Server,
    emoji_model,
    running_server,
    wait_for,
)
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.server.serve import ServerConfig

LONG: dict[str, Any] = {"prompt": [5, 6, 7, 8] * 4, "max_tokens": 200, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 4000}
"""Ends when its client does."""
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
QUEUE = 17


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emoji_model(tmp_path_factory.mktemp("model"), max_positions=4096)


class Keeper:
    """A server for the tests of this module, started anew after one that ended it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None

    def __call__(self) -> Server:
        if self._server is None or self._server.process.poll() is not None:
            # One text at a time.
            options = "--max-queue", str(QUEUE), "--shutdown-timeout", str(2 * LIMIT)
            running = running_server(self._model, *options, max_num_seqs=1)
            self._server = self._stack.enter_context(running)
        return self._server

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def keeper(model: Path) -> Iterator[Keeper]:
    keeper = Keeper(model)
    yield keeper
    keeper.close()


@pytest.fixture
def server(keeper: Keeper) -> Server:
    return keeper()


def open_stream(server: Server, buffer: int | None = None, **body: Any) -> socket.socket:
    """A raw connection on which a stream has begun to arrive; nothing more of it is read.
    ``buffer``: how many bytes the system may receive unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(LIMIT)
    connection.connect((host, int(port)))
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def ended(server: Server, reason: str) -> float:
    """How many texts ended for a reason."""
    pattern = rf'^surefoot_requests_finished_total{{finished_reason="{reason}".*}} (\S+)$'
    [count] = re.findall(pattern, server.get("/metrics").text, re.M)
    return float(count)


class Background:
    """A request on a thread; ``answer`` is its response, or None if the connection broke."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, body))
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


def test_the_front_holds_no_model(server: Server) -> None:
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "zmq" in mapped and "torch" not in mapped
    assert "torch" in Path(f"/proc/{server.core}/maps").read_text()


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    before = ended(server, "length")
    for whole in (False, True):
        if whole:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json={**ENDLESS, "n": 2}, timeout=0.5)
        else:
            connection = open_stream(server, **ENDLESS)
            wait_for(lambda: server.metric("surefoot_requests_running") == 1)
            connection.close()
        server.wait_idle()
        assert ended(server, "length") == before
    assert server.metric("surefoot_kv_usage_ratio") == 0
    assert server.complete(**SHORT)["usage"]["completion_tokens"] == 4


def test_a_full_queue_says_when_to_come_back(server: Server) -> None:
    streams = [open_stream(server, **ENDLESS, n=n) for n in (1, QUEUE)]
    wait_for(lambda: server.metric("surefoot_requests_waiting") == QUEUE)
    rejected = server.metric("surefoot_requests_rejected_total")
    refused = server.post("/v1/completions", **SHORT)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert server.metric("surefoot_requests_rejected_total") == rejected + 1
    never = server.post("/v1/completions", **SHORT, n=QUEUE + 2)
    assert never.status_code == 400 and never.json()["error"]["param"] == "n"
    for stream in streams:
        stream.close()
    server.wait_idle()


def test_a_slow_reader_holds_up_nobody(server: Server) -> None:
    # Logprobs make a stream large, and little of it is received unread. What happens when the
    # buffers on the way are full as well is test_server_stream's.
    body = {**LONG, "logprobs": 50, "echo": True, "n": 2}
    readers = [open_stream(server, buffer=4096, **body) for _ in range(2)]
    for _ in range(3):
        assert server.complete(**SHORT)["usage"]["completion_tokens"] == 4
    # Even unread, its texts are generated to the end and give their blocks back.
    server.wait_idle()
    for reader in readers:
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = reader.recv(1 << 20)
            assert piece, "the stream was cut"
            data += piece
        assert data.count(b'"finish_reason":"length"') == 2 and b"[DONE]" in data
        reader.close()


def test_sigterm_lets_requests_finish(server: Server) -> None:
    running = [Background(server, **LONG), Background(server, **LONG)]
    wait_for(lambda: server.metric("surefoot_requests_waiting") == 1)
    core = server.core
    assert server.stop() == 0, "and not only when the timeout ends, which is beyond ours"
    for request in running:
        answer = request.join()
        assert answer is not None and answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert not Path(f"/proc/{core}").exists()


def test_patience_ends(model: Path) -> None:
    arguments = ("--shutdown-timeout", "0.2", "--served-model-name", "x")
    with running_server(model, *arguments, max_num_seqs=1, draft_policy="auto") as server:
        assert "surefoot_estimated_saved_seconds" in server.get("/metrics").text
        assert server.metric("surefoot_barren_rounds") == 0
        assert server.complete(**SHORT, model="x")["model"] == "x"
        for kind in ("believed", "measured"):
            wait_for(lambda name=f"surefoot_{kind}_round_seconds": server.metric(name) > 0)
        requests = [Background(server, **ENDLESS, n=8) for _ in range(2)]
        # Not even a client that does not read keeps the server.
        unread = open_stream(server, **ENDLESS, logprobs=50)
        wait_for(lambda: server.metric("surefoot_requests_waiting") == 16)
        assert server.stop() == 0
        unread.close()
        answers = [request.join() for request in requests]
        assert {answer.status_code for answer in answers if answer is not None} == {503}
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a is not None)


def test_a_dead_core_ends_requests_and_server(model: Path) -> None:
    with running_server(model, max_num_seqs=1) as server:
        kill_core(server)


def kill_core(server: Server) -> None:
    stream = open_stream(server, **ENDLESS)
    waiting = Background(server, **ENDLESS)
    wait_for(lambda: server.metric("surefoot_requests_waiting") == 1)
    os.kill(server.core, signal.SIGKILL)
    answer = waiting.join()
    assert answer is not None and answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"
    data = b""
    while chunk := stream.recv(1 << 16):
        data += chunk
    assert b"engine_died" in data and b"[DONE]" not in data
    assert server.wait() == 1
    assert any("engine died" in line for line in server.lines)


def test_sigterm_while_loading(model: Path) -> None:
    command = [sys.executable, "-m", "surefoot.cli", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: children.read_text().split())
    [core] = children.read_text().split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 143
    wait_for(lambda: not Path(f"/proc/{core}").exists())


def test_what_the_core_logs_while_loading_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_cache(tmp_path, monkeypatch)
    with running_server(quantized_model(tmp_path / "model.gguf"), backend="torch") as server:
        assert server.lines[0].startswith("Converting model.gguf to float32, once: ")
        assert str(root / "converted") in server.lines[0]


def test_options_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(surefoot.server.serve, "serve", lambda *args: given.append(args) or 0)
    monkeypatch.setenv("SUREFOOT_API_KEY", "secret another")
    arguments = "serve somewhere --host ::1 --port 81 --served-model-name x --served-model-name y "
    arguments += "--cors-origin http://a --max-queue 3 --max-body 1KiB --request-timeout 2.5 "
    arguments += "--uds here --allowed-hosts a --allowed-hosts *.b "
    arguments += "--shutdown-timeout 7 --access-log-json --max-num-seqs 5 --kv-cache-memory 2MiB"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    [(engine, config, *_)] = given
    assert engine == EngineConfig(model="somewhere", max_num_seqs=5, kv_cache_memory=2 << 20)
    assert config == ServerConfig(
        host="::1",
        port=81,
        names=("x", "y"),
        api_keys=("secret", "another"),
        uds="here",
        allowed_hosts=("a", "*.b"),
        cors_origins=("http://a",),
        max_queue=3,
        max_body_bytes=1024,
        request_timeout=2.5,
        shutdown_timeout=7,
        access_log="json",
    )


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"port": 1 << 16}, "port"),
        ({"port": -1}, "port"),
        ({"max_queue": -1}, "max_queue"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"shutdown_timeout": -0.1}, "shutdown_timeout"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ({"api_keys": ("good", "")}, "api_key"),
        ({"api_keys": ("good", "k\u00e9y")}, "api_key"),
        ({"api_keys": ("good", "a\nb")}, "api_key"),
    ],
)
def test_settings_that_no_server_can_have(given: dict[str, Any], option: str) -> None:
    with pytest.raises(SurefootError) as caught:
        ServerConfig(**given)
    assert caught.value.option == option


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
            ([*free, "--api-key", ""], "--api-key"),
            ([*free, "--allowed-hosts", "a*"], "--allowed-hosts"),
            ([*free, "--ssl-keyfile", "x"], "--ssl-keyfile"),
            ([*free, "--ssl-certfile", str(model / "config.json")], "--ssl-certfile"),
            ([*free, "--uds", str(model)], "--uds"),
        ):
            result = CliRunner().invoke(app, ["serve", *arguments])
            assert result.exit_code == 2, result.output
            said = result.stderr
            assert len(said.splitlines()) == 1 and said.startswith(f"error: {name}: "), said
