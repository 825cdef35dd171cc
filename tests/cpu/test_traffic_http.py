"""Traffic over HTTP: reading streams, the client's connections, and our own server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from server_harness import emoji_model, running_server
from surefoot.bench.http_client import Client
from surefoot.bench.http_traffic import DEFAULT, Events, Server
from surefoot.bench.latency import Timeline
from surefoot.bench.prompts import BenchPrompt
from surefoot.bench.traffic import Run, TrafficSettings
from surefoot.bench.workload import Call
from surefoot.cli.main import app
from surefoot.errors import SurefootError


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str = "a") -> bytes:
    return event({"choices": [{"index": 0, "text": text}], "usage": None})


USAGE = {"completion_tokens": 9, "prompt_tokens": 4}
STREAM = b": ping\n\n" + token() + token("é") + b"event: x\n\n" + token("") + event(
    {"choices": [], "usage": USAGE}
) + b"data: [DONE]\n\n"  # fmt: skip


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=8), windows=st.booleans())
def test_events_are_read_however_the_stream_is_cut(cuts: list[int], windows: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if windows else STREAM
    ticks = iter(range(1, 100))
    events = Events(Timeline(), lambda: float(next(ticks)), 0.0)
    places = [0, *sorted(cuts), len(stream)]
    for begin, end in itertools.pairwise(places):
        events.feed(stream[begin:end])
    events.finish(200)
    # Every event with a choice is a chunk, one without text, too.
    assert events.line == Timeline(chunks=[1.0, 2.0, 3.0], tokens=9, prompt_tokens=4)


@pytest.mark.parametrize(
    ("status", "stream", "error"),
    [
        (429, b'{"error": {"message": "come back", "code": 429}}', "status 429: come back"),
        (500, b"<html>", "status 500: <html>"),
        (200, b'{"choices": [{"text": "whole"}]}', "a stream without tokens"),
        (200, token() + event({"error": {"message": "died"}}), "died"),
        (200, token() + b"data: [DONE]\n\n", "the stream says nothing about usage"),
    ],
)
def test_why_a_request_failed(status: int, stream: bytes, error: str) -> None:
    events = Events(Timeline(), lambda: 1.0, 0.0)
    events.feed(stream)
    events.finish(status)
    assert events.line.error == error


# --- the client, with servers that are made up ----------------------------------------------------

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serving(handler: Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Head and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    [length] = [line for line in head.split("\r\n") if line.startswith("Content-Length")]
    return head, await reader.readexactly(int(length.split()[1]))


def answer(body: bytes, *more: str) -> bytes:
    head = "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *more, "", ""])
    return head.encode() + body


def test_connections_are_used_again_while_the_server_keeps_them() -> None:
    opened, heads = [], []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        for count in range(2):
            head, body = await read_request(reader)
            heads.append(head)
            writer.write(answer(b"got " + body, *(["Connection: close"] if count else [])))
        writer.close()

    async def use(url: str) -> list[bytes]:
        client, bodies = Client(url + "/base/", "secret"), []
        for index in range(5):
            pieces: list[bytes] = []
            request = client.encode("POST", "/x", str(index).encode())
            assert await client.send(request, pieces.append) == 200
            bodies.append(b"".join(pieces))
        client.close()
        return bodies

    assert asyncio.run(serving(handler, use)) == [b"got %d" % i for i in range(5)]
    assert len(opened) == 3
    assert heads[0].startswith("POST /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "Authorization: Bearer secret\r\n" in heads[0]


@pytest.mark.parametrize(
    "told", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", b"?\r\n"]
)
def test_an_answer_that_does_not_come_is_an_error(told: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(told)
        writer.close()

    async def use(url: str) -> None:
        client = Client(url)
        with pytest.raises(OSError):
            await client.send(client.encode("GET", "/"), lambda data: None)

    asyncio.run(serving(handler, use))


def run_scripted(
    calls: list[Call], at_once: int | None, mode: Any = DEFAULT
) -> tuple[Run, int, list[dict[str, Any]]]:
    """Traffic on a server that answers each request with three chunks when nobody else comes any
    more: the run, the most requests that were there at once, and what they were."""
    bodies: list[dict[str, Any]] = []
    there = [0, 0]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head, body = await read_request(reader)
            except asyncio.IncompleteReadError:
                break
            if head.startswith("GET /v1/models"):
                writer.write(answer(b'{"data": [{"id": "first"}, {"id": "second"}]}'))
                continue
            bodies.append({"path": head.split()[1], **json.loads(body)})
            there[0] += 1
            there[1] = max(there)
            await asyncio.sleep(0.05)
            there[0] -= 1
            told = {"rounds": 3, "verified": 6, "accepted": 4}
            usage = {"prompt_tokens": 5, "completion_tokens": 7, "speculation": told}
            writer.write(answer(token() * 3 + event({"choices": [], "usage": usage})))
        writer.close()

    async def use(url: str) -> Run:
        settings = TrafficSettings((mode,), at_once, temperature=0.5)
        server = Server(url)
        run = await server.run(calls, settings, mode)
        server.client.close()
        return run

    return asyncio.run(serving(handler, use)), there[1], bodies


def test_a_closed_loop_keeps_its_number_of_requests_under_way() -> None:
    calls = [Call([1, index], 7, seed=index) for index in range(7)]
    run, most, bodies = run_scripted(calls, at_once=3)
    assert most == 3 and run.traffic.completed == 7
    assert (run.traffic.output_tokens, run.traffic.prompt_tokens) == (49, 35)
    assert run.speculation is not None and run.speculation.accepted_length == pytest.approx(7 / 3)
    assert [body["prompt"] for body in bodies] == [call.prompt for call in calls]
    assert bodies[0] == {
        "path": "/v1/completions", "model": "first", "prompt": [1, 0], "max_tokens": 7,
        "temperature": 0.5, "seed": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert run_scripted(calls, at_once=None)[1] == 7


def test_texts_and_conversations_go_where_they_belong() -> None:
    talk = {"role": "user", "content": "hello"}
    calls = [
        Call(BenchPrompt("1", "a", text="once"), 7, 0),
        Call(BenchPrompt("2", "a", messages=(talk,)), 7, 1, due=0.02),
    ]
    _, _, bodies = run_scripted(calls, None, mode=0)
    assert [body["path"] for body in bodies] == ["/v1/completions", "/v1/chat/completions"]
    assert bodies[0]["prompt"] == "once" and bodies[1]["messages"] == [talk]
    assert [body["speculation"] for body in bodies] == ["off", "off"]


def test_what_is_no_server_of_openai_s_api_is_refused() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer(b'{"data": []}'))

    async def use(url: str) -> None:
        with pytest.raises(SurefootError, match="lists no models"):
            await Server(url).find_model()

    asyncio.run(serving(handler, use))


# --- our own server -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = emoji_model(tmp_path_factory.mktemp("model"))
    with running_server(model, max_num_seqs=4) as server:
        yield server.url


def bench(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", "--traffic", *(str(item) for item in arguments)])


SMALL = ["--requests", "9", "--at-once", "4", "--prompt-tokens", "5-60", "--max-tokens", "4-24"]


def test_our_server(url: str) -> None:
    line = ["--vocab-size", "250", "--modes", "plain,auto", "--repeats", "2"]
    result = bench("--url", url, *SMALL, *line)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    plain, auto = found["modes"]
    for entry in (plain, auto):
        assert entry["completed"] == 9 and entry["failed"] == 0 and len(entry["runs"]) == 2
        assert 0 < entry["p50_ttft_ms"] <= entry["p99_ttft_ms"] <= entry["max_e2el_ms"]
        # What was asked for came, whatever the texts are.
        assert entry["total_output_tokens"] == pytest.approx(
            9 * found["settings"]["mean_output_tokens"]
        )
        assert entry["total_input_tokens"] == plain["total_input_tokens"] > 45
    assert plain["accepted_length"] == 1 and plain["drafts_verified"] == 0
    assert auto["accepted_length"] >= 1 and auto["of_plain"]["count"] == 2


def test_requests_that_fail_are_told_and_fail_the_command(url: str) -> None:
    result = bench("--url", f"{url}/v1", *SMALL, "--model", "other", "--repeats", "1")
    assert result.exit_code == 1
    assert "9 requests of mode default FAILED: status 404" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["modes"][0]["failed"] == 9
