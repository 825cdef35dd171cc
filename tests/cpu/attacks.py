"""What clients send that is large, half or wicked. Only the standard library is imported, as every
attacking process reads this anew."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
LIMIT = 120.0
"""Seconds that an attacker waits for an answer."""
PAUSE = 0.1
"""And from there to the next request: what is measured is what a request does, not a flood."""
STATUSES = 600
OPTIONAL = {"type": "object", "properties": {f"m{i}": {"type": "integer"} for i in range(10_000)}}
NESTED = b'{"prompt": [' + b"[]," * 900_000 + b"[]]}"


def json_request(path: str, **body: Any) -> bytes:
    return _raw(path, json.dumps(body).encode())


def _raw(path: str, content: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = len(content) if length is None else length
    return f"{head}Connection: close\r\nContent-Length: {size}\r\n\r\n".encode() + content


def _message(text: str, **more: Any) -> bytes:
    return json_request(CHAT, messages=[{"role": "user", "content": text}], **more)


def _schema(schema: Any) -> bytes:
    return _message("a", response_format={"type": "json_schema", "json_schema": {"schema": schema}})


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WORDS = "{% for a in range(99999) %}{{ ('ab ' * 5000000) | wordcount }}{% endfor %}"
SPLITS = "{% for a in range(99999) %}{% set x = ('ab ' * 5000000).split() %}{% endfor %}"


def _complete(**fields: Any) -> bytes:
    return json_request(COMPLETIONS, **{"prompt": "a", **fields})


def _nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


def _tools(*parameters: Any, **fields: Any) -> bytes:
    functions = [{"name": f"f{i}", "parameters": item} for i, item in enumerate(parameters)]
    return _message("a", tools=[{"type": "function", "function": f} for f in functions], **fields)


def _call(arguments: str) -> bytes:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    return json_request(CHAT, messages=[{"role": "assistant", "tool_calls": calls}])


def _turns(path: str, name: str, kind: str, **fields: Any) -> bytes:
    turn = {"role": "user", "content": [{"type": kind, "text": "a"}]}
    return json_request(path, **{name: [turn] * 5000, **fields})


ATTACKS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "prompts of 7.8 MB": (4, lambda: _complete(prompt="the cat " * 975_000)),
    "prompts of 2,600,000 ids": (4, lambda: _complete(prompt=[5] * 2_600_000)),
    "100 prompts": (2, lambda: _complete(prompt=["a " * 40] * 100)),
    "messages of 7.8 MB": (4, lambda: _message("x" * 7_800_000)),
    "5,000 messages": (
        4,
        lambda: json_request(CHAT, messages=[{"role": "user", "content": "a"}] * 5000),
    ),
    "5,000 items": (4, lambda: _turns("/v1/responses", "input", "input_text")),
    "5,000 turns": (4, lambda: _turns("/v1/messages", "messages", "text", max_tokens=5)),
    "embeddings of 100 texts": (2, lambda: json_request("/v1/embeddings", input=["a " * 40] * 100)),
    "500 kB to tokenize": (4, lambda: json_request(TOKENIZE, prompt="the cat " * 65_000)),
    "500 kB of marks": (4, lambda: json_request(TOKENIZE, prompt="\u0344\u0327" * 260_000)),
    "260,000 tokens": (4, lambda: json_request("/detokenize", tokens=[81] * 260_000)),
    "a schema of 10,000 members": (2, lambda: _schema(OPTIONAL)),
    "a regular expression that counts": (
        2,
        lambda: _message("a", guided_regex="(a{1,900}){1,900}"),
    ),
    "40,000 choices": (4, lambda: _message("a", guided_choice=[f"c{i}" for i in range(40_000)])),
    "tools 400 deep": (4, lambda: _tools(_nested(400))),
    "2,000 tools": (4, lambda: _tools(*[_nested(2)] * 2000, tool_choice="required")),
    "tools of 7.8 MB": (4, lambda: _tools({"type": "object", "title": "x" * 7_800_000})),
    "calls of 2,600,000 lists": (4, lambda: _call("[" + "[]," * 2_600_000 + "[]]")),
    "900,000 lists": (4, lambda: _raw(COMPLETIONS, NESTED)),
    "60,000 unknown fields": (4, lambda: _complete(**{f"x{i}": i for i in range(60_000)})),
    "60,000 wrong biases": (4, lambda: _complete(logit_bias={i: "a" for i in range(60_000)})),
    "98,000 allowed tokens": (4, lambda: _complete(allowed_token_ids=[*range(49_000)] * 2)),
    "98,000 stop tokens": (4, lambda: _complete(stop_token_ids=[*range(49_000)] * 2)),
    "8,000 characters of stop strings": (
        4,
        lambda: _complete(
            stop=["a" * 120 + f"b{i}" for i in range(64)], max_tokens=500, guided_regex="a{4000}"
        ),
    ),
    "bad words": (4, lambda: _complete(bad_words=["ab" * 15] * 255, max_tokens=64)),
    "logprobs of a prompt": (
        4,
        lambda: _complete(prompt=[81] * 4000, prompt_logprobs=50, max_tokens=1),
    ),
    "logprobs of 128 texts": (1, lambda: _complete(logprobs=50, n=128, max_tokens=100)),
    "128 echoes with logprobs": (
        1,
        lambda: _complete(prompt=[81] * 1000, echo=True, logprobs=7, n=128, max_tokens=1),
    ),
    "a template that loops": (4, lambda: _message("a", chat_template=LOOPS)),
    "a template that counts words": (4, lambda: _message("a", chat_template=WORDS)),
    "a template that splits": (4, lambda: _message("a", chat_template=SPLITS)),
    "a template of 30 kB": (
        4,
        lambda: _message("a", chat_template="{{ a }}" * 4500 + str(random.random())),
    ),
    "300,000 headers": (4, lambda: HEAD + b"a: b\r\n" * 300_000 + b"\r\n"),
    "an endless header": (4, lambda: HEAD + b"a: " + b"b" * 8_000_000),
    "halves of bodies": (64, lambda: _raw(COMPLETIONS, b'{"prompt": "', length=1 << 20)),
    "a body byte by byte": (4, lambda: CHUNKED + CLOSE + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n"),
    "3,000 requests in one piece": (4, lambda: (HEAD + b"\r\n") * 3000 + HEAD + CLOSE),
    "1,500 connections": (1500, lambda: HEAD),
    "mistakes": (16, lambda: _complete(temperature=-1)),
    "those who leave": (16, lambda: _complete(max_tokens=999, stream=True)),
    "those who do not read": (
        4,
        lambda: _complete(max_tokens=2000, ignore_eos=True, n=10, logprobs=50, stream=True),
    ),
}
"""(Attackers at once, what makes the request that each of them sends again and again)."""
NEVER_READ = frozenset({"those who do not read"})


def attack(address: tuple[str, int], name: str, counts: Any) -> None:
    """Attack until killed, in a process of its own; ``counts`` [STATUSES] is of the answers by
    their status, 0 for none."""

    async def one(content: bytes) -> None:
        while True:
            status = 0
            try:
                reader, writer = await asyncio.open_connection(*address)
                writer.write(content)
                if name in NEVER_READ:
                    await asyncio.sleep(LIMIT)
                # Whoever leaves does so while the answer comes; halves wait to be cut off.
                line = await asyncio.wait_for(reader.readline(), LIMIT)
                status = int(line.split()[1]) if line else 0
                writer.close()
            except (OSError, TimeoutError):
                pass
            counts[status] += 1
            await asyncio.sleep(PAUSE)

    async def all_of_them() -> None:
        number, make = ATTACKS[name]
        content = make()
        await asyncio.gather(*(one(content) for _ in range(number)))

    asyncio.run(all_of_them())
