"""Every HTTP request: its id, its line in the log, and what the metrics count of it."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LogFormat = Literal["text", "json"]
ID_HEADER = b"x-request-id"
GENERATION, REQUEST_ID, ID_GIVEN = "surefoot.generation", "surefoot.id", "surefoot.id_given"
"""In a request's scope: what it generates, its id, and whether the client's header gave that."""
_ID = re.compile(rb"[!-~]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_log = logging.getLogger("surefoot.access")


@dataclass(frozen=True)
class Entry:
    """A line of the log. ``seconds`` until the answer's end; ``status`` 0 for none. ``complete``:
    whether the whole answer was sent. Token counts are None where nothing was generated."""

    time: str
    client: str
    method: str
    path: str
    status: int
    seconds: float
    request_id: str
    complete: bool
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def text(self) -> str:
        tokens = ""
        if self.prompt_tokens is not None:
            tokens = f" {self.prompt_tokens}+{self.completion_tokens} tokens"
        cut = "" if self.complete else " (cut off)"
        line = json.dumps(f"{self.method} {self.path}", ensure_ascii=True)
        head = f"{self.time} {self.client} {line} {self.status}{cut}"
        return f"{head} {self.seconds:.3f} s{tokens} {self.request_id}"

    def json(self) -> str:
        return json.dumps(asdict(self))


class Access:
    """Gives each request an id, the client's own if it sent one as ``x-request-id`` (endpoints may
    find another in the body), and says it in the answer; counts answers; logs them if a format is
    given. Answers HEAD like GET (the connection leaves the body out)."""

    def __init__(
        self, app: App, count: Callable[[str, str, int], None], log: LogFormat | None = None
    ) -> None:
        """``count`` is told of method, path and status."""
        self.app = app
        self._count = count
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == ID_HEADER), b"")
        known = _ID.fullmatch(given) is not None
        own = given.decode() if known else secrets.token_hex(16)
        began, status, complete = time.perf_counter(), 0, False

        async def noting(message: Any) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                header = ID_HEADER, inner[REQUEST_ID].encode()
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)
            if message["type"] == "http.response.body":
                complete = not message.get("more_body", False)

        method = scope["method"]
        inner = {**scope, REQUEST_ID: own, ID_GIVEN: known}
        if method == "HEAD":
            inner["method"] = "GET"
        try:
            await self.app(inner, receive, noting)
        finally:
            route = getattr(inner.get("route"), "path", "other")
            named = method if method in _METHODS else "other"
            self._count(named, route, status)
            if self._log is not None:
                seconds = time.perf_counter() - began
                self._write(scope, inner, status, seconds, complete)

    def _write(
        self,
        scope: Scope,
        inner: Scope,
        status: int,
        seconds: float,
        complete: bool,
    ) -> None:
        generation, client = inner.get(GENERATION), scope.get("client")
        prompt = completion = None
        if generation is not None:
            prompt = sum(map(len, generation.prompts))
            completion = sum(choice.stream.kept for choice in generation.choices)
        entry = Entry(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            client=f"{client[0]}:{client[1]}" if client else "-",
            method=scope["method"],
            # Without the query: nothing here reads one, and it may hold what was mistyped.
            path=scope["path"],
            status=status,
            seconds=round(seconds, 6),
            request_id=inner[REQUEST_ID],
            complete=complete,
            prompt_tokens=prompt,
            completion_tokens=completion,
        )
        _log.info(entry.json() if self._log == "json" else entry.text())


def log_to_stdout() -> None:
    """Lines of the log go to the standard output, as they are."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
