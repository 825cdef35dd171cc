"""Load on a server: clients that stream, leave, make mistakes and mix parameters, each answer held
to the offline one. Also a program, for longer runs and for the cost of serving:

    python tests/cpu/server_load.py smollm2-135m --clients 64 --seconds 1800
    python tests/cpu/server_load.py FOLDER --throughput 32
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from server_harness import LOOP, Server, offline, params_of, running_server, sse
from surefoot import LLM

PROMPTS = [LOOP, "a dog ate the hat", "step by step, 1234 and on", "🙂 é surefoot", "the the the"]
MISTAKES: list[dict[str, Any]] = [
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "unknown": 1},
    {"prompt": []},
    {"prompt": "a", "max_tokens": 10**6},
]


Answers = list[tuple[str, list[int], str | None]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}, "town": {"enum": ["Bern", "Basel"]}},
    "required": ["sunny", "town"],
    "additionalProperties": False,
}
STRUCTURES: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[0-9]{1,20}( and [a-z]{1,9})*"},
    {"choice": ["the cat sat on the mat", "the cat", "a dog"]},
]
# Short: where a character is a token, a prompt with it still fits.
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "boolean"}}}
FUNCTION = {"name": "f", "parameters": {**ARGUMENTS, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@dataclass
class Case:
    """A request, and what must come of it: per choice (text, tokens, reason)."""

    body: dict[str, Any]
    expected: Answers
    path: str = COMPLETIONS


def make_cases(llm: LLM, count: int, max_tokens: int) -> list[Case]:
    """Requests of mixed kinds with their offline answers."""
    draw = random.Random(0)
    bodies = []
    for seed in range(count):
        body: dict[str, Any] = {
            "prompt": draw.choice(PROMPTS) + " and on" * draw.randrange(6),
            "max_tokens": draw.randint(1, max_tokens),
            "temperature": draw.choice([0, 0.7, 1.0, 1.5]),
            "seed": seed,
            "ignore_eos": draw.random() < 0.7,
        }
        extras: list[dict[str, Any]] = [
            {},
            {"n": 2},
            {"top_p": 0.8, "top_k": 20},
            {"repetition_penalty": 1.3},
            {"stop": ["e", "1 "]},
            {"min_tokens": 1, "presence_penalty": 1.0},
            {"logprobs": 2},
            {"skip_special_tokens": False},
            {"structured_outputs": draw.choice(STRUCTURES), "ignore_eos": False},
        ]
        bodies.append({**body, **draw.choice(extras)})
    outputs = llm.generate([body["prompt"] for body in bodies], [params_of(b) for b in bodies])
    return [
        Case(body, [(c.text, c.token_ids, c.finish_reason) for c in output.outputs])
        for body, output in zip(bodies, outputs, strict=True)
    ]


async def make_tool_cases(server: Server, count: int) -> list[Case]:
    """Chats that must call a tool; none where the model's template takes no tools. What must come
    of them is what comes while nobody else is there, without speculation."""
    cases = []
    for seed in range(count):
        messages = [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}]
        body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "seed": seed}
        body |= {"max_tokens": 96, "parallel_tool_calls": bool(seed % 2), "return_token_ids": True}
        answer = await send(server, {**body, "speculation": "off"}, path=CHAT)
        assert answer is not None
        status, text = answer
        if status == 400 and "tools" in text:
            return []
        assert status == 200, text
        cases.append(Case(body, read_answer(text, "whole", 1), CHAT))
    return cases


@dataclass
class Tally:
    """What happened. ``wrong`` holds one line for each answer that was not the offline one."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0

    @property
    def asked(self) -> int:
        """Requests that were made, refused ones left out."""
        return self.counts.total() - 2 * self.counts["refused"]


async def send(
    server: Server,
    body: dict[str, Any],
    leave_after: int | None = None,
    path: str = COMPLETIONS,
) -> tuple[int, str] | None:
    """(status, body) of one request; None when the client left after so many bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        content = json.dumps(body).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (path.encode(), len(content)) + content
        )
        if leave_after is not None:
            await reader.read(leave_after)
            return None
        head = await reader.readuntil(b"\r\n\r\n")
        data = await reader.read(-1)
    finally:
        writer.close()
    if b"transfer-encoding: chunked" in head.lower():
        data = unchunk(data)
    return int(head.split()[1]), data.decode()


def unchunk(data: bytes) -> bytes:
    """The content of a body in HTTP's chunked encoding, which must be complete."""
    parts, at = [], 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            assert data[end:] == b"\r\n\r\n"
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


async def client(
    server: Server, cases: list[Case], tally: Tally, seed: int, done: Callable[[], float]
) -> None:
    """One user who asks again and again, until all is ``done`` (1.0)."""
    draw = random.Random(seed)
    while done() < 1.0:
        kind = draw.choices(["stream", "whole", "leave", "mistake"], [5, 3, 2, 1])[0]
        tally.counts[kind] += 1
        if kind == "mistake":
            answer = await send(server, draw.choice(MISTAKES))
            assert answer is not None
            if answer[0] not in (400, 429):
                tally.wrong.append(f"a mistake got {answer}")
            continue
        case = draw.choice(cases)
        body = {**case.body, "return_token_ids": True, "stream": kind != "whole"}
        body["speculation"] = draw.choice(["auto", "auto", "off"])
        leave = draw.choice([1, 200, 2000]) if kind == "leave" else None
        answer = await send(server, body, leave, case.path)
        if answer is None:
            continue
        status, text = answer
        if status == 429:
            tally.counts["refused"] += 1
            await asyncio.sleep(0.05)
            continue
        got = read_answer(text, kind, len(case.expected)) if status == 200 else text
        if got != case.expected:
            tally.wrong.append(f"{kind} {case.body}: {got} instead of {case.expected}")
        tally.answers += 1
        tally.tokens += sum(len(tokens) for _, tokens, _ in case.expected)


def read_answer(text: str, kind: str, n: int) -> Answers:
    """Per choice (text, tokens, reason). A chat's calls come behind all of its text."""
    texts, calls, tokens, reasons = [""] * n, [""] * n, [[] for _ in range(n)], [None] * n
    events = [json.loads(text)] if kind == "whole" else sse(text)
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            message = choice.get("message") or choice.get("delta") or {}
            texts[index] += choice.get("text") or message.get("content") or ""
            for call in message.get("tool_calls", ()):
                function = call["function"]
                calls[index] += function.get("name", "") + function.get("arguments", "")
            tokens[index] += choice.get("token_ids", ())
            reasons[index] = choice["finish_reason"]
    said = [text + called for text, called in zip(texts, calls, strict=True)]
    return list(zip(said, tokens, reasons, strict=True))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds, less files that it maps."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def so_long(seconds: float) -> Callable[[], float]:
    """The part of so many seconds that has passed."""
    started = time.monotonic()
    return lambda: (time.monotonic() - started) / seconds


def so_many(requests: int, tally: Tally) -> Callable[[], float]:
    """The part of so many requests that was made."""
    return lambda: tally.asked / requests


@dataclass
class Course:
    """What changed while a storm went on."""

    memory: dict[str, tuple[int, int]]
    """Of each process, the least bytes in the second third and in the last: what it does at a
    moment takes some more, as much as a twentieth in a small model's core."""
    drafts: tuple[float, float]
    """Drafts verified per thousand tokens, in the first sixth and in the last: the machine's other
    work changes what a minute brings."""

    @property
    def flat(self) -> bool:
        return all(after <= 1.05 * before for before, after in self.memory.values())

    @property
    def drafting(self) -> bool:
        """Whether it goes on as it began."""
        first, last = self.drafts
        return last >= 0.8 * first > 0


async def storm(
    server: Server, cases: list[Case], clients: int, tally: Tally, done: Callable[[], float]
) -> Course:
    """Run so many clients until all is ``done``."""

    async def verified_at(part: float) -> tuple[float, float]:
        while done() < part:
            await asyncio.sleep(0.05)
        names = "surefoot_generation_tokens_total", "surefoot_verified_tokens_total"
        tokens, verified = [await asyncio.to_thread(server.metric, name) for name in names]
        return tokens, verified

    parts = [asyncio.ensure_future(verified_at(part)) for part in (0, 1 / 6, 5 / 6, 1)]
    tasks = [
        asyncio.ensure_future(client(server, cases, tally, seed, done)) for seed in range(clients)
    ]
    pids = {"front": server.process.pid, "core": server.core}
    held: list[tuple[float, dict[str, int]]] = []
    while not all(task.done() for task in tasks):
        held.append((done(), {name: resident(pid) for name, pid in pids.items()}))
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    middle = [found for part, found in held if 1 / 3 <= part < 2 / 3]
    end = [found for part, found in held if part >= 2 / 3]
    memory = {
        name: (min(found[name] for found in middle), min(found[name] for found in end))
        for name in pids
    }
    points = await asyncio.gather(*parts)
    first, last = (
        1000 * (after - before) / max(1.0, end - begun)
        for (begun, before), (end, after) in (points[:2], points[2:])
    )
    return Course(memory, (first, last))


@dataclass
class Speeds:
    """Of the engine in this process and of a server: tokens per second, and CPU seconds per token,
    which do not depend on the machine's other work. Medians; ``ratios`` has one for each pair."""

    inside: float
    served: float
    ratios: list[float]
    inside_cpu: float
    core_cpu: float
    front_cpu: float

    def __str__(self) -> str:
        low, *_, high = sorted(self.ratios)
        return (
            f"in process {self.inside:.0f} tokens/s, over HTTP {self.served:.0f}; ratio "
            f"{median(self.ratios):.2f} ({low:.2f} to {high:.2f}); CPU µs a token: in process "
            f"{self.inside_cpu * 1e6:.0f}, core {self.core_cpu * 1e6:.0f}, "
            f"front {self.front_cpu * 1e6:.0f}"
        )


def throughput(model: str, streams: int, tokens: int, repeats: int, **options: Any) -> Speeds:
    """Generate as many texts at once, in this process and streamed over HTTP, by turns."""
    prompts = [[5 + index, 6, 7, 8] for index in range(streams)]
    common = {"max_tokens": tokens, "temperature": 1, "ignore_eos": True}
    bodies = [{**common, "prompt": prompt, "seed": i} for i, prompt in enumerate(prompts)]
    options = {"max_num_seqs": streams, **options}
    total = streams * tokens
    llm = offline(model, **options)

    def inside() -> None:
        llm.generate(prompts, [params_of(body) for body in bodies])

    async def ask(server: Server) -> None:
        answers = await asyncio.gather(*(send(server, {**b, "stream": True}) for b in bodies))
        for answer in answers:
            assert answer is not None and answer[0] == 200
            assert sse(answer[1])[-1]["choices"][0]["finish_reason"] == "length"

    with running_server(model, **options) as server:
        pids = [server.core, server.process.pid]
        # The first turn warms both up.
        turns = [
            (_timed(inside, [os.getpid()]), _timed(lambda: asyncio.run(ask(server)), pids))
            for _ in range(repeats + 1)
        ][1:]
    own, served = (
        [median(column) for column in zip(*rows, strict=True)] for rows in zip(*turns, strict=True)
    )
    return Speeds(
        inside=total / own[0],
        served=total / served[0],
        ratios=[one[0] / other[0] for one, other in turns],
        inside_cpu=own[1] / total,
        core_cpu=served[1] / total,
        front_cpu=served[2] / total,
    )


def _timed(work: Callable[[], None], pids: list[int]) -> list[float]:
    """[seconds, CPU seconds of each process]."""
    before = [_cpu_seconds(pid) for pid in pids]
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    used = [_cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
    return [seconds, *used]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run what the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--kv-cache-memory", default="12MiB")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--throughput", type=int, metavar="STREAMS")
    given = parser.parse_args()
    options = {"backend": given.backend, "dtype": given.dtype, "draft_policy": "auto"}
    if given.throughput:
        print(throughput(given.model, given.throughput, 300, 5, **options))
        return 0
    options |= {"max_num_seqs": given.max_num_seqs, "threads": 2, "max_model_len": 512}
    cases = make_cases(offline(given.model, **options), 100, given.max_tokens)
    gc.collect()
    queue = ("--max-queue", str(given.max_queue))
    options["kv_cache_memory"] = given.kv_cache_memory
    with running_server(given.model, *queue, **options) as server:
        return report(server, cases, given.clients, given.seconds)


def report(server: Server, cases: list[Case], clients: int, seconds: float) -> int:
    """Run a storm and print what came of it; 0 if nothing was wrong or left behind."""
    print(*server.lines[:-1], sep="\n")
    tally = Tally()
    tools = asyncio.run(make_tool_cases(server, 12))
    print(f"{len(tools)} chats with tools" if tools else "no tools: the template takes none")
    course = asyncio.run(storm(server, [*cases, *tools], clients, tally, so_long(seconds)))
    server.wait_idle()
    print(f"{clients} clients, {seconds:g} s: {dict(tally.counts)}")
    print(f"{tally.answers} answers of {tally.tokens} tokens compared, {len(tally.wrong)} wrong")
    for name in ("preemptions_total", "verified_tokens_total", "accepted_tokens_total"):
        print(f"{name}: {server.metric(f'surefoot_{name}'):.0f}")
    first, last = course.drafts
    print(
        f"drafts verified per 1,000 tokens: {first:.1f} in the first sixth, {last:.1f} in the last"
    )
    for name, (before, after) in course.memory.items():
        growth = after / before - 1
        print(f"{name}: {before >> 20} MiB in the second third, {after >> 20} in the last", end=" ")
        print(f"({growth:+.1%})")
    print("slots and blocks in use at the end: 0")
    print(*tally.wrong[:5], sep="\n")
    status = server.stop()
    print(f"the server's exit status: {status}")
    return 0 if course.flat and course.drafting and not tally.wrong and not status else 1


if __name__ == "__main__":
    sys.exit(main())
