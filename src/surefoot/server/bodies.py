"""Request bodies: JSON by the letter, read beside everybody else's answers, with limits on what
takes long though it is short in bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError

from surefoot.server.errors import ApiError, validation_error
from surefoot.server.fields import SHORT_BODY, Body
from surefoot.server.json_limits import TooMuch, check_text, check_value

_IDS = frozenset({"prompt", "tokens"})
Check = Callable[[dict[str, Any]], None]
RunAside = Callable[..., Awaitable[Any]]


class JsonRequest(Request):
    """Its JSON is a checked instance of ``model``: FastAPI has nothing left to validate."""

    model: type[Body]
    check: Check
    aside: RunAside

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SHORT_BODY:
            return _read(body, self.model, self.check)
        return await self.aside(_read, body, self.model, self.check)


def route_class(check: Check, aside: RunAside) -> type[APIRoute]:
    """A class of routes. ``check`` looks at a body's fields before they are validated, and raises
    what is to be answered; ``aside`` calls what reads a large one, in another thread."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Any]]:
            handle, field = super().get_route_handler(), self.body_field
            model: Any = None if field is None else field.field_info.annotation

            async def with_json(request: Request) -> Any:
                if model is None:
                    return await handle(request)
                read = JsonRequest(request.scope, request.receive)
                read.model, read.check, read.aside = model, check, aside
                return await handle(read)

            return with_json

    return JsonRoute


def _read(body: bytes, model: type[Body], check: Check) -> Body:
    try:
        check_text(body)
        value = msgspec.json.decode(body)
        check_value(value, _IDS)
    except TooMuch as error:
        raise ApiError(400, f"the body has {error}", code="too_many_values") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if isinstance(value, dict):
        check(value)
    try:
        read = model.model_validate(value)
    except ValidationError as error:
        raise validation_error(
            [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        ) from None
    read.came_as(len(body))
    return read
