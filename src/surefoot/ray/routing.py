"""Requests with a prefix in common go to the replica that has its KV: the choice, and the endpoint
by which HAProxy asks for it.

With HAProxy in front (Ray Serve's direct ingress), a request's bytes never pass through Ray: the
proxy sends a copy of the body to ``/internal/route``, is told a replica, and from then on talks to
that replica's own HTTP server.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from surefoot.ray.loads import Ages, Loads
from surefoot.ray.prefixes import PrefixIndex, prefix_hashes

KV_TOKENS, MOST_RUNNING = "kv_tokens", "max_num_seqs"
"""Under which a replica's metadata has the sizes of its KV pool and its batch."""
PROBE_SECONDS = 0.1
"""How often a busy replica is asked for its requests under way."""
MOST_PROBES_PER_SECOND = 100
"""Of one router, of all replicas together."""
PROBE_DEADLINE_SECONDS = 5.0
ROUTE_PATH = "/internal/route"


class PrefixRouter(FIFOMixin, RequestRouter):
    """A request router of Ray Serve. A request's first positional argument may be the hashes of its
    text (``prefix_hashes``); without them only loads count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._index: PrefixIndex[ReplicaID] = PrefixIndex()
        self._busy: Loads[ReplicaID] = Loads()
        self._ages: Ages[ReplicaID] = Ages()
        self._probes: dict[ReplicaID, asyncio.Task[None]] = {}
        self._chance = random.Random()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with the replicas that run now."""
        super().update_replicas(replicas)
        names = [replica.replica_id for replica in replicas]
        self._index.keep_only(names)
        self._busy.keep_only(names)
        self._ages.keep_only(names)
        for replica in replicas:
            sizes = replica.replica_metadata
            if sizes:
                self._index.resize(replica.replica_id, sizes[KV_TOKENS], sizes[MOST_RUNNING])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one replica that a request is for."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id: replica for replica in candidate_replicas}
        if not by_name:
            return []
        hashes: list[bytes] = []
        if pending_request is not None and pending_request.args:
            [first, *_] = pending_request.args
            # Through Ray's own proxy it is the request, whose body the proxy has not read.
            hashes = first if isinstance(first, list) else []
        loads = {name: self._busy.of(name) for name in self._ages.without_new(list(by_name))}
        name = self._index.choose(loads, hashes, self._chance)
        self._index.record(name, hashes)
        self._busy.send(name)
        if name not in self._probes:
            self._probes[name] = self._event_loop.create_task(self._watch(by_name[name]))
        return [[by_name[name]]]

    async def _watch(self, replica: RunningReplica) -> None:
        """Ask a replica for its load until it has none."""
        name = replica.replica_id
        try:
            while name in self.curr_replicas:
                most = MOST_PROBES_PER_SECOND
                await asyncio.sleep(max(PROBE_SECONDS, len(self.curr_replicas) / most))
                asked = time.monotonic()
                load = await replica.get_queue_len(deadline_s=PROBE_DEADLINE_SECONDS)
                self._busy.tell(name, load, asked)
                if not self._busy.of(name):
                    return
        except RayActorError:
            # No more for it, until Ray has noticed as well.
            self.on_replica_actor_died(name)
        finally:
            self._probes.pop(name, None)


class RouteEndpoint:
    """The deployment that HAProxy asks. Answers with JSON, ``{"replica_id": name}``, or status 503
    while there is no replica."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray Serve's hook for an application of the replica's own."""
        return Starlette(routes=[Route(ROUTE_PATH, self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        try:
            name = await self._choose(await request.body())
        except DeploymentUnavailableError as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse({"replica_id": name})

    async def _choose(self, body: bytes) -> str:
        # Nothing is reserved on the replica: the request reaches it by HTTP, and its own queue
        # refuses what is too much.
        choice = self._replicas.choose_replica(prefix_hashes(body), _reserve=False)
        async with choice as selection:
            return selection._replica.replica_id.to_full_id_str()
