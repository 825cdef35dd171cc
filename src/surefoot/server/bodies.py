"""Request bodies: JSON by the letter, read beside everybody else's answers, with limits on what
takes long though it is short in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from surefoot.server.errors import ApiError, validation_error

SHORT_BODY = 1 << 16
"""Bytes that are read on the spot; more go to a thread, so that nobody waits."""
MOST_CONTAINERS = 1 << 15
"""Lists and objects of a body, one within another or not."""
MOST_ENTRIES = 1 << 17
"""Entries of those together, the token ids of prompts aside, which the context limits."""
_IDS = frozenset({"prompt", "tokens"})
Check = Callable[[dict[str, Any]], None]


class JsonRequest(Request):
    """Its JSON is a checked instance of ``model``: FastAPI has nothing left to validate."""

    model: type[BaseModel]
    check: Check

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SHORT_BODY:
            return _read(body, self.model, self.check)
        return await asyncio.to_thread(_read, body, self.model, self.check)


def route_class(check: Check) -> type[APIRoute]:
    """A class of routes. ``check`` looks at a body's fields before they are validated, and raises
    what is to be answered."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Any]]:
            handle, field = super().get_route_handler(), self.body_field
            model: Any = None if field is None else field.field_info.annotation

            async def with_json(request: Request) -> Any:
                if model is None:
                    return await handle(request)
                read = JsonRequest(request.scope, request.receive)
                read.model, read.check = model, check
                return await handle(read)

            return with_json

    return JsonRoute


def _read(body: bytes, model: type[BaseModel], check: Check) -> BaseModel:
    if _containers(body, MOST_CONTAINERS) > MOST_CONTAINERS:
        raise _too_many(f"more than {MOST_CONTAINERS} lists and objects")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if isinstance(value, dict):
        if _entries(value, MOST_ENTRIES) > MOST_ENTRIES:
            raise _too_many(f"more than {MOST_ENTRIES} entries in its lists and objects")
        check(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(
            [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        ) from None


def _too_many(what: str) -> ApiError:
    return ApiError(400, f"the body has {what}", code="too_many_values")


def _containers(body: bytes, most: int) -> int:
    """How many lists and objects JSON holds; any number above ``most`` for more."""
    if body.count(b"[") + body.count(b"{") <= most:
        return 0
    count = at = 0
    while at < len(body) and count <= most:
        quote = body.find(b'"', at)
        end = quote if quote >= 0 else len(body)
        count += body.count(b"[", at, end) + body.count(b"{", at, end)
        at = _string_end(body, end + 1)
    return count


def _string_end(body: bytes, at: int) -> int:
    """The place behind the string whose text begins at ``at``."""
    while True:
        quote = body.find(b'"', at)
        if quote < 0:
            return len(body)
        first = quote
        while first > at and body[first - 1] == 0x5C:
            first -= 1
        if (quote - first) % 2 == 0:
            return quote + 1
        at = quote + 1


def _entries(body: dict[str, Any], most: int) -> int:
    """How many entries the containers of a body have; any number above ``most`` for more."""
    total = len(body)
    waiting = [value for name, value in body.items() if name not in _IDS]
    while waiting and total <= most:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            total += len(value)
            if total <= most:
                waiting.extend(value.values() if isinstance(value, dict) else value)
    return total
