"""What clients send that is large, half or wicked. Only the standard library is imported, as every
attacking process reads this anew."""

from __future__ import annotations

import asyncio
import json
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
ATTACKS: dict[str, tuple[int, bytes]] = {
    "prompts of 7.8 MB": (4, json_request(COMPLETIONS, prompt="the cat " * 975_000)),
    "messages of 7.8 MB": (4, _message("x" * 7_800_000)),
    "1 MB to tokenize": (4, json_request(TOKENIZE, prompt="the cat " * 130_000)),
    "a schema of 10,000 members": (2, _schema(OPTIONAL)),
    "a regular expression that counts": (2, _message("a", guided_regex="(a{1,900}){1,900}")),
    "900,000 lists": (4, _raw(COMPLETIONS, NESTED)),
    "5,000 messages": (4, json_request(CHAT, messages=[{"role": "user", "content": "a"}] * 5000)),
    "300,000 headers": (4, HEAD + b"a: b\r\n" * 300_000 + b"\r\n"),
    "an endless header": (4, HEAD + b"a: " + b"b" * 8_000_000),
    "halves of bodies": (64, _raw(COMPLETIONS, b'{"prompt": "', length=1 << 20)),
    "mistakes": (16, json_request(COMPLETIONS, prompt="a", temperature=-1)),
    "those who leave": (16, json_request(COMPLETIONS, prompt="a", max_tokens=999, stream=True)),
}
"""(Attackers at once, what each of them sends again and again)."""


def attack(address: tuple[str, int], name: str, counts: Any) -> None:
    """Attack until killed, in a process of its own; ``counts`` [STATUSES] is of the answers by
    their status, 0 for none."""

    async def one(content: bytes) -> None:
        while True:
            status = 0
            try:
                reader, writer = await asyncio.open_connection(*address)
                writer.write(content)
                # Whoever leaves does so while the answer comes; halves wait to be cut off.
                line = await asyncio.wait_for(reader.readline(), LIMIT)
                status = int(line.split()[1]) if line else 0
                writer.close()
            except (OSError, TimeoutError):
                pass
            counts[status] += 1
            await asyncio.sleep(PAUSE)

    async def all_of_them() -> None:
        number, content = ATTACKS[name]
        await asyncio.gather(*(one(content) for _ in range(number)))

    asyncio.run(all_of_them())
