"""A server with a guard, to be killed, and clients that look at every byte of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_harness import alive

SERVER = Path(__file__).with_name("guarded_server.py")
SECONDS = 20.0
NUMBERED = [b"data: %d\n\n" % number for number in range(10000)]
"""What its slow streams are made of."""


class Cut(Exception):
    """A connection ended in the middle of an answer."""


class Client:
    """One connection, on which every byte is looked at."""

    def __init__(self, port: int, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(SECONDS)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def post(self, path: str) -> None:
        request = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
        self.socket.sendall(request.encode())

    def head(self) -> None:
        status = self._line()
        assert status == b"HTTP/1.1 200 OK\r\n", status
        while self._line() != b"\r\n":
            pass

    def chunks(self) -> Iterator[bytes]:
        """Those of an answer, up to its end. Raises Cut where that is missing."""
        while True:
            size = int(self._line(), 16)
            chunk = self._file.read(size)
            if len(chunk) < size:
                raise Cut
            assert self._line() == b"\r\n"
            if not size:
                return
            yield chunk

    def answer(self, path: str) -> list[bytes]:
        """All chunks of an answer."""
        self.post(path)
        self.head()
        return list(self.chunks())

    def rest(self) -> bytes:
        """All bytes up to the connection's end."""
        return self._file.read()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def _line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise Cut
        return line


class GuardedServer:
    """``guarded_server.py`` as it runs. ``guard`` is its guard's process id."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.port, self.guard = map(int, process.stdout.readline().split())
        self._idle = self.held()

    def connect(self, receive_bytes: int | None = None) -> Client:
        return Client(self.port, receive_bytes)

    def begin(self, path: str) -> tuple[Client, Iterator[bytes]]:
        """A connection, and the chunks of a stream of which two have come."""
        client = self.connect()
        client.post(path)
        client.head()
        chunks = client.chunks()
        assert [next(chunks), next(chunks)] == NUMBERED[:2]
        return client, chunks

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def held(self) -> int:
        """Streams that the guard holds."""
        return len(os.listdir(f"/proc/{self.guard}/fd")) - getattr(self, "_idle", 0)

    def wait_for_held(self, count: int) -> None:
        wait(lambda: self.held() == count)

    def logged(self) -> str:
        """What it wrote on stderr; it is killed."""
        self.kill()
        assert self.process.stderr is not None
        return self.process.stderr.read()


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def running(loop: str = "uvloop") -> Iterator[GuardedServer]:
    command = [sys.executable, str(SERVER), loop]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            server = GuardedServer(process)
            yield server
        finally:
            process.kill()
        if alive(server.guard):
            # A test that fails may leave it stopped.
            os.kill(server.guard, signal.SIGCONT)
        wait(lambda: not alive(server.guard))
