"""Applications under Ray Serve that do not compute: replicas whose core sleeps, and one that only
answers. To be imported once Ray runs: Serve reads then which proxy there is."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from surefoot.config import EngineConfig
from surefoot.ray.application import application
from surefoot.ray.replica import Replica
from surefoot.server import messages
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


def sleeping_application(model: Path, replicas: int) -> serve.Application:
    """That many replicas which sleep."""
    engine = EngineConfig(model=str(model), threads=1)
    return application(engine, ServerConfig(), replicas, replica=SleepingReplica)


async def _answer(request: Request) -> StreamingResponse:
    await request.body()
    return StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"]), media_type="text/event-stream")


class Empty:
    """Answers with a stream of two events."""

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", _answer, methods=["POST"])])


def empty_application(replicas: int) -> serve.Application:
    """That many replicas which only answer."""
    return serve.deployment(
        serve.ingress()(Empty), num_replicas=replicas, ray_actor_options={"num_cpus": 0.1}
    ).bind()
