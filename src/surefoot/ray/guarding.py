"""A replica's side of its guard (``surefoot.ray.guard``): starts it, and tells it of streams."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections import deque

from surefoot.ray import guard

START_SECONDS = 30.0
RETRY_SECONDS = 0.05
"""After which a guard that was too slow to take a message is sent it again."""

logger = logging.getLogger(__name__)


class Guard:
    """A guard process, which ends some time after this one. Use it in one event loop. Nothing here
    waits for it but its start: a stream that it cannot be told of is not held."""

    def __init__(self) -> None:
        """Raises OSError or SubprocessError where the process cannot be started."""
        memory = os.memfd_create("surefoot-guard")
        try:
            os.ftruncate(memory, guard.MEMORY_BYTES)
            self._ends = memoryview(mmap.mmap(memory, guard.MEMORY_BYTES)).cast("Q")
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptors = theirs.fileno(), memory
                # In a session of its own, no signal for the replica's process group reaches it.
                subprocess.run(
                    [sys.executable, "-I", "-S", guard.__file__, *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    pass_fds=descriptors,
                    start_new_session=True,
                    check=True,
                    timeout=START_SECONDS,
                )
        finally:
            os.close(memory)
        self._link.settimeout(START_SECONDS)
        self.pid, most = guard.HELLO.unpack(self._link.recv(guard.HELLO.size))
        self._link.setblocking(False)
        self._free = list(range(most))
        self._over: deque[int] = deque()
        """Slots of streams that are over, of which the guard is still to be told."""
        self._retry: asyncio.TimerHandle | None = None
        self._alive = True
        self._told: set[str] = set()

    def hold(self, connection: int, sent: int, last_words: bytes) -> HeldStream | None:
        """Have a stream ended with ``last_words`` when this process is gone: that on the socket
        ``connection``, a file descriptor, to which so many bytes have been ``sent`` (as
        ``guard.sent`` counts). None where the guard cannot hold it."""
        self._release()
        if not self._alive:
            return None
        if not self._free:
            self.warn("as many streams as can be held are under way")
            return None
        slot = self._free.pop()
        stream = HeldStream(self, slot, self._ends[guard.ENDS * slot : guard.ENDS * (slot + 1)])
        stream.begin(sent)
        try:
            head = guard.HEAD.pack(guard.HOLD, slot)
            socket.send_fds(self._link, [head, last_words], [connection])
        except OSError as error:
            stream.forget()
            self._free.append(slot)
            self._failed(error)
            return None
        return stream

    def release(self, slot: int) -> None:
        """The stream in this slot is over; the guard gives its connection free."""
        self._over.append(slot)
        self._release()

    def _release(self) -> None:
        # A slot is used again once the guard has been told: what it is told comes in order.
        while self._over and self._alive:
            try:
                self._link.send(guard.HEAD.pack(guard.DROP, self._over[0]))
            except OSError as error:
                self._failed(error)
                if self._alive and self._retry is None:
                    loop = asyncio.get_running_loop()
                    self._retry = loop.call_later(RETRY_SECONDS, self._release_again)
                return
            self._free.append(self._over.popleft())

    def _release_again(self) -> None:
        self._retry = None
        self._release()

    def _failed(self, error: OSError) -> None:
        """A message could not be sent."""
        if isinstance(error, (BrokenPipeError, ConnectionError)):
            self._alive = False
            self._link.close()
            self.warn("their guard is gone")
        else:
            self.warn(f"their guard could not be told of them at once ({error})")

    def warn(self, problem: str) -> None:
        """Log once that there are streams which would have no good end, and why."""
        if problem not in self._told:
            self._told.add(problem)
            logger.warning("streams would break off if this process were killed: %s", problem)


class HeldStream:
    """A stream that the guard holds."""

    def __init__(self, owner: Guard, slot: int, ends: memoryview) -> None:
        self._owner = owner
        self._slot = slot
        self._ends = ends
        self._is_over = False

    def begin(self, sent: int) -> None:
        """So many bytes have been sent on the connection, and nothing is under way."""
        self._ends[0] = self._ends[1] = sent

    def grow(self, size: int) -> None:
        """A piece of so many bytes is about to be sent."""
        end = self._ends[1]
        self._ends[0] = end
        self._ends[1] = end + size

    def forget(self) -> None:
        """From now on nothing is written into the stream, whatever happens to this process."""
        self._ends[0] = self._ends[1] = 0

    def close(self) -> None:
        """The stream ends; nothing more is written into it. May be called again."""
        if not self._is_over:
            self._is_over = True
            self.forget()
            self._owner.release(self._slot)
