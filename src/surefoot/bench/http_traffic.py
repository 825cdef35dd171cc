"""Traffic on a server that speaks OpenAI's API, ours or another, over HTTP.

Requests are streamed; every event that has a choice is a chunk (see ``latency``), as for ``vllm
bench serve``. How many tokens came, the server says at the end of each stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.bench.http_client import Client
from surefoot.bench.latency import Timeline, summarise
from surefoot.bench.prompts import BenchPrompt
from surefoot.bench.sweep import PLAIN, Mode, turns
from surefoot.bench.traffic import DraftCounts, Run, TrafficSettings
from surefoot.bench.workload import Call
from surefoot.errors import SurefootError

DEFAULT: Mode = "default"
"""The server decides about speculation as it does by itself."""
KEY = "OPENAI_API_KEY"
MOST_REASONS = 5


@dataclass
class Events:
    """Reads a stream of server-sent events, piece by piece, into a timeline."""

    line: Timeline
    clock: Callable[[], float]
    started: float
    usage: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    """What was not understood yet; of an answer that is no stream, all of it."""

    def feed(self, data: bytes) -> None:
        *events, self.body = (self.body + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._read(event)

    def _read(self, event: bytes) -> None:
        text = event.strip()
        if not text.startswith(b"data:") or (text := text[5:].strip()) == b"[DONE]":
            return
        content = json.loads(text)
        if content.get("choices"):
            self.line.chunks.append(self.clock() - self.started)
        elif content.get("error"):
            self.line.error = reason(text)
        self.usage = content.get("usage") or self.usage

    def finish(self, status: int) -> None:
        """Enter what the answer said about itself, or why there is none."""
        line = self.line
        if status != 200:
            line.error = f"status {status}: {reason(self.body)}"
        elif not line.chunks and line.error is None:
            line.error = "a stream without tokens"
        elif line.error is None and "completion_tokens" not in self.usage:
            line.error = "the stream says nothing about usage"
        line.tokens = int(self.usage.get("completion_tokens") or 0)
        line.prompt_tokens = int(self.usage.get("prompt_tokens") or 0)


def reason(body: bytes) -> str:
    """The message of an error, or the beginning of what else there is."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:200]


class Server:
    """A server of OpenAI's API. ``url`` with or without ``/v1``; ``model`` None takes the first
    that it lists. The environment's ``OPENAI_API_KEY`` goes along."""

    def __init__(self, url: str, model: str | None = None) -> None:
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.client = Client(base, os.environ.get(KEY))
        self.model = model

    async def find_model(self) -> str:
        """The name for requests. Raises SurefootError where there is no such server."""
        pieces: list[bytes] = []
        client = self.client
        try:
            status = await client.send(client.encode("GET", "/models"), pieces.append)
        except OSError as error:
            raise SurefootError("url", f"{client.url} cannot be reached: {error}") from None
        body = b"".join(pieces)
        if status != 200:
            raise SurefootError("url", f"{client.url}/models answers {status}: {reason(body)}")
        try:
            names = [str(item["id"]) for item in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if not names:
            raise SurefootError("url", f"{client.url} lists no models", "name an OpenAI API")
        return self.model or names[0]

    def encode(self, call: Call, model: str, mode: Mode, temperature: float) -> bytes:
        """A call as a request for a stream."""
        prompt = call.prompt
        path, subject = "/completions", {"prompt": prompt}
        if isinstance(prompt, BenchPrompt):
            subject = {"prompt": prompt.text}
            if prompt.text is None:
                path, subject = "/chat/completions", {"messages": prompt.messages}
        body = {
            "model": model,
            **subject,
            "max_tokens": call.output_tokens,
            "temperature": temperature,
            "seed": call.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if mode != DEFAULT:
            body["speculation"] = "off" if mode == PLAIN else mode
        return self.client.encode("POST", path, json.dumps(body).encode())

    async def run(self, calls: Sequence[Call], settings: TrafficSettings, mode: Mode) -> Run:
        """Send ``calls`` and read all answers."""
        model = self.model = await self.find_model()
        # Written before the clock runs.
        requests = [self.encode(call, model, mode, settings.temperature) for call in calls]
        places = asyncio.Semaphore(settings.at_once or len(calls))
        started = time.perf_counter()
        tasks: list[asyncio.Task[Events]] = []
        for call, request in zip(calls, requests, strict=True):
            if (early := started + call.due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.create_task(self._send(request, places, started)))
        answers = await asyncio.gather(*tasks)
        lines = [answer.line for answer in answers]
        reasons = dict.fromkeys(line.error for line in lines if line.error is not None)
        return Run(
            traffic=summarise(lines),
            speculation=_draft_counts([answer.usage.get("speculation") for answer in answers]),
            errors=tuple(reasons)[:MOST_REASONS],
        )

    async def _send(self, request: bytes, places: asyncio.Semaphore, started: float) -> Events:
        async with places:
            answer = Events(Timeline(), time.perf_counter, started)
            answer.line.sent = time.perf_counter() - started
            try:
                answer.finish(await self.client.send(request, answer.feed))
            except (OSError, ValueError) as error:
                answer.line.error = f"{type(error).__name__}: {error}"
            return answer


def _draft_counts(reports: Sequence[dict[str, Any] | None]) -> DraftCounts | None:
    """What Surefoot's ``usage.speculation`` says, over all answers."""
    known = [report for report in reports if report]
    if not known:
        return None
    names = ("rounds", "verified", "accepted")
    return DraftCounts(*(sum(report.get(name, 0) for report in known) for name in names))


def measure(
    server: Server,
    draw: Callable[[int], Sequence[Call]],
    settings: TrafficSettings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Mode, list[Run]]:
    """The runs that count, by mode. ``draw`` makes a pass's calls by its number: with prompts of
    its own a pass finds nothing in the server's prefix cache. ``on_progress``: (passes done, passes
    in all)."""
    results: dict[Mode, list[Run]] = {mode: [] for mode in settings.modes}
    passes = list(turns(settings.modes, settings.repeats, settings.warmup))

    async def run_all() -> None:
        for number, (mode, counts) in enumerate(passes):
            run = await server.run(draw(number), settings, mode)
            if counts:
                results[mode].append(run)
            on_progress(number + 1, len(passes))
        server.client.close()

    _run(run_all())
    return results


def _run(work: Coroutine[Any, Any, None]) -> None:
    """On the quickest event loop there is."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)
