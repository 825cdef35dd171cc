"""The front's side of the core process: starts it, talks to it, notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.server import messages
from surefoot.server.messages import Crashed, Failed, Loading, Logged, Ready, Start, Stop

STOP_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.2
# The core finds packages where the front does, whatever its own start would have put on the path.
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from surefoot.server.core import main
sys.exit(main(sys.argv[2]))"""
ProgressCallback = Callable[[str, int, int], None]


class CoreDied(Exception):
    """The core process is gone; nothing more will be generated."""


class CoreProcess:
    """A core and the socket to it. Use it in one event loop: ``spawn``, ``load``, then ``send``
    and ``receive``, and ``close`` in any case."""

    def __init__(self) -> None:
        # Only this user may enter the folder, and so connect.
        self._folder = Path(tempfile.mkdtemp(prefix="surefoot-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._address = f"ipc://{self._folder / 'core'}"
        self._socket.bind(self._address)
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._loaded = False
        self._arrival: asyncio.Future[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def spawn(self) -> None:
        """Start the process, which imports what it needs while the front goes on."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", BOOT, json.dumps(sys.path), self._address),
            stdin=asyncio.subprocess.PIPE,
        )
        self._ended = asyncio.ensure_future(self._process.wait())
        self._ended.add_done_callback(self._give_up_soon)

    async def load(self, config: EngineConfig, progress: ProgressCallback | None = None) -> Ready:
        """Have the model loaded. Raises SurefootError for a mistake in ``config`` and CoreDied."""
        self.send(Start(config))
        while True:
            message = await self.receive()
            if isinstance(message, Loading) and progress is not None:
                progress(message.label, message.done, message.total)
            elif isinstance(message, Logged):
                logging.getLogger(__name__).log(message.level, message.text)
            elif isinstance(message, Failed):
                raise SurefootError(message.option, message.problem, message.fix)
            elif isinstance(message, Ready):
                self._loaded = True
                return message

    def send(self, message: messages.ToCore) -> None:
        """Queue a message; never blocks, as there is no high-water mark."""
        self._socket.send(messages.encode(message))

    async def receive(self) -> messages.ToFront:
        """The next message. Raises CoreDied when there will be none."""
        arrival = asyncio.ensure_future(self._socket.recv())
        if not arrival.done():
            self._arrival = arrival
            if self._ended is None or self._ended.done():
                self._give_up_soon()
        try:
            message = messages.decode_to_front(await arrival)
        except asyncio.CancelledError:
            if self._ended is None or not self._ended.done():
                raise
            status = self._ended.result()
            raise CoreDied(f"it ended with status {status}") from None
        if isinstance(message, Crashed):
            raise CoreDied(message.error)
        return message

    def _give_up_soon(self, *_: object) -> None:
        """The process ended: what it sent before may still be on its way, but nothing after."""

        def give_up(arrival: asyncio.Future[bytes] | None = self._arrival) -> None:
            if arrival is not None and arrival is self._arrival and not arrival.done():
                arrival.cancel()

        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, give_up)

    async def close(self) -> None:
        """Stop the process, by force if it does not go, and remove the socket."""
        if self._process is not None and self._ended is not None:
            if self._loaded:
                self.send(Stop())
                await asyncio.wait((self._ended,), timeout=STOP_SECONDS)
            if not self._ended.done():
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._ended
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
