"""A server as a replica has one, with a guard and without Ray, in a process to be killed:

    python guarded_server.py LOOP

``LOOP`` is ``uvloop`` or ``asyncio``. Prints the port and the guard's process id, and answers POSTs
with events: of ``/short`` three and ``[DONE]``, of ``/large`` pieces of 1 MiB as fast as they are
read, of any other path one every 10 ms. With ``?dies=before-N`` or ``?dies=after-N`` the process
kills itself before or after it sends the answer's message ``N``, of which 0 is the head.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from surefoot.ray.guarding import Guard
from surefoot.ray.last_words import LastWords
from surefoot.server.access import App, Receive, Scope, Send

SLOW_SECONDS = 0.01
LARGE = b"x" * (1 << 20)


async def pieces(path: str) -> AsyncIterator[bytes]:
    match path:
        case "/short":
            for number in range(3):
                yield b"data: %d\n\n" % number
            yield b"data: [DONE]\n\n"
        case "/large":
            while True:
                yield LARGE
        case _:
            number = 0
            while True:
                yield b"data: %d\n\n" % number
                number += 1
                await asyncio.sleep(SLOW_SECONDS)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def answer() -> None:
        async for body in pieces(scope["path"]):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    answering = asyncio.ensure_future(answer())
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


def mortal(app: App) -> App:
    """The same, which kills the process where the request says."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        wish, sent = scope["query_string"].decode().removeprefix("dies="), 0

        def die(moment: str) -> None:
            if wish == f"{moment}-{sent}":
                os.kill(os.getpid(), signal.SIGKILL)

        async def dying(message: Any) -> None:
            nonlocal sent
            die("before")
            await send(message)
            die("after")
            sent += 1

        await app(scope, receive, dying)

    return wrapped


async def serve() -> None:
    guard = Guard()
    wrapped = mortal(LastWords(app, guard))
    server = uvicorn.Server(uvicorn.Config(wrapped, port=0, lifespan="off", log_level="error"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(port, guard.pid, flush=True)
    await serving


if __name__ == "__main__":
    logging.basicConfig()
    factory = None
    if sys.argv[1] == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve())
