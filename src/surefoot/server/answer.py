"""From a generation to an HTTP answer: whole or streamed, and what ends it early."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.responses import Response

from surefoot.server.aside import Aside
from surefoot.server.errors import ApiError, TimedOut, api_error
from surefoot.server.front import Front
from surefoot.server.generation import Choice, Generation

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
GRACE_SECONDS = 5.0
"""How long a client that reads too slowly is given beyond the time limit."""
CLIENT_GONE = 499
AT_ONCE = 4096
"""Tokens and logprobs of all texts of a stream that are written at one go."""
SHORT_ANSWER = 1 << 14
"""Tokens and logprobs of an answer that is written on the spot."""


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(frozen=True)
class Delta:
    """What a choice has to tell since the last time: text, the tokens ``first`` to ``last``
    (exclusive, of its output), and how it ended."""

    text: str
    pieces: list[tuple[str, str | None]]
    first: int
    last: int
    finish_reason: str | None


def take(choice: Choice, whole: bool = False) -> Delta | None:
    """The delta of a choice; None when there is none or its end has been told. It may be less than
    there is, if not the ``whole`` is wanted: ``behind`` tells."""
    if choice.told:
        return None
    stream, first = choice.stream, choice.taken
    params = choice.generation.params
    most = max(1, AT_ONCE // (params.n * (1 + (params.logprobs or 0))))
    last = stream.kept if whole else min(stream.kept, first + most)
    ends = choice.finished and last == stream.kept
    pieces = stream.take(choice.finished, last)
    if not pieces and not ends and last == first:
        return None
    choice.taken, choice.told = last, ends
    reason = choice.request.finish_reason if ends else None
    return Delta(
        text="".join(text for text, _ in pieces),
        pieces=pieces,
        first=first,
        last=last,
        finish_reason=None if reason is None else reason.value,
    )


def behind(choice: Choice) -> bool:
    """Whether there was more than the last ``take`` gave."""
    return choice.taken < choice.stream.kept


class WholeFormat(ABC):
    """The shape of an endpoint's answers to one request."""

    @abstractmethod
    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of the answer once everything is generated."""


class Format(WholeFormat):
    """The same, and how it is streamed."""

    def begin(self, generation: Generation) -> bytes:
        """What a stream begins with, before anything is generated."""
        return b""

    @abstractmethod
    def news(self, generation: Generation) -> bytes:
        """Events of a stream: what has come since the last call; b"" for nothing."""

    @abstractmethod
    def end(self, generation: Generation) -> bytes:
        """What a stream ends with when all of it was told."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with instead, after an error."""


class Watch:
    """Ends a generation when its client leaves or its time is up. Close it in any case: it
    cancels whatever still runs."""

    def __init__(
        self, front: Front, generation: Generation, receive: Receive, seconds: float | None
    ) -> None:
        self._front = front
        self._generation = generation
        self._client = asyncio.ensure_future(_leaving(receive))
        self._client.add_done_callback(self._gone)
        self._timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._late, seconds)

    def close(self) -> None:
        self._client.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._front.cancel(self._generation)

    def _gone(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            self._end(ClientGone())

    def _late(self, seconds: float) -> None:
        self._end(TimedOut(f"the request took longer than {seconds:g} s"))

    def _end(self, error: Exception) -> None:
        self._front.cancel(self._generation)
        self._generation.fail(error)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(
    front: Front,
    generation: Generation,
    form: WholeFormat,
    receive: Receive,
    seconds: float | None,
    aside: Aside,
) -> Response:
    """The answer once everything is generated. Raises what ended the generation, if not its
    client."""
    watch = Watch(front, generation, receive, seconds)
    try:
        while not generation.finished:
            await generation.change()
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        watch.close()

    def written() -> bytes:
        return encode_piecewise(form.whole(generation))

    large = generation.size > SHORT_ANSWER
    body = await aside.run(True, written) if large else written()
    return Response(body, media_type="application/json")


class StreamedAnswer(Response):
    """Server-sent events while tokens arrive. What has come since the last write goes out in one
    piece, up to ``AT_ONCE``, so a slow reader gets fewer, larger ones and holds up nobody else."""

    def __init__(
        self,
        front: Front,
        generation: Generation,
        form: Format,
        seconds: float | None,
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self.front = front
        self.generation = generation
        self.form = form
        self.seconds = seconds

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        watch = Watch(self.front, self.generation, receive, self.seconds)
        limit = None if self.seconds is None else self.seconds + GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                async for body in self._events():
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, TimeoutError):
            # Returning without the last piece makes the server close the connection.
            return
        finally:
            watch.close()

    async def _events(self) -> AsyncIterator[bytes]:
        generation, form = self.generation, self.form
        if begin := form.begin(generation):
            yield begin
        try:
            while not all(choice.told for choice in generation.choices):
                await generation.change()
                if body := form.news(generation):
                    yield body
                if any(map(behind, generation.choices)):
                    # Of a reader that was slow for long. Everybody else goes first.
                    await asyncio.sleep(0)
                    generation.wake()
        except ClientGone:
            raise
        except Exception as error:
            yield form.failure(api_error(error))
            return
        yield form.end(generation)


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(body) + b"\n\n"


_encode = msgspec.json.Encoder().encode


def encode_piecewise(value: Any, depth: int = 5) -> bytes:
    """JSON of an answer, whose parts down to a ``depth`` are encoded one by one: the encoder keeps
    the interpreter's lock until it is done."""
    if depth and isinstance(value, dict):
        parts = {name: msgspec.Raw(encode_piecewise(v, depth - 1)) for name, v in value.items()}
        return _encode(parts)
    if depth and isinstance(value, list):
        return b"[" + b",".join(encode_piecewise(item, depth - 1) for item in value) + b"]"
    return _encode(value)
