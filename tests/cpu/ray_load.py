"""Loads on replicas, for measurements and longer runs than the tests':

    python tests/cpu/ray_load.py kills --replicas 3 --kills 100
    python tests/cpu/ray_load.py prefixes --replicas 1 --conversations 40
    python tests/cpu/ray_load.py throughput --replicas 2
    python tests/cpu/ray_load.py first-token --replicas 2

Each prints a line of JSON. ``throughput`` has a core that sleeps instead of computing: what is
measured is what stands in front of the engines. ``--empty`` with ``first-token`` measures a Serve
application that answers without doing anything, behind ``--proxy haproxy`` or Ray's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ray_harness import actors, running_replicas, wait_for_replicas
from server_harness import Server, emoji_model, offline, params_of, running_server
from surefoot.ray import local
from surefoot.server.listening import bind

WORDS = ["the cat", "sat on", "the mat", "and the dog", "ate", "the hat", "step by step", "goes"]


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """(text, how it ended: done, error event, status, broken, silent or unanswered) of a
    completion. An error event is the engine's, or of the guard of a replica that was killed."""
    text, end = "", "unanswered"
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return "", f"status {answer.status_code}"
            end = "silent"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    end = "done"
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        end = "error event"
                    else:
                        text += "".join(choice["text"] for choice in event["choices"])
    except httpx.TransportError:
        end = "broken" if end != "unanswered" else end
    return text, end


def kills(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Clients stream known texts while replicas are killed, actors and cores in turn."""
    chance = random.Random(1)
    cases = []
    llm = offline(model)
    for seed in range(24):
        prompt = " ".join(chance.choices(WORDS, k=20))
        body = {"prompt": prompt, "seed": seed, "max_tokens": 60, "ignore_eos": True}
        body["temperature"] = 0.8
        [output] = llm.generate(prompt, params_of(body))
        cases.append(({**body, "stream": True}, output.outputs[0].text))
    ends: Counter[str] = Counter()
    wrong: list[tuple[str, str, str]] = []
    longest = 0.0

    async def clients(server: Server) -> None:
        nonlocal longest
        stop = asyncio.Event()

        async def ask() -> None:
            nonlocal longest
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                while not stop.is_set():
                    body, expected = chance.choice(cases)
                    began = time.perf_counter()
                    text, end = await stream(client, body)
                    longest = max(longest, time.perf_counter() - began)
                    ends[end] += 1
                    if (end == "done" and text != expected) or not expected.startswith(text):
                        wrong.append((end, expected, text))
                    if end.startswith("status"):
                        await asyncio.sleep(0.2)

        asking = [asyncio.create_task(ask()) for _ in range(options.clients)]
        for number in range(options.kills):
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            while len(found := await asyncio.to_thread(actors, server)) < 2:
                await asyncio.sleep(0.2)
            actor, core = chance.choice(list(found.items()))
            os.kill(actor if number % 2 else core, signal.SIGKILL)
            if number % 10 == 9:
                print(number + 1, dict(ends), len(wrong), file=sys.stderr, flush=True)
        stop.set()
        await asyncio.gather(*asking)

    with running_replicas(model, options.replicas) as server:
        asyncio.run(clients(server))
    assert not wrong, wrong[:3]
    return {"kills": options.kills, "ends": ends, "wrong": len(wrong), "longest_s": longest}


def prefixes(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The share of prompt tokens found in prefix caches, of conversations of four turns."""
    chance = random.Random(2)
    system = " ".join(chance.choices(WORDS, k=40))

    async def converse(client: httpx.AsyncClient, number: int) -> None:
        own = random.Random(number)
        messages = [{"role": "system", "content": system}]
        for _ in range(4):
            question = " ".join(own.choices(WORDS, k=60))
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": 16, "seed": number}
            answer = await client.post("/v1/chat/completions", json=body)
            text = answer.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text or "-"})
            await asyncio.sleep(own.uniform(0, 1))

    async def run(url: str) -> None:
        limits = asyncio.Semaphore(options.clients)
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:

            async def limited(number: int) -> None:
                async with limits:
                    await converse(client, number)

            await asyncio.gather(*map(limited, range(options.conversations)))

    with serving(model, options.replicas) as server:
        began = time.perf_counter()
        asyncio.run(run(server.url))
        seconds = time.perf_counter() - began
        time.sleep(6)  # Replicas tell each other their numbers every 5 s.
        hits, queries = (
            server.metric(f"surefoot_prefix_{name}_tokens_total") for name in ("hits", "queries")
        )
    return {"replicas": options.replicas, "hit_rate": hits / queries, "seconds": seconds}


@contextmanager
def applied(name: str, replicas: int, *arguments: Any) -> Iterator[str]:
    """The address of an application of ``ray_sleeping``'s."""
    here = str(Path(__file__).parent)
    # Ray's workers import it, too.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    with local._ray(replicas, True):
        import ray_sleeping

        local._run(getattr(ray_sleeping, name)(*arguments, replicas), "127.0.0.1", port)
        yield f"http://127.0.0.1:{port}"
        local._drain()


def serving(model: Path, replicas: int) -> Any:
    """One server without Ray, or replicas."""
    return running_replicas(model, replicas) if replicas > 1 else running_server(model)


def throughput(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of texts of 32 tokens, while 24 clients stream from each replica."""

    async def run(url: str) -> float:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:

            async def ask(number: int) -> int:
                body = {"prompt": f"{number} " * 50, "max_tokens": 32, "stream": True}
                _, end = await stream(client, body)
                assert end == "done", end
                return 32

            async def client_of(number: int) -> int:
                return sum([await ask(number * 100 + i) for i in range(4)])

            await ask(0)
            began = time.perf_counter()
            count = 24 * options.replicas
            tokens = await asyncio.gather(*map(client_of, range(count)))
            return sum(tokens) / (time.perf_counter() - began)

    with applied("sleeping_application", options.replicas, model) as url:
        rates = [asyncio.run(run(url)) for _ in range(options.repeats)]
    return {"replicas": options.replicas, "tokens_per_s": statistics.median(rates), "all": rates}


def first_token(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to a stream's first bytes, one request at a time."""
    body = {"prompt": "the cat sat on the mat " * 5, "max_tokens": 4, "seed": 1, "stream": True}

    def measure(url: str) -> dict[str, Any]:
        times = []
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(options.requests + 20):
                began = time.perf_counter()
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(pieces := answer.iter_raw())
                    times.append(1000 * (time.perf_counter() - began))
                    for _ in pieces:
                        pass
        times = sorted(times[20:])
        names = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
        return {name: round(times[int(share * len(times))], 2) for name, share in names.items()}

    if options.empty:
        if options.proxy == "ray":
            # As a Serve application is served by default.
            os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
        with applied("empty_application", options.replicas) as url:
            return {"empty": options.proxy, **measure(url)}
    with serving(model, options.replicas) as server:
        if options.replicas > 1:
            wait_for_replicas(server, options.replicas)
        return {"replicas": options.replicas, **measure(server.url)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kills", "prefixes", "throughput", "first-token"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--proxy", choices=["ray", "haproxy"], default="ray")
    options = parser.parse_args()
    work = {"kills": kills, "prefixes": prefixes, "throughput": throughput}.get(options.what)
    with tempfile.TemporaryDirectory() as folder:
        model = emoji_model(Path(folder), max_positions=4096)
        print(json.dumps((work or first_token)(model, options)), flush=True)


if __name__ == "__main__":
    main()
