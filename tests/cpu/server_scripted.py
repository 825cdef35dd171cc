"""The HTTP front without a core: what a core would send is written down, round by round."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.app import create_app
from surefoot.server.core_process import CoreDied
from surefoot.server.front import Front
from surefoot.server.messages import Abort, Accepted, Add, News, Ready, Round, ToFront, Totals
from surefoot.server.service import Service, ServiceSettings

END = 2
"""The model's end token."""
READY = Ready(
    description="written down",
    max_model_len=4096,
    kv_tokens=4096,
    max_num_seqs=8,
    max_draft_tokens=4,
    vocab_size=400,
    end_tokens=(END,),
    proposers=["ngram"],
    saving_known=False,
)
Groups = Sequence[Sequence[int]]


def uncounted() -> Any:
    """As much of a service as an application needs that generates nothing."""
    return SimpleNamespace(front=SimpleNamespace(metrics=SimpleNamespace(statuses=Counter())))


class ScriptedCore:
    """Answers each choice with the groups of tokens that ``script`` holds, a group a round. It
    goes on to the script's end whatever it is told, as a real one does with the round that runs.

    A text ends for ``stop`` at an end token, for ``length`` at the script's end; with ``hang`` it
    does not end.
    """

    def __init__(self, script: Groups, hang: bool = False) -> None:
        self.script = script
        self.hang = hang
        self.received: list[Any] = []
        self.pid = None
        self._messages: asyncio.Queue[ToFront | None] = asyncio.Queue()

    @property
    def aborted(self) -> list[str]:
        return [name for m in self.received if isinstance(m, Abort) for name in m.ids]

    def send(self, message: Any) -> None:
        self.received.append(message)
        if isinstance(message, Add):
            self._messages.put_nowait(Accepted(message.ids))
            for index, group in enumerate(self.script):
                last = index == len(self.script) - 1 and not self.hang
                reason = "stop" if END in group else "length"
                news = [
                    News(name, list(group), finish=reason if last else None) for name in message.ids
                ]
                self._messages.put_nowait(Round(news, Totals()))

    def say(self, message: ToFront) -> None:
        """Between rounds."""
        self._messages.put_nowait(message)

    def die(self) -> None:
        """As if the process had ended."""
        self._messages.put_nowait(None)

    async def receive(self) -> ToFront:
        # One message, then everybody else's turn, so that each round is streamed by itself.
        for _ in range(3):
            await asyncio.sleep(0)
        message = await self._messages.get()
        if message is None:
            raise CoreDied("it was told to")
        return message


@asynccontextmanager
async def scripted_front(
    tokenizer: Tokenizer,
    script: Groups,
    hang: bool = False,
    request_timeout: float | None = None,
    ready: Ready = READY,
    trust_templates: bool = False,
    **guards: Any,
) -> AsyncIterator[tuple[Any, Front, ScriptedCore]]:
    """(ASGI application, front, core); ``guards`` go to ``create_app``."""
    core: Any = ScriptedCore(script, hang)
    front = Front(core, ready, tokenizer, max_queue=8)
    settings = ServiceSettings(
        ("scripted",), request_timeout, trust_request_chat_template=trust_templates
    )
    service = Service(front, settings)
    app = create_app(service, **guards)
    listening = asyncio.ensure_future(front.listen())
    try:
        yield app, front, core
    finally:
        listening.cancel()


def ask(
    tokenizer: Tokenizer,
    script: Groups,
    use: Callable[[httpx.AsyncClient, ScriptedCore], Any],
    **settings: Any,
) -> Any:
    """What ``use`` returns, given a client of a front on this script; ``settings`` as in
    ``scripted_front``."""

    async def run() -> Any:
        async with scripted_front(tokenizer, script, **settings) as (app, front, core):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                result = await use(client, core)
            assert not front.active, "the front remembers a request that is over"
            return result

    return asyncio.run(run())
