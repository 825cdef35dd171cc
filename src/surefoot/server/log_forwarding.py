"""The core's log during its start, sent to the front: printed here it would tear the progress bars
of the front's terminal apart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from surefoot.server.messages import Logged


@contextmanager
def forwarded_log(send: Callable[[Logged], None]) -> Iterator[None]:
    """What Surefoot logs in this thread during the block, from INFO on, is sent. Other threads'
    lines go to stderr, as a socket belongs to one thread."""
    logger, handler = logging.getLogger("surefoot"), _Forward(send)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


class _Forward(logging.Handler):
    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__(logging.INFO)
        self._send = send
        self._thread = threading.current_thread()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is self._thread:
            self._send(Logged(record.levelno, self.format(record)))
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
