"""What the endpoints do: read the request, tokenise, generate, answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import IncrementalDetokenizer
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.server.access import GENERATION, ID_GIVEN, REQUEST_ID
from surefoot.server.answer import Format, StreamedAnswer, whole_answer
from surefoot.server.answer_parser import AnswerParser
from surefoot.server.anthropic_format import MessagesFormat
from surefoot.server.anthropic_schema import CountRequest, MessagesRequest
from surefoot.server.aside import Aside
from surefoot.server.chat import ChatFormat
from surefoot.server.chat_schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from surefoot.server.chat_style import ChatStyle
from surefoot.server.completions import DEFAULT_MAX_TOKENS, CompletionFormat
from surefoot.server.embeddings import EmbeddingFormat, EmbeddingRequest
from surefoot.server.encoding import SHORT_TEXT
from surefoot.server.errors import ApiError, api_error
from surefoot.server.exposition import Exposition
from surefoot.server.fields import GenerationFields
from surefoot.server.front import Front
from surefoot.server.generation import Generation
from surefoot.server.logprobs import TokenTexts
from surefoot.server.prompts import Prompts
from surefoot.server.responses import ResponsesFormat
from surefoot.server.responses_schema import ResponsesRequest
from surefoot.server.schema import CompletionRequest, RequestFields
from surefoot.structured import StructuredOutputsParams

NewParser = Callable[[], AnswerParser]
SPECULATION_HEADER = "surefoot-speculation"
MOST_SCORES = 1 << 20
"""Logprobs of an answer: some 50 MB of JSON, parts of which are copied at one go."""


@dataclass(frozen=True)
class ServiceSettings:
    """``names``: what requests may call the model, the first one shown. ``request_timeout`` in
    seconds, None for none. ``tool_format``: how the model writes calls (``FORMATS``), None for
    what its chat template says. ``trust_request_chat_template``: whether requests may bring a chat
    template of their own."""

    names: tuple[str, ...]
    request_timeout: float | None = None
    tool_format: str | None = None
    trust_request_chat_template: bool = False


class Service:
    """The endpoints' work on one model."""

    def __init__(self, front: Front, settings: ServiceSettings) -> None:
        self.front = front
        self.settings = settings
        self.tokenizer = front.tokenizer
        self.aside = Aside()
        trusts = settings.trust_request_chat_template
        self.prompts = Prompts(front, self.aside, settings.tool_format, trusts)
        self.texts = TokenTexts(front.tokenizer)
        self.exposition = Exposition(front.metrics, settings.names[0], front.core.pid)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}, only {known}",
                param="model",
                code="model_not_found",
            )

    async def complete(self, http: Request, request: CompletionRequest) -> Response:
        """``/v1/completions``."""
        self.check_model(request.model)
        scoring = request.echo and request.max_tokens == 0
        limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        # Scoring a prompt takes a round, which also gives a token, to be left out.
        more: dict[str, Any] = {"max_tokens": 1 if scoring else limit, "n": request.texts}
        if request.texts > (request.n or 1):
            more["logprobs"] = request.logprobs or 0
        if request.echo and request.logprobs is not None:
            more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
        prompts, shown = await self.prompts.completion(request, more["max_tokens"])
        answer_id, name = self._answer_id("cmpl-", http, request), self.settings.names[0]
        form = CompletionFormat(answer_id, name, request, shown, self.texts, scoring)
        try:
            return await self._answer(http, request, prompts, form, more)
        except SurefootError as error:
            raise _named(error, request) from error

    async def chat(self, http: Request, request: ChatRequest) -> Response:
        """``/v1/chat/completions``."""
        self.check_model(request.model)
        if request.stream and request.prompt_logprobs is not None:
            raise SurefootError("prompt_logprobs", "cannot be streamed", "drop stream")
        answer_id, name = self._answer_id("chatcmpl-", http, request), self.settings.names[0]

        def new_form(new_parser: NewParser) -> Format:
            return ChatFormat(answer_id, name, request, self.texts, new_parser)

        return await self._converse(http, request, new_form)

    async def respond(self, http: Request, request: ResponsesRequest) -> Response:
        """``/v1/responses``."""
        self.check_model(request.model)
        answer_id, name = self._answer_id("resp_", http, request), self.settings.names[0]

        def new_form(new_parser: NewParser) -> Format:
            return ResponsesFormat(answer_id, name, request, new_parser())

        return await self._converse(http, request.chat, new_form, request.named)

    async def message(self, http: Request, request: MessagesRequest) -> Response:
        """``/v1/messages``."""
        self.check_model(request.model)
        answer_id, name = self._answer_id("msg_", http, request), self.settings.names[0]

        def new_form(new_parser: NewParser) -> Format:
            return MessagesFormat(answer_id, name, new_parser())

        request.settle(self.prompts.style(request.chat))
        return await self._converse(http, request.chat, new_form, request.named)

    async def embed(self, http: Request, request: EmbeddingRequest) -> Response:
        """``/v1/embeddings``."""
        self.check_model(request.model)
        completion = request.completion
        self._answer_id("", http, completion)
        try:
            prompts, _ = await self.prompts.completion(completion, 1)
            generation = await self._start(http, completion, prompts, {}, pools=True)
        except SurefootError as error:
            raise _named(error, completion, request.named) from error
        form, seconds = EmbeddingFormat(self.settings.names[0], request), self._seconds
        return await whole_answer(self.front, generation, form, http.receive, seconds, self.aside)

    async def count(self, request: CountRequest) -> dict[str, int]:
        """``/v1/messages/count_tokens``."""
        self.check_model(request.model)
        request.settle(self.prompts.style(request.chat))
        try:
            # What could not be answered cannot be counted, either.
            request.chat.sampling({}, self.front.ready.room, {"logprobs": request.chat.width()})
            request.chat.speculation_params(None)
            return {"input_tokens": await self.prompts.length(request.chat)}
        except SurefootError as error:
            raise _named(error, request.chat, request.named) from error

    async def _converse(
        self,
        http: Request,
        request: ChatRequest,
        new_form: Callable[[NewParser], Format],
        rename: Callable[[str], str] | None = None,
    ) -> Response:
        """Answer a conversation in the form that an endpoint gives it. ``rename``: from the chat
        request's fields to the endpoint's."""
        try:
            large = request.large or request.chat_template is not None

            def read() -> tuple[ChatStyle, StructuredOutputsParams | None]:
                style = self.prompts.style(request)
                return style, request.structure(style)

            style, wanted = await self.aside.run(True, read) if large else read()
            prompt = await self.prompts.conversation(request)
            more: dict[str, Any] = {"max_tokens": request.limit(), "logprobs": request.width()}
            more["structured_outputs"] = style.behind_reasoning(wanted, prompt)

            def new_parser() -> AnswerParser:
                return style.parser(request.tool_names, prompt.inside)

            form, shown = new_form(new_parser), frozenset(style.special.values())
            return await self._answer(http, request, [prompt.ids], form, more, shown)
        except SurefootError as error:
            raise _named(error, request, rename) from error

    def _answer_id(self, kind: str, http: Request, request: GenerationFields) -> str:
        """Of the request's id: the header's, if the client sent one, or the field's, or a new one.
        The answer's header says the same."""
        if request.request_id is not None and not http.scope.get(ID_GIVEN):
            http.scope[REQUEST_ID] = request.request_id
        return f"{kind}{http.scope[REQUEST_ID]}"

    async def _answer(
        self,
        http: Request,
        request: RequestFields,
        prompts: list[list[int]],
        form: Format,
        more: dict[str, Any],
        shown: frozenset[int] = frozenset(),
    ) -> Response:
        generation = await self._start(http, request, prompts, more, shown)
        if request.stream:
            return StreamedAnswer(self.front, generation, form, self._seconds)
        return await whole_answer(
            self.front, generation, form, http.receive, self._seconds, self.aside
        )

    async def _start(
        self,
        http: Request,
        request: RequestFields,
        prompts: list[list[int]],
        more: dict[str, Any],
        shown: frozenset[int] = frozenset(),
        pools: bool = False,
    ) -> Generation:
        ready = self.front.ready
        room = ready.room + 1 - max(map(len, prompts))
        sampling = partial(request.sampling, ready.sampling_defaults, room, more)
        params = await self.aside.run(True, sampling) if request.large else sampling()
        _check_scores(prompts, params, room)
        speculation = request.speculation_params(http.headers.get(SPECULATION_HEADER))
        if pools:
            speculation = SpeculationParams("off")
        priority = request.priority or 0
        generation = await self.front.submit(prompts, params, speculation, priority, shown, pools)
        http.scope[GENERATION] = generation
        return generation

    @property
    def _seconds(self) -> float | None:
        return self.settings.request_timeout

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """``/tokenize``."""
        self.check_model(request.model)
        ids = await self.prompts.tokenized(request)

        def answer() -> bytes:
            answer: dict[str, Any] = {
                "count": len(ids),
                "max_model_len": self.front.ready.max_model_len,
                "tokens": ids,
            }
            if request.return_token_strs:
                answer["token_strs"] = [self.texts.text(token) for token in ids]
            return msgspec.json.encode(answer)

        return await self.aside.run(len(ids) > SHORT_TEXT, answer)

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """``/detokenize``."""
        self.check_model(request.model)
        self.prompts.check_ids("tokens", request.tokens)

        def text() -> str:
            # Token by token, as the tokenizer keeps the interpreter's lock until it is done.
            stream = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=False)
            return "".join([*map(stream.push, request.tokens), stream.flush()])

        return {"prompt": await self.aside.run(request.large, text)}


def _check_scores(prompts: list[list[int]], params: SamplingParams, room: int) -> None:
    """Refuse an answer with too many logprobs. Raises SurefootError."""
    for option, width, tokens in (
        ("prompt_logprobs", params.prompt_logprobs, sum(map(len, prompts))),
        ("logprobs", params.logprobs, len(prompts) * (params.max_tokens or room)),
    ):
        count = 0 if width is None else (width + 1) * tokens * params.n
        if count > MOST_SCORES:
            problem = f"asks for up to {count} numbers, more than {MOST_SCORES}"
            raise SurefootError(option, problem, "ask for fewer, or for fewer texts or tokens")


def _named(
    error: SurefootError, request: RequestFields, rename: Callable[[str], str] | None = None
) -> ApiError:
    """The answer to an error that names an option of Surefoot's, by the request's field."""
    option = request.names().get(error.option, error.option)
    option = option if rename is None else rename(option)
    return api_error(SurefootError(option, error.problem, error.fix))
