"""Applications under Ray Serve that do not compute: replicas whose core sleeps, and one that only
answers."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from surefoot.config import EngineConfig
from surefoot.ray import local
from surefoot.ray.replica import Replica
from surefoot.server import messages
from surefoot.server.listening import bind
from surefoot.server.messages import Abort, Accepted, Add, News, Ready, Round, Totals
from surefoot.server.serve import ServerConfig

SLOTS = 8
ROUND_SECONDS = 0.05
READY = Ready(
    description="sleeps",
    max_model_len=4096,
    kv_tokens=1 << 16,
    max_num_seqs=SLOTS,
    max_draft_tokens=0,
    vocab_size=261,
    end_tokens=(2,),
    proposers=[],
    saving_known=False,
)


class SleepingCore:
    """Gives each of up to ``SLOTS`` texts a token every ``ROUND_SECONDS``; the others wait."""

    pid = None

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._accepted: list[str] = []
        self._work = asyncio.Event()

    async def spawn(self) -> None:
        pass

    async def load(self, config: EngineConfig, progress: Any = None) -> Ready:
        return READY

    def send(self, message: messages.ToCore) -> None:
        if isinstance(message, Add):
            limit = message.params.max_tokens
            assert limit is not None
            self._texts |= dict.fromkeys(message.ids, limit)
            self._accepted += message.ids
        elif isinstance(message, Abort):
            for name in message.ids:
                self._texts.pop(name, None)
        self._work.set()

    async def receive(self) -> messages.ToFront:
        while not self._texts:
            self._work.clear()
            await self._work.wait()
        if self._accepted:
            accepted, self._accepted = self._accepted, []
            return Accepted(accepted)
        await asyncio.sleep(ROUND_SECONDS)
        news = []
        for name in list(itertools.islice(self._texts, SLOTS)):
            self._texts[name] -= 1
            ended = not self._texts[name]
            news.append(News(name, [70], finish="length" if ended else None))
            if ended:
                del self._texts[name]
        return Round(news, Totals(running=len(news)))

    async def close(self) -> None:
        pass


class SleepingReplica(Replica):
    def new_core(self) -> Any:
        return SleepingCore()


@contextmanager
def sleeping_replicas(model: Path, replicas: int) -> Iterator[str]:
    """The address of that many replicas."""
    from surefoot.ray.application import application

    # Ray's workers import this file.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    port = free_port()
    with local._ray(replicas, True):
        engine = EngineConfig(model=str(model), threads=1)
        app = application(engine, ServerConfig(), replicas, replica=SleepingReplica)
        local._run(app, "127.0.0.1", port)
        yield f"http://127.0.0.1:{port}"
        local._drain()


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


async def _answer(request: Request) -> StreamingResponse:
    await request.body()
    return StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"]), media_type="text/event-stream")


class Empty:
    """Answers with a stream of two events."""

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", _answer, methods=["POST"])])


@contextmanager
def empty_application(replicas: int, haproxy: bool) -> Iterator[str]:
    """The address of a Serve application that does nothing, behind HAProxy or Ray's own proxy.
    (In a process of its own: Serve reads what to do when it is imported.)"""
    deployment = serve.deployment(
        serve.ingress()(Empty), num_replicas=replicas, ray_actor_options={"num_cpus": 0.1}
    )
    port = free_port()
    with local._ray(replicas, True):
        assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == str(int(haproxy))
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployment.bind(), name=local.NAME, route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        local._drain()
