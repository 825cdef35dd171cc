"""Requests that reach a replica whose engine has died already: another replica answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from surefoot.server.guards import App, Receive, Scope, Send


class Unanswered:
    """ASGI middleware of a process that ends soon after ``dead`` has become true. What comes until
    then gets no byte of an answer, so that HAProxy asks another replica once the process is gone.
    (What the engine had been given is told of its death instead: it may be the cause.)"""

    def __init__(self, app: App, dead: Callable[[], bool]) -> None:
        self.app = app
        self._dead = dead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Never returns for a request that comes too late."""
        if scope["type"] == "http" and self._dead():
            await asyncio.Event().wait()
        await self.app(scope, receive, send)
