"""A steady stream beside clients that send what is large, half or wicked. A program:

    python tests/cpu/server_attacks.py smollm2-135m --tokens 600 > attacks.json

prints JSON: for every attack the stream's gaps and the time of ``/health`` beside it, and what the
attackers were answered. It ends with status 1 if a text was another than the quiet one's, or a gap
longer than the longest quiet one and 50 ms and two rounds. That takes a quiet machine with a core
for each of the server's two processes and one for the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from attacks import ATTACKS, COMPLETIONS, HEAD, STATUSES, attack, json_request
from server_harness import LOOP, Server, running_server

TRUST = "--trust-request-chat-template"
ALLOWED = 0.05
"""Seconds that anybody's request may delay another's token, beside two rounds."""


@contextmanager
def attackers(server: Server, name: str | None) -> Iterator[Counter[int]]:
    """While they are at work; the counts of what they were answered are complete at the end."""
    found: Counter[int] = Counter()
    if name is None:
        yield found
        return
    spawn = multiprocessing.get_context("spawn")
    counts = spawn.RawArray("q", STATUSES)
    process = spawn.Process(target=attack, args=(_address(server), name, counts), daemon=True)
    process.start()
    try:
        # They are at it once the first was answered, or hangs.
        end = time.monotonic() + 5
        while not any(counts) and process.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        yield found
    finally:
        process.kill()
        process.join()
        found.update({status: count for status, count in enumerate(counts) if count})


def _address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


async def stream(server: Server, tokens: int) -> tuple[str, list[float]]:
    """(Text, seconds between its chunks) of one streamed completion."""
    body = {"prompt": LOOP, "max_tokens": tokens, "ignore_eos": True, "seed": 1, "stream": True}
    reader, writer = await asyncio.open_connection(*_address(server), limit=1 << 20)
    writer.write(json_request(COMPLETIONS, **body))
    text, gaps, before = "", [], None
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if before is not None:
            gaps.append(now - before)
        before = now
        [choice] = json.loads(line.removeprefix(b"data: "))["choices"]
        text += choice["text"]
    writer.close()
    return text, gaps


async def ask_health(server: Server, seconds: list[float]) -> None:
    """Again and again, until cancelled."""
    while True:
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection(*_address(server))
        writer.write(HEAD + b"Connection: close\r\n\r\n")
        assert b" 200 " in await reader.readline()
        seconds.append(time.perf_counter() - begun)
        writer.close()
        await asyncio.sleep(0.05)


async def measure(server: Server, tokens: int) -> tuple[str, dict[str, float]]:
    """A stream's text, and its gaps and those of ``/health`` beside it, in milliseconds."""
    health: list[float] = []
    asking = asyncio.ensure_future(ask_health(server, health))
    text, gaps = await stream(server, tokens)
    asking.cancel()
    named = {"median": median(gaps), "longest": max(gaps), "health": max(health, default=0.0)}
    return text, {name: round(1000 * value, 1) for name, value in named.items()}


def run(server: Server, tokens: int, names: list[str]) -> dict[str, Any]:
    """The report: the quiet stream's figures, and every attack's."""
    # The first stream warms everything up.
    asyncio.run(stream(server, tokens))
    expected, quiet = asyncio.run(measure(server, tokens))
    bound = quiet["longest"] + 1000 * ALLOWED + 2 * quiet["median"]
    report: dict[str, Any] = {"tokens": tokens, "cores": os.cpu_count(), "load": os.getloadavg()}
    report |= {"unit": "ms", "quiet": quiet, "bound": round(bound, 1), "attacks": {}}
    for name in names:
        with attackers(server, name) as statuses:
            text, found = asyncio.run(measure(server, tokens))
        server.wait_idle()
        report["attacks"][name] = {
            **found,
            "text_unchanged": text == expected,
            "within_bound": found["longest"] <= bound,
            "answers": statuses,
        }
    kept = ("text_unchanged", "within_bound")
    report["passed"] = all(a[what] for a in report["attacks"].values() for what in kept)
    return report


def main() -> int:
    """Run what the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=600, help="length of the steady stream")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="default: all")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    options = {"backend": given.backend, "dtype": given.dtype, "draft_policy": "auto"}
    with running_server(given.model, TRUST, **options) as server:
        report = run(server, given.tokens, given.attack or list(ATTACKS))
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
