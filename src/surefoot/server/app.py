"""The HTTP surface: routes, their documents, and how errors are answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from surefoot import __version__
from surefoot.errors import SurefootError
from surefoot.server.access import Access, LogFormat
from surefoot.server.anthropic_schema import CountRequest, MessagesRequest
from surefoot.server.bodies import route_class
from surefoot.server.chat_schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from surefoot.server.core_process import CoreDied
from surefoot.server.docs_page import docs_page
from surefoot.server.embeddings import EmbeddingRequest
from surefoot.server.errors import ApiError, TimedOut, api_error, validation_error
from surefoot.server.exposition import CONTENT_TYPE
from surefoot.server.field_notes import note_defaults
from surefoot.server.generation import Overloaded, ShuttingDown
from surefoot.server.guards import ApiKey, BodyLimit, Hosts
from surefoot.server.playground import add_playground
from surefoot.server.responses_schema import ResponsesRequest
from surefoot.server.schema import CompletionRequest
from surefoot.server.service import SPECULATION_HEADER, Service

logger = logging.getLogger("surefoot.server")

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_HEADER = {
    "name": SPECULATION_HEADER,
    "in": "header",
    "required": False,
    "description": "Like the field `speculation`: `auto`, `off` or a proposer's name, then "
    "perhaps `; max_draft_tokens=N`.",
    "schema": {"type": "string"},
}


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = 8 << 20,
    access_log: LogFormat | None = None,
) -> FastAPI:
    """An ASGI application around a service. Endpoints are those of OpenAI and vLLM. Without
    ``api_keys`` none is asked for; without ``allowed_hosts`` any host may be meant."""
    app = FastAPI(
        title="Surefoot",
        version=__version__,
        description="OpenAI-compatible inference with exact speculative decoding.",
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = route_class(
        lambda fields: service.prompts.check_size(fields),
        lambda *work: service.aside.run(True, *work),
    )
    _answer_errors(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    add_playground(app)
    _document(app, service)
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    if api_keys:
        app.add_middleware(ApiKey, keys=api_keys)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    if allowed_hosts is not None:
        app.add_middleware(Hosts, allowed=allowed_hosts, origins=cors_origins)

    def count(method: str, path: str, status: int) -> None:
        service.front.metrics.statuses[method, path, str(status)] += 1

    app.add_middleware(Access, count=count, log=access_log)
    return app


def _document(app: FastAPI, service: Service) -> None:
    """Have the OpenAPI document tell the model's defaults, and nothing that is never answered."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            note_defaults(document, service.front.ready.sampling_defaults)
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]


def _documented(
    *statuses: int,
    media: str = "application/json",
    errors: dict[str, Any] = _ERROR_SCHEMA,
    **operation: Any,
) -> dict:
    """Arguments of a route: its answers, for the OpenAPI document."""
    error = {"content": {"application/json": {"schema": errors}}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": "Refused", **error} for status in statuses
    }
    responses[200] = {"description": "OK", "content": {media: {}}}
    return {"responses": responses, "response_class": Response, "openapi_extra": operation}


def _add_generation(app: FastAPI, service: Service) -> None:
    statuses = 400, 401, 404, 413, 422, 429, 503, 504
    answers = _documented(*statuses, parameters=[_HEADER])
    anthropic = _documented(*statuses, errors=_ANTHROPIC_SCHEMA, parameters=[_HEADER])

    @app.post("/v1/completions", **answers)
    async def completions(http: Request, request: CompletionRequest) -> Response:
        """Continue prompts."""
        return await service.complete(http, request)

    @app.post("/v1/chat/completions", **answers)
    async def chat_completions(http: Request, request: ChatRequest) -> Response:
        """Answer a conversation."""
        return await service.chat(http, request)

    @app.post("/v1/responses", **answers)
    async def responses(http: Request, request: ResponsesRequest) -> Response:
        """Answer a conversation, in OpenAI's newer form; nothing is kept."""
        return await service.respond(http, request)

    @app.post("/v1/embeddings", **_documented(*statuses))
    async def embeddings(http: Request, request: EmbeddingRequest) -> Response:
        """Means of the model's last hidden states."""
        return await service.embed(http, request)

    @app.post("/v1/messages", **anthropic)
    async def messages(http: Request, request: MessagesRequest) -> Response:
        """Answer a conversation, in Anthropic's form."""
        return await service.message(http, request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    answers = _documented(400, 401, 404, 413, 422)

    anthropic = _documented(400, 401, 404, 413, 422, errors=_ANTHROPIC_SCHEMA)

    @app.post("/v1/messages/count_tokens", **anthropic)
    async def count_tokens(request: CountRequest) -> Response:
        """How many tokens the prompt of Anthropic's messages has."""
        return _json(await service.count(request))

    @app.post("/tokenize", **answers)
    async def tokenize(request: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        return Response(await service.tokenize(request), media_type="application/json")

    @app.post("/detokenize", **answers)
    async def detokenize(request: DetokenizeRequest) -> Response:
        """Text of token ids."""
        return _json(await service.detokenize(request))


def _add_state(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "surefoot",
            "max_model_len": service.front.ready.max_model_len,
            "deterministic": service.front.ready.deterministic,
            "capabilities": service.prompts.capabilities,
            "speculation": {
                "methods": service.front.methods,
                "max_draft_tokens": service.front.ready.max_draft_tokens,
            },
        }

    @app.get("/v1/models", **_documented(401))
    async def models() -> Response:
        """The model, under each of its names."""
        names = service.settings.names
        return _json({"object": "list", "data": [card(name) for name in names]})

    @app.get("/v1/models/{model:path}", **_documented(400, 401, 404))
    async def model(model: str) -> Response:
        """One model."""
        service.check_model(model)
        return _json(card(model))

    @app.get("/health", **_documented(503))
    async def health() -> Response:
        """200 while the engine lives."""
        if service.front.dead is not None:
            raise CoreDied(*service.front.dead.args)
        return _json({"status": "ok"})

    @app.get("/version", **_documented(401))
    async def version() -> Response:
        """The version of Surefoot."""
        return _json({"version": __version__})

    @app.get("/docs", **_documented(401, media="text/html"))
    async def docs() -> Response:
        """This page."""
        return Response(docs_page(app.openapi()), media_type="text/html")

    @app.get("/metrics", **_documented(401, media="text/plain"))
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(await service.exposition.page(), headers={"Content-Type": CONTENT_TYPE})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _answer_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return api_error(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response(request.url.path)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause = error.__cause__
        if isinstance(cause, (ApiError, SurefootError)):
            return api_error(cause).response(request.url.path)
        headers = dict(error.headers or {})
        problem = ApiError(error.status_code, str(error.detail), headers=headers)
        return problem.response(request.url.path)

    async def unforeseen(request: Request, error: Exception) -> Response:
        logger.error("unforeseen error", exc_info=error)
        return api_error(error).response(request.url.path)

    for kind in (ApiError, SurefootError, Overloaded, CoreDied, ShuttingDown, TimedOut):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(Exception, unforeseen)
