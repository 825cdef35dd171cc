"""How tokens become a stream: the front against a written-down core and a plain definition of what
the text is. No process is started."""

from __future__ import annotations

import asyncio
import codecs
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server_harness import sse, wait_for_async, write_emoji_tokenizer
from server_scripted import END, Groups, ScriptedCore, ask, scripted_front
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server import answer
from surefoot.server.messages import SwitchedOff
from tiny_models import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    write_emoji_tokenizer(folder)
    return read_hf_tokenizer(folder)


def expected(
    tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str], min_tokens: int, keep: bool
) -> tuple[str, int, str | None]:
    """(text, tokens that count, stop string) by definition: bytes are decoded as a whole, and the
    text ends at the first stop string that the shortest run of tokens completes."""
    total = b""
    for count, token in enumerate(tokens, start=1):
        before = _characters(total)
        total += b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        last = count == len(tokens)
        text = total.decode("utf-8", errors="replace") if last else _characters(total)
        longest = max((len(stop) for stop in stops), default=1)
        # What was there before, with room for a stop string that now has its end.
        start = max(0, len(before) - longest + 1)
        found = [(text.find(s, start), -len(s), s) for s in stops if text.find(s, start) >= 0]
        if found and count > min_tokens:
            at, _, stop = min(found)
            return text[: at + len(stop) if keep else at], count, stop
    return total.decode("utf-8", errors="replace"), len(tokens), None


def _characters(data: bytes) -> str:
    """The text of bytes less an unfinished character at their end."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


def grouped(tokens: Sequence[int], draw: random.Random | None) -> list[list[int]]:
    """Rounds: one token each, or of random sizes."""
    groups, at = [], 0
    while at < len(tokens):
        size = draw.randint(1, 5) if draw else 1
        groups.append(list(tokens[at : at + size]))
        at += size
    return groups


def both_ways(
    tokenizer: Tokenizer, script: Groups, **body: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(whole answer's choice, stream's chunks of the choice); the usages must be equal."""
    request = {"prompt": [3], "return_token_ids": True, **body}

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        whole = await client.post("/v1/completions", json=request)
        assert whole.status_code == 200, whole.text
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/completions", json={**request, **options})
        *events, last = sse(answer.text)
        assert last["choices"] == [] and last["usage"] == whole.json()["usage"]
        [choice] = whole.json()["choices"]
        assert last["usage"]["completion_tokens"] == len(choice["token_ids"])
        return choice, [event["choices"][0] for event in events]

    return ask(tokenizer, script, use)


CASES: dict[str, tuple[str, list[str]]] = {
    "no stop": ("naïve 🙂 café 👩‍👩‍👧 e\u0301 漢字\u202eא", []),
    "emoji as a stop": ("aa 🙂 bb 🙃 cc", ["🙃"]),
    "stop in bytes of two characters": ("aéè🙂🙃b", ["è🙂"]),
    "the earlier of two": ("abcdefgh", ["fg", "cd"]),
    "the longer of two at one place": ("abcdefgh", ["bc", "bcd", "b"]),
    "one inside the other": ("xabcabd", ["abd", "ca"]),
    "begins again within itself": ("aaab aab", ["aab"]),
    "almost": ("ab aba abb abac", ["abac"]),
    "at the very start": ("stop it", ["sto"]),
    "at the very end": ("it is over", ["over"]),
    "never, but begun at the end": ("it is ove", ["over", "e!"]),
    "white space": ("one\n\n  two \n\n", ["\n\n "]),
    "joined emoji": ("a 👩‍👩‍👧 b", ["\u200d👧"]),
    "half of a pair of flags": ("🇩🇪🇫🇷", ["🇫"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])
def test_corners(tokenizer: Tokenizer, name: str, keep: bool) -> None:
    text, stops = CASES[name]
    tokens = tokenizer.encode(text)
    assert len(tokens) >= len(text)
    wanted, kept, stop = expected(tokenizer, tokens, stops, 0, keep)
    if not stops:
        assert wanted == text
    body = {"stop": stops, "include_stop_str_in_output": keep} if stops else {}
    for draw in (None, random.Random(1), random.Random(2)):
        whole, chunks = both_ways(tokenizer, grouped(tokens, draw), **body)
        assert whole["text"] == wanted == "".join(chunk["text"] for chunk in chunks)
        assert whole["stop_reason"] == chunks[-1]["stop_reason"] == stop
        assert whole["token_ids"] == tokens[:kept]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens[:kept]
        assert whole["finish_reason"] == ("stop" if stop else "length")


def test_random_bytes_in_random_rounds(tokenizer: Tokenizer) -> None:
    """Whole characters, halves of them, bytes that are none, special tokens; stops of any kind."""
    draw = random.Random(5)
    stopped = 0
    for _ in range(60):
        text = "".join(draw.choice("ab 🙂🙃éx") for _ in range(draw.randint(1, 12)))
        tokens = tokenizer.encode(text)
        for _ in range(draw.randint(0, 3)):
            tokens.insert(draw.randrange(len(tokens) + 1), draw.choice([0, 1, 3, 130, 200, 258]))
        decoded = tokenizer.decode(tokens, skip_special_tokens=True)
        assert expected(tokenizer, tokens, [], 0, False) == (decoded, len(tokens), None)
        at = draw.randrange(len(decoded) + 1)
        stops = list({decoded[at : at + draw.randint(1, 3)] or "?", draw.choice("🙂bz")})
        body = {"stop": stops, "min_tokens": draw.choice([0, 0, 2])}
        wanted, kept, stop = expected(tokenizer, tokens, stops, body["min_tokens"], False)
        whole, chunks = both_ways(tokenizer, grouped(tokens, draw), max_tokens=99, **body)
        told = "".join(chunk["text"] for chunk in chunks)
        assert (whole["text"], told) == (wanted, wanted), (tokens, stops)
        assert whole["token_ids"] == tokens[:kept] and whole["stop_reason"] == stop
        stopped += stop is not None
    assert 20 < stopped < 60


def test_a_character_is_sent_when_it_is_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂bé")
    _, chunks = both_ways(tokenizer, grouped(tokens, None))
    texts = [chunk["text"] for chunk in chunks]
    assert [text for text in texts if text] == ["a", "🙂", "b", "é"]
    _, held = both_ways(tokenizer, grouped(tokens, None), stop="bé!")
    assert [chunk["text"] for chunk in held if chunk["text"]] == ["a", "🙂", "bé"]


def test_what_never_becomes_a_character_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("a🙂")[:-1]
    whole, chunks = both_ways(tokenizer, grouped(half, None))
    assert whole["text"] == "".join(chunk["text"] for chunk in chunks) == "a\ufffd"


def test_tokens_after_a_stop_string_are_forgotten(tokenizer: Tokenizer) -> None:
    script = [tokenizer.encode("ab"), tokenizer.encode("cXdef"), tokenizer.encode("gh")]

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        body = {"prompt": [3, 4], "stop": "cX"}
        answer = (await client.post("/v1/completions", json=body)).json()
        page = (await client.get("/metrics")).text
        return answer, page, core.aborted

    answer, page, aborted = ask(tokenizer, script, use)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 4
    assert 'vllm:generation_tokens_total{model_name="scripted"} 4.0' in page
    assert aborted == ["0"], "the core was not told to end it"


def test_an_end_token_is_no_text_but_counts(tokenizer: Tokenizer) -> None:
    script = [tokenizer.encode("ab"), [*tokenizer.encode("c"), END]]
    whole, chunks = both_ways(tokenizer, script, skip_special_tokens=False)
    assert whole["text"] == "".join(chunk["text"] for chunk in chunks) == "abc"
    assert whole["finish_reason"] == "stop" and whole["stop_reason"] is None
    assert whole["token_ids"][-1] == END


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (WEATHER, None, ["weather"]),
        (f"Let me see.\n{WEATHER}\n{TIME}", "Let me see.", ["weather", "time"]),
        ("a < b, no <tool", "a < b, no <tool", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ],
)
def test_tool_calls_as_the_openai_client_reads_them(
    tokenizer: Tokenizer, text: str, content: str | None, calls: list[str], seed: int | None
) -> None:
    draw = None if seed is None else random.Random(seed)
    script = grouped([*tokenizer.encode(text), END], draw)
    options: Any = {"model": "scripted", "messages": [{"role": "user", "content": "?"}]}

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        http: Any = client
        api = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        whole = await api.chat.completions.create(**options, tools=TOOLS)
        streamed: dict[int, list[str]] = {}
        said, reasons = "", []
        async for chunk in await api.chat.completions.create(**options, tools=TOOLS, stream=True):
            [choice] = chunk.choices
            said += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                parts = streamed.setdefault(call.index, ["", "", ""])
                assert call.function is not None
                for place, part in enumerate((call.id, call.function.name)):
                    parts[place] += part or ""
                parts[2] += call.function.arguments or ""
        plain = await api.chat.completions.create(**options, tools=TOOLS, tool_choice="none")
        assert plain.choices[0].message.content == text
        assert plain.choices[0].message.tool_calls is None
        return whole.choices[0], said, reasons, streamed

    whole, said, reasons, streamed = ask(tokenizer, script, use)
    assert whole.message.content == content and said == (content or "")
    found = whole.message.tool_calls or []
    assert [call.function.name for call in found] == calls
    assert whole.finish_reason == reasons[-1] == ("tool_calls" if calls else "stop")
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert len({call.id for call in found}) == len(calls)
    assert [parts[1] for _, parts in sorted(streamed.items())] == calls
    for index, call in enumerate(found):
        assert call.function.arguments == streamed[index][2]
        if call.function.name == "weather":
            assert json.loads(call.function.arguments) == {"city": "Zürich 🙂"}


def test_a_client_that_leaves_is_told_to_the_core_at_once(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        script = [tokenizer.encode("ab")]
        async with scripted_front(tokenizer, script, hang=True) as (app, front, core):
            for stream in (False, True):
                core.received.clear()
                gone = asyncio.Event()
                call = asyncio.ensure_future(app(*asgi_call(gone, n=2, stream=stream)))
                await wait_for_async(lambda: front.active == 2)
                await asyncio.sleep(0.02)
                assert not call.done() and not core.aborted
                gone.set()
                await asyncio.wait_for(call, 5)
                assert len(core.aborted) == 2 and not front.active

    asyncio.run(run())


def test_a_slow_reader_holds_up_nobody_and_gets_it_all_at_once(tokenizer: Tokenizer) -> None:
    text = "one by one, and then 🙂 all of it"
    script = grouped(tokenizer.encode(text), None)

    async def run() -> list[bytes]:
        async with scripted_front(tokenizer, script) as (app, front, _):
            reads, bodies = asyncio.Event(), []

            async def send(message: Any) -> None:
                if bodies:
                    await reads.wait()
                bodies.append(message.get("body", b""))

            scope, receive, _ = asgi_call(asyncio.Event(), stream=True)
            slow = asyncio.ensure_future(app(scope, receive, send))
            await wait_for_async(lambda: bodies)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"prompt": [3], "stream": True}
                quick = await asyncio.wait_for(client.post("/v1/completions", json=body), 5)
            assert len(sse(quick.text)) > len(text) / 2
            # Its text is complete, though hardly any of it was read.
            assert not front.active and not slow.done()
            reads.set()
            await asyncio.wait_for(slow, 5)
            return bodies

    bodies = asyncio.run(run())
    events = sse(b"".join(bodies).decode())
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert len(bodies) <= 6, "pieces were queued one by one"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_what_has_piled_up_goes_out_in_pieces(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """And a whole answer does not depend on where it is written."""
    script = [tokenizer.encode("one by one, and then 🙂 all of it. " * 9), [END]]
    chat = {"messages": [{"role": "user", "content": "a"}]}
    body = {"prompt": "a"} if path == "/v1/completions" else chat
    body = {**body, "max_tokens": 999, "stop": ["it!"]}
    if path == "/v1/messages":
        body["stop_sequences"] = body.pop("stop")

    async def use(client: httpx.AsyncClient, _: Any) -> tuple[int, str, Any]:
        streamed = await client.post(path, json={**body, "stream": True})
        whole = (await client.post(path, json=body)).json()
        for name in ("id", "created"):
            whole.pop(name, None)
        lines = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        found = [e["choices"][0] if "choices" in e else e.get("delta", {}) for e in events]
        texts = [e.get("text") or e.get("delta", {}).get("content") or "" for e in found]
        return len(events), "".join(texts), whole

    usual = ask(tokenizer, script, use)
    monkeypatch.setattr(answer, "AT_ONCE", 40)
    monkeypatch.setattr(answer, "SHORT_ANSWER", 0)
    count, *rest = ask(tokenizer, script, use)
    assert rest == list(usual[1:]) and rest[0].endswith("all of it. ") and count >= usual[0] + 6


def test_an_answer_is_the_same_piece_by_piece() -> None:
    value = {"a": [{"b": None, "c": [1, 2.5, "é🙂\n"]}, [], {}], "d": {"e": {"f": [[[[1]]]]}}}
    for depth in range(9):
        assert json.loads(answer.encode_piecewise(value, depth)) == value


def asgi_call(gone: asyncio.Event, **body: Any) -> tuple[Any, Any, Any]:
    """(scope, receive, send) of a completion whose client leaves when ``gone`` is set."""
    content = json.dumps({"prompt": [3], **body}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            await gone.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    return scope, receive, send


def test_time_limit(tokenizer: Tokenizer) -> None:
    script = [tokenizer.encode("ab")]

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> None:
        late = await client.post("/v1/completions", json={"prompt": [3], "n": 2})
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        assert len(core.aborted) == 2
        streamed = await client.post("/v1/completions", json={"prompt": [3], "stream": True})
        assert '"text":"a' in streamed.text
        assert '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text
        assert len(core.aborted) == 3

    ask(tokenizer, script, use, hang=True, request_timeout=0.1)


def test_key_origin_and_size(tokenizer: Tokenizer) -> None:
    script = [tokenizer.encode("ab")]
    guards: Any = {
        "api_keys": ["other", "secret"],
        "cors_origins": ["http://page"],
        "max_body_bytes": 1024,
    }
    path, body = "/v1/completions", {"prompt": [3], "max_tokens": 2}

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> None:
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = await client.post(path, json=body, headers=wrong)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert not core.received
        right = {"authorization": "Bearer secret", "origin": "http://page"}
        answer = await client.post(path, json=body, headers=right)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://page"
        large = json.dumps({"prompt": "x" * 2000}).encode()
        typed = {**right, "content-type": "application/json"}
        assert (await client.post(path, content=large, headers=typed)).status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(large), 100):
                yield large[at : at + 100]

        refused = await client.post(path, content=chunks(), headers=typed)
        assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        assert (await client.options(path, headers=preflight)).status_code == 200
        other = {**preflight, "origin": "http://other"}
        denied = await client.options(path, headers=other)
        assert "access-control-allow-origin" not in denied.headers

    ask(tokenizer, script, use, **guards)


def test_a_dead_core_and_a_full_queue_say_when_to_come_back(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with scripted_front(tokenizer, [[3]], hang=True) as (app, front, core):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

                def post(**body: Any) -> Any:
                    return client.post("/v1/completions", json={"prompt": [3], **body})

                running = asyncio.ensure_future(post(n=16))
                await wait_for_async(lambda: front.active == 16)
                full = await post()
                assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
                assert full.json()["error"]["type"] == "rate_limit_error"
                assert (await post(n=17)).json()["error"]["param"] == "n"
                core.die()
                dead = [await running, await post(), await client.get("/health")]
                for answer in dead:
                    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                    assert answer.json()["error"]["code"] == "engine_died"

    asyncio.run(run())


def test_a_proposer_that_was_switched_off_is_told_of(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> list[Any]:
        pages = []
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"prompt": [3], "max_tokens": 2})
            assert answer.status_code == (await client.get("/health")).status_code == 200
            card = (await client.get("/v1/models/scripted")).json()
            pages.append((card["speculation"]["methods"], (await client.get("/metrics")).text))
            core.say(SwitchedOff(["ngram"], "KeyError: 'x'"))
        return pages

    pages = ask(tokenizer, [[5], [6]], use)
    series = 'surefoot_proposer_active{model_name="scripted",proposer="ngram"}'
    for (methods, page), active in zip(pages, (1, 0), strict=True):
        assert methods == ["auto", "off", "ngram"][: 2 + active]
        assert f"{series} {active}.0\n" in page
    [line] = [record.getMessage() for record in caplog.records if "ngram" in record.getMessage()]
    assert line == "proposer ngram is switched off, as it failed: KeyError: 'x'"
