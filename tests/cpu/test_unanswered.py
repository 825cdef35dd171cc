"""Requests that come too late for a replica's engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from surefoot.ray.unanswered import Unanswered


async def receive() -> Any:
    return {"type": "http.request"}


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("kind", ["http", "lifespan"])
def test_no_byte_is_answered_once_the_engine_is_dead(dead: bool, kind: str) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("answer")

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        wrapped = Unanswered(app, lambda: dead)
        await asyncio.wait_for(wrapped({"type": kind}, receive, send), 0.05)

    if dead and kind == "http":
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(ask())
        assert not sent
    else:
        asyncio.run(ask())
        assert sent == ["answer"]
