"""Lines of the access log, request ids, and what the metrics count of answers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_harness import write_emoji_tokenizer
from server_scripted import END, READY, ScriptedCore, ask, scripted_front
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.messages import News, Ready
from tiny_models import write_tokenizer

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    write_emoji_tokenizer(folder)
    return read_hf_tokenizer(folder)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the access log gets."""
    found: list[str] = []
    log = logging.getLogger("surefoot.access")
    monkeypatch.setattr(log, "info", found.append)
    return found


def test_every_request_is_a_line(tokenizer: Tokenizer, lines: list[str]) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 9}

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> None:
        own = {"x-request-id": "my-id"}
        whole = await client.post(COMPLETIONS, json=body, headers=own)
        streamed = await client.post(COMPLETIONS, json={**body, "stream": True})
        refused = await client.post(COMPLETIONS, json={"prompt": [999]}, headers={})
        forged = await client.get('/a"%0A b', headers={"x-request-id": "a b"})
        assert whole.headers["x-request-id"] == "my-id"
        answers = (whole, streamed, refused, forged)
        entries = [json.loads(line) for line in lines]
        assert [entry["status"] for entry in entries] == [200, 200, 400, 404]
        for answer, entry in zip(answers, entries, strict=True):
            assert entry["request_id"] == answer.headers["x-request-id"] != "a b"
            assert entry["complete"] and entry["seconds"] >= 0
        tokens = [(entry["prompt_tokens"], entry["completion_tokens"]) for entry in entries]
        assert tokens == [(3, 3), (3, 3), (None, None), (None, None)]
        assert len({entry["request_id"] for entry in entries}) == 4

    ask(tokenizer, [[5, 6], [END]], use, access_log="json")


def test_lines_for_people_are_lines(tokenizer: Tokenizer, lines: list[str]) -> None:
    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> None:
        await client.post(COMPLETIONS, json={"prompt": [3]})
        await client.get('/a"%0A b?secret=1')

    ask(tokenizer, [[5], [END]], use, access_log="text")
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
    first = rf'{time} \S+ "POST {COMPLETIONS}" 200 \d+\.\d{{3}} s 1\+2 tokens [0-9a-f]{{32}}'
    assert re.fullmatch(first, lines[0])
    assert "\n" not in lines[1] and "404" in lines[1] and "secret" not in lines[1]


def test_a_client_that_leaves_is_told_of(tokenizer: Tokenizer, lines: list[str]) -> None:
    async def run() -> None:
        front = scripted_front(tokenizer, [[5]], hang=True, access_log="json")
        async with front as (app, _, _core):
            began = asyncio.Event()
            body = json.dumps({"prompt": [3], "stream": True}).encode()
            messages = [{"type": "http.request", "body": body}]

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await began.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message.get("body"):
                    began.set()

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
            await app({**scope, "query_string": b"", "raw_path": b""}, receive, send)

    asyncio.run(run())
    [entry] = map(json.loads, lines)
    assert not entry["complete"] and entry["status"] == 200 and entry["completion_tokens"] == 1
    assert entry["client"] == "-"


def test_nothing_is_logged_unasked(tokenizer: Tokenizer, lines: list[str]) -> None:
    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> None:
        head = await client.head("/health")
        assert head.status_code == 200 and "x-request-id" in head.headers

    ask(tokenizer, [[END]], use)
    assert not lines


def test_answers_and_rounds_are_counted(tokenizer: Tokenizer) -> None:
    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> str:
        for _ in range(2):
            await client.post(COMPLETIONS, json={"prompt": [3]})
        await client.post(COMPLETIONS, json={"prompt": [999]})
        await client.get("/v1/models/scripted")
        await client.get("/anything/at/all")
        await client.request("BREW", "/health")
        return (await client.get("/metrics")).text

    fields = {name: getattr(READY, name) for name in READY.__struct_fields__}
    build = {"version": "9", "device": "cpu"}
    page = ask(tokenizer, [[5, 6, 7], [END]], use, ready=Ready(**{**fields, "build": build}))
    counted = re.findall(r"^surefoot_http_requests_total(\{.*\}) (\S+)$", page, re.M)
    found = {
        tuple(re.findall(r'(?:method|path|status)="([^"]*)"', labels)): float(count)
        for labels, count in counted
    }
    assert found == {
        ("POST", COMPLETIONS, "200"): 2,
        ("POST", COMPLETIONS, "400"): 1,
        ("GET", "/v1/models/{model:path}", "200"): 1,
        ("GET", "other", "404"): 1,
        ("other", "/health", "405"): 1,
    }
    assert 'surefoot_build_info{device="cpu",version="9"} 1.0' in page
    assert 'surefoot_request_rounds_total{model_name="scripted"} 4.0' in page
    assert 'surefoot_generation_tokens_total{model_name="scripted"} 8.0' in page
    assert 'vllm:request_queue_time_seconds_count{model_name="scripted"} 2.0' in page
    assert "process_resident_memory_bytes" in page


def test_offers_are_counted_by_proposer_and_position(tokenizer: Tokenizer) -> None:
    """Also those of which nothing is verified, or something of another proposer's."""

    async def run() -> dict[str, list[int]]:
        fields = {name: getattr(READY, name) for name in READY.__struct_fields__}
        ready = Ready(**{**fields, "proposers": ["ngram", "suffix"]})
        async with scripted_front(tokenizer, [[5]], hang=True, ready=ready) as (_, front, _core):
            choice: Any = type("Choice", (), {"first_at": 0.0, "last_at": 0.0})
            for offered, offerer, verified in ((2, 0, 0), (0, -1, 2), (3, 1, 1)):
                news = News("a", [5], 0 if verified else -1, offered, verified, offerer=offerer)
                front.metrics.count_news(choice, news, 1, 1.0)
            assert front.metrics.request_rounds == 3
            return {name: counts.offered for name, counts in front.metrics.drafts.items()}

    assert asyncio.run(run()) == {"ngram": [1, 1], "suffix": [1, 1, 1]}
