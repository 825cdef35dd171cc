"""What the core hears and says: a socket to the front, and the end of a pipe that it holds."""

from __future__ import annotations

import os
import sys

import zmq

from surefoot.server import messages
from surefoot.server.messages import Stop


class Link:
    """The core's end of the socket, beside the pipe that tells of the front's end."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        # Nothing is dropped, and a round never waits for the front to read.
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._woken, self._waker = os.pipe()
        self._poller.register(self._woken, zmq.POLLIN)

    def receive(self, wait: bool) -> messages.ToCore | None:
        """The next message; None when there is none, without ``wait`` or after a ``wake``.
        ``Stop`` once the front is gone."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._socket in ready:
            return messages.decode_to_core(self._socket.recv())
        if self._woken in ready:
            os.read(self._woken, 1)
            return None
        return Stop() if ready else None

    def wake(self) -> None:
        """From another thread: end one wait for a message."""
        os.write(self._waker, b"w")

    def send(self, message: messages.ToFront) -> None:
        self._socket.send(messages.encode(message))

    def close(self) -> None:
        """Wait for what was sent to leave, but not for long: nobody may be reading."""
        self._socket.close(linger=2000)
        zmq.Context.instance().term()
