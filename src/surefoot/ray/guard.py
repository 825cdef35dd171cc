"""The guard of a replica: a small process beside it that ends the replica's streams with an error
event when the replica's process is killed.

It holds a duplicate of the TCP socket of each stream under way, which keeps the connection open
when the replica is gone, and what is to be written there then. The replica tells it over a Unix
socket which streams begin and end; this socket's end is the replica's. How far each stream has
come stands in memory that the two share, as a killed process can send no message.

Run by path, with the standard library alone: ``python -I -S guard.py SOCKET MEMORY``, two inherited
file descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import sys

SLOTS = 4096
"""Streams that can be held at once."""
ENDS = 2
"""Numbers in the shared memory for each slot: how many bytes the kernel has been given (``sent``)
when all of the stream's last but one piece is written, and when all of its last one is. In between
a piece is cut. Both 0: the stream is over."""
MEMORY_BYTES = SLOTS * ENDS * 8
HOLD, DROP = b"+", b"-"
"""Kinds of messages: a stream begins, with its socket; it is over, and its socket to be closed."""
HEAD = struct.Struct("=cI")
"""Of each message: its kind and the slot. Behind ``HOLD``'s are the stream's last words."""
HELLO = struct.Struct("=II")
"""The guard's first message: its process id, and how many streams it can hold."""
MOST_BYTES = 1 << 14
"""Of a message."""
OTHER_FILES = 32
"""Descriptors of the guard that are no streams."""
_ACKED_AT = 120
"""Where Linux's ``struct tcp_info`` has the bytes that the peer has acknowledged."""
_ACKED = struct.Struct("=Q")
_INT = struct.Struct("=i")
_SIOCOUTQ = 0x5411


def sent(connection: socket.socket) -> int:
    """Bytes that the kernel has taken so far to be sent on a TCP connection: acknowledged ones, and
    those still in its queue."""
    acked = _acked(connection)
    while True:
        [queued] = _INT.unpack(fcntl.ioctl(connection.fileno(), _SIOCOUTQ, bytes(_INT.size)))
        before, acked = acked, _acked(connection)
        # What is acknowledged between the two looks would be missing, or count twice.
        if acked == before:
            return acked + queued


def _acked(connection: socket.socket) -> int:
    size = _ACKED_AT + _ACKED.size
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return _ACKED.unpack_from(info, _ACKED_AT)[0]


def main(link: socket.socket, memory: int) -> None:
    """Hold streams until the replica's process ends."""
    ends = memoryview(mmap.mmap(memory, MEMORY_BYTES, prot=mmap.PROT_READ)).cast("Q")
    # A replica that has ended meanwhile is told nothing, and has no streams.
    with contextlib.suppress(BrokenPipeError):
        link.send(HELLO.pack(os.getpid(), _most_streams()))
    held: dict[int, tuple[socket.socket, bytes]] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, 1)
        if not message:
            break
        kind, slot = HEAD.unpack_from(message)
        if kind == DROP:
            held.pop(slot)[0].close()
        else:
            held[slot] = socket.socket(fileno=descriptors[0]), message[HEAD.size :]
    for slot, (connection, last_words) in held.items():
        # Of clients that have left there is nothing to be told.
        with contextlib.suppress(OSError):
            _end(connection, last_words, *ends[ENDS * slot : ENDS * (slot + 1)])


def _end(connection: socket.socket, last_words: bytes, *ends: int) -> None:
    """Write the last words where they follow a whole piece, and close the connection."""
    # Where a piece was cut, as its reader was slow, the end of the connection has to tell that
    # something is missing; the same is true of words that do not fit in the kernel's queue.
    if any(ends) and sent(connection) in ends:
        # The end of the connection goes with them: nobody takes it for one that can be used again.
        connection.send(last_words, socket.MSG_DONTWAIT | socket.MSG_MORE)
    connection.shutdown(socket.SHUT_RDWR)


def _most_streams() -> int:
    """How many streams can be held, with as many open files as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SLOTS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    return max(0, most - OTHER_FILES)


if __name__ == "__main__":
    # Ray kills the children of a process that it kills: this one must not be among them.
    if os.fork():
        os._exit(0)
    # It ends with its replica, and not before: a signal for both is the replica's to act on.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
