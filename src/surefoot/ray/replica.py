"""A replica under Ray Serve: an engine in a process of its own, and the HTTP surface before it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import Any

from fastapi import FastAPI
from ray import serve

from surefoot.config import EngineConfig
from surefoot.ray.guarding import Guard
from surefoot.ray.last_words import LastWords
from surefoot.ray.routing import KV_TOKENS, MOST_RUNNING
from surefoot.ray.scrape import SharedExposition
from surefoot.ray.unanswered import Unanswered
from surefoot.server.access import log_to_stdout
from surefoot.server.core_process import CoreDied, CoreProcess
from surefoot.server.serve import ServerConfig, load_service, make_app

GOODBYE_SECONDS = 0.5
"""At most, for the open streams to be told that the engine has died, before the replica ends."""

logger = logging.getLogger(__name__)


class Replica:
    """What Ray Serve makes copies of. Ends with its engine, so that Ray starts another one; the
    engine ends with it, and its guard, once that has ended what was left of its streams."""

    async def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        _log_to_stderr()
        self._server = server
        self._core = self.new_core()
        try:
            await self._core.spawn()
            self._service = await load_service(self._core, engine, server)
        except BaseException:
            await self._core.close()
            raise
        name = serve.get_replica_context().replica_id.unique_id
        self._exposition = SharedExposition(self._service.exposition, name)
        self._service.exposition = self._exposition
        self._tasks = [
            asyncio.ensure_future(self._listen()),
            asyncio.ensure_future(self._exposition.push_forever()),
        ]

    def new_core(self) -> CoreProcess:
        """The process that generates, not started yet."""
        return CoreProcess()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve's hook for an application that exists only once the model is loaded."""
        if self._server.access_log is not None:
            log_to_stdout()
        app = make_app(self._service, self._server, self._server.allowed_hosts or None)
        front = self._service.front
        app.add_middleware(Unanswered, dead=lambda: front.dead is not None)
        app.add_middleware(LastWords, guard=Guard())
        return app

    def record_replica_metadata(self) -> dict[str, Any]:
        """Ray Serve's hook: what routers are told of this replica, once."""
        ready = self._service.front.ready
        return {KV_TOKENS: ready.kv_tokens, MOST_RUNNING: ready.max_num_seqs}

    async def check_health(self) -> None:
        """Ray Serve's hook. Raises CoreDied once the engine is gone."""
        dead = self._service.front.dead
        if dead is not None:
            raise CoreDied(*dead.args)

    async def _listen(self) -> None:
        await self._service.front.listen()
        logger.error("the engine died: %s", self._service.front.dead)
        end = time.monotonic() + GOODBYE_SECONDS
        while self._service.front.active and time.monotonic() < end:
            await asyncio.sleep(0.01)
        # For what was said last to leave.
        await asyncio.sleep(0.02)
        await self._core.close()
        # A process that is gone is noticed at once, by Ray and by the proxy; one that only says
        # that it is ill, after several checks.
        os._exit(1)

    async def __del__(self) -> None:
        """Ray Serve's hook: the replica has drained, or its time for that is up."""
        tasks = getattr(self, "_tasks", None)
        if tasks is None:
            # The model could not be loaded.
            return
        self._service.front.give_up()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._core.close()


def _log_to_stderr() -> None:
    """Warnings go where Ray shows them. Serve takes what is written on ``sys.stderr`` into a log
    that waits for a thousand lines, and is lost when the process ends at once."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger("surefoot").addHandler(handler)
