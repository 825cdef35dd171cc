"""What the endpoints do: read the request, tokenise, generate, answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from surefoot.errors import SurefootError
from surefoot.models.loading.special_text import SpecialText
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.access import GENERATION
from surefoot.server.answer import Format, StreamedAnswer, whole_answer
from surefoot.server.answer_parser import AnswerParser
from surefoot.server.chat import ChatFormat
from surefoot.server.chat_schema import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    plain_tools,
    render_messages,
)
from surefoot.server.chat_style import ChatPrompt, ChatStyle
from surefoot.server.completions import DEFAULT_MAX_TOKENS, CompletionFormat
from surefoot.server.encoding import MOST_CHARACTERS, Encoder, too_long
from surefoot.server.errors import ApiError, api_error
from surefoot.server.exposition import Exposition
from surefoot.server.front import Front
from surefoot.server.logprobs import TokenTexts
from surefoot.server.schema import CompletionRequest, RequestFields

SPECULATION_HEADER = "surefoot-speculation"


@dataclass(frozen=True)
class ServiceSettings:
    """``names``: what requests may call the model, the first one shown. ``request_timeout`` in
    seconds, None for none. ``tool_format``: how the model writes calls (``FORMATS``), None for
    what its chat template says."""

    names: tuple[str, ...]
    request_timeout: float | None = None
    tool_format: str | None = None


class Service:
    """The endpoints' work on one model."""

    def __init__(self, front: Front, settings: ServiceSettings) -> None:
        self.front = front
        self.settings = settings
        self.tokenizer = front.tokenizer
        self.encoder = Encoder(front.tokenizer, front.ready.room)
        self.specials = SpecialText(front.tokenizer)
        self.styles = ChatStyle.styles(front.tokenizer, settings.tool_format)
        for tokenizer in (self.specials.tokenizer, self.specials.renamed):
            # Worked out now: that takes a while, for which everybody would wait.
            _ = tokenizer.lengths
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
        more: dict[str, Any] = {"max_tokens": 1 if scoring else limit}
        if request.echo and request.logprobs is not None:
            more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
        given: Any = request.prompt
        many = given if isinstance(given, list) and not _is_ids(given) else [given]
        self.front.check_room(len(many), request.n or 1)
        for item in many:
            if isinstance(item, str):
                self.encoder.check(item)
            else:
                self._check_ids("prompt", item)
        special = request.add_special_tokens
        prompts = [
            await self.encoder.ids(item, special) if isinstance(item, str) else item
            for item in many
        ]
        shown = []
        if request.echo:
            shown = [i if isinstance(i, str) else self.tokenizer.decode(i) for i in many]
        answer_id = f"cmpl-{secrets.token_hex(16)}"
        name = self.settings.names[0]
        form = CompletionFormat(answer_id, name, request, shown, self.texts, scoring)
        return await self._answer(http, request, prompts, form, more)

    def check_size(self, fields: Mapping[str, Any]) -> None:
        """Refuse more prompts, token ids or messages than can ever be served, before each of them
        is looked at. Raises SurefootError."""
        most, given = self.encoder.most, fields.get("prompt")
        if isinstance(given, list):
            many = given if given and isinstance(given[0], (str, list)) else [given]
            self.front.check_count(len(many), "prompt")
            longest = max((len(item) for item in many if isinstance(item, list)), default=0)
            if longest > most:
                raise SurefootError("prompt", too_long(longest, "tokens", most), "shorten it")
        messages = fields.get("messages")
        if isinstance(messages, list) and len(messages) > most:
            raise SurefootError("messages", too_long(len(messages), "entries", most), "drop some")
        tokens = fields.get("tokens")
        if isinstance(tokens, list) and len(tokens) > MOST_CHARACTERS:
            problem = f"has {len(tokens)} entries, more than {MOST_CHARACTERS}"
            raise SurefootError("tokens", problem, "send them in pieces")

    async def chat(self, http: Request, request: ChatRequest) -> Response:
        """``/v1/chat/completions``."""
        self.check_model(request.model)
        more: dict[str, Any] = {"max_tokens": request.limit(), "logprobs": request.width()}
        style = self.styles[request.uses_tools]
        if request.stream and request.prompt_logprobs is not None:
            raise SurefootError("prompt_logprobs", "cannot be streamed", "drop stream")
        try:
            wanted = request.structure(style)
            prompt = await self._render(request, request.add_special_tokens)
        except SurefootError as error:
            raise api_error(error, request.names()) from error
        answer_id = f"chatcmpl-{secrets.token_hex(16)}"
        more["structured_outputs"] = style.behind_reasoning(wanted, prompt)

        def new_parser() -> AnswerParser:
            return style.parser(request.tool_names, prompt.inside)

        form = ChatFormat(answer_id, self.settings.names[0], request, self.texts, new_parser)
        shown = frozenset(style.special.values())
        return await self._answer(http, request, [prompt.ids], form, more, shown)

    async def _render(
        self, request: ChatRequest | TokenizeRequest, add_special_tokens: bool
    ) -> ChatPrompt:
        """The prompt, in a thread: how long a template takes over its variables cannot be told
        from their size."""
        tools, variables = request.tools, request.chat_template_kwargs
        if isinstance(request, ChatRequest):
            tools = tools if request.uses_tools else None
        style = self.styles[bool(tools)]
        if isinstance(request, ChatRequest):
            variables = request.variables(style)

        def rendered() -> tuple[str, Tokenizer, bool, bool]:
            messages = [item.plain(index) for index, item in enumerate(request.messages or [])]
            plain, mark = plain_tools(tools), None
            if not request.parse_special:
                mark = self.specials.mark()
                messages, plain = self.specials.marked((messages, plain), mark)
            prompt = request.add_generation_prompt
            text = render_messages(self.tokenizer, style, messages, plain, variables, prompt)
            thinks = style.thinks(text), style.may_think(text)
            if mark is None:
                return text, self.tokenizer, *thinks
            return *self.specials.settled(text, mark), *thinks

        text, tokenizer, inside, may_think = await asyncio.to_thread(rendered)
        encode = self.encoder.any_ids if isinstance(request, TokenizeRequest) else self.encoder.ids
        return ChatPrompt(await encode(text, add_special_tokens, tokenizer), inside, may_think)

    async def _answer(
        self,
        http: Request,
        request: RequestFields,
        prompts: list[list[int]],
        form: Format,
        more: dict[str, Any],
        shown: frozenset[int] = frozenset(),
    ) -> Response:
        seconds, ready = self.settings.request_timeout, self.front.ready
        room = ready.room + 1 - max(map(len, prompts))
        try:
            params = request.sampling(ready.sampling_defaults, room, more)
            speculation = request.speculation_params(http.headers.get(SPECULATION_HEADER))
            generation = await self.front.submit(prompts, params, speculation, shown)
            http.scope[GENERATION] = generation
        except SurefootError as error:
            raise api_error(error, request.names()) from error
        if request.stream:
            return StreamedAnswer(self.front, generation, form, seconds, request.include_usage)
        return await whole_answer(self.front, generation, form, http.receive, seconds)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """``/tokenize``."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise SurefootError("prompt", "or messages is wanted", "give one of the two")
        if request.messages is not None:
            ids = (await self._render(request, bool(request.add_special_tokens))).ids
        else:
            text = request.prompt or ""
            for name in ("tools", "chat_template_kwargs"):
                if getattr(request, name) is not None:
                    raise SurefootError(name, "does nothing for a prompt", "give messages")
            special = request.add_special_tokens is not False
            ids = await self.encoder.any_ids(text, special)

        def answer() -> dict[str, Any]:
            answer = {
                "count": len(ids),
                "max_model_len": self.front.ready.max_model_len,
                "tokens": ids,
            }
            if request.return_token_strs:
                answer["token_strs"] = [self.texts.text(token) for token in ids]
            return answer

        return await asyncio.to_thread(answer)

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """``/detokenize``."""
        self.check_model(request.model)
        self._check_ids("tokens", request.tokens)
        [text] = await asyncio.to_thread(self.tokenizer.decode_batch, [request.tokens])
        return {"prompt": text}

    def _check_ids(self, field: str, ids: list[int]) -> None:
        last = self.front.ready.vocab_size - 1
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token <= last:
                raise SurefootError(field, f"token id {token} is outside 0 to {last}")


def _is_ids(prompt: list[Any]) -> bool:
    return not prompt or isinstance(prompt[0], int)
