"""From a request to the token ids of its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.special_text import SpecialText
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.sampling.grammar import missing_package
from surefoot.server.aside import Aside
from surefoot.server.chat_messages import ToolDefinition, plain_tools
from surefoot.server.chat_schema import ChatRequest, TokenizeRequest, render_messages
from surefoot.server.chat_style import ChatPrompt, ChatStyle
from surefoot.server.encoding import MOST_CHARACTERS, MOST_TOKENS, Encoder, too_long
from surefoot.server.front import Front
from surefoot.server.schema import CompletionRequest

MOST_TEMPLATE, MOST_BRACES = 1 << 14, 1 << 10
"""Of a chat template that comes with a request: compiling one keeps the interpreter's lock."""


class Prompts:
    """Tokenises and renders for one model."""

    def __init__(
        self, front: Front, aside: Aside, tool_format: str | None, trust_templates: bool
    ) -> None:
        """``tool_format``: as ``ChatStyle.of`` takes it; ``trust_templates``: whether requests may
        bring a chat template of their own."""
        self.front = front
        self.tokenizer = front.tokenizer
        self.aside = aside
        self.encoder = Encoder(front.tokenizer, front.ready.room)
        self.specials = SpecialText(front.tokenizer)
        self._trust_templates = trust_templates
        self._styles = ChatStyle.styles(front.tokenizer, tool_format)
        self._style_of = lru_cache(8)(
            lambda template: ChatStyle.of(template, front.tokenizer, tool_format)
        )
        for tokenizer in (self.specials.tokenizer, self.specials.renamed):
            # Worked out now: that takes a while, for which everybody would wait.
            _ = tokenizer.lengths

    @property
    def description(self) -> str:
        """How answers to conversations with tools are read; "" for nothing to tell."""
        return self._styles[True].description

    @property
    def capabilities(self) -> dict[str, bool]:
        """What the model may be asked for."""
        tools = self._styles[True]
        return {
            "completion": True,
            "chat": self.tokenizer.chat_template is not None,
            "tools": tools.tools is not None and "tools" in tools.variables,
            "reasoning": self._styles[False].reasoning is not None,
            "structured_outputs": missing_package() is None,
            "embeddings": True,
            "vision": False,
        }

    def check_size(self, fields: Mapping[str, Any]) -> None:
        """Refuse more prompts, token ids or messages than can ever be served, before each of them
        is looked at. Raises SurefootError."""
        room, name = self.encoder.most, "prompt" if "prompt" in fields else "input"
        given = fields.get(name)
        if isinstance(given, list):
            many = given if given and isinstance(given[0], (str, list)) else [given]
            self.front.check_count(len(many), name)
            longest = max((len(item) for item in many if isinstance(item, list)), default=0)
            most = room if fields.get("truncate_prompt_tokens") is None else MOST_CHARACTERS
            if longest > most:
                what = "entries" if given and isinstance(given[0], dict) else "tokens"
                raise SurefootError(name, too_long(longest, what, most), "shorten it")
        messages = fields.get("messages")
        if isinstance(messages, list) and len(messages) > room:
            raise SurefootError("messages", too_long(len(messages), "entries", room), "drop some")
        self._check_contents("messages" if "messages" in fields else "input", fields)
        tokens = fields.get("tokens")
        if isinstance(tokens, list) and len(tokens) > MOST_TOKENS:
            problem = f"has {len(tokens)} entries, more than {MOST_TOKENS}"
            raise SurefootError("tokens", problem, "send them in pieces")

    def _check_contents(self, name: str, fields: Mapping[str, Any]) -> None:
        """Refuse a conversation whose texts alone are too long, before anything works on them."""
        given = fields.get(name)
        texts = [*_contents(given if isinstance(given, list) else [{"content": given}])]
        if sum(map(len, texts)) <= MOST_CHARACTERS:
            return
        if fields.get("truncate_prompt_tokens") is None:
            self.encoder.check(texts, name)
        else:
            self.encoder.check_asked(texts, name)

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raises SurefootError for what is no token id of the model."""
        last = self.front.ready.vocab_size - 1
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token <= last:
                raise SurefootError(field, f"token id {token} is outside 0 to {last}")

    async def completion(
        self, request: CompletionRequest, max_tokens: int
    ) -> tuple[list[list[int]], list[str]]:
        """The ids of each prompt, and its text if that is to be echoed. Raises SurefootError."""
        given: Any = request.prompt
        many = given if isinstance(given, list) and not _is_ids(given) else [given]
        self.front.check_room(len(many), request.texts)
        size = self._truncated_size(request.truncate_prompt_tokens, max_tokens)
        for item in many:
            if not isinstance(item, str):
                self.check_ids("prompt", item)
            elif size is None:
                self.encoder.check([item])
        special = request.add_special_tokens
        prompts = [
            await self._encode(item, special, self.tokenizer, size)
            if isinstance(item, str)
            else item[-size:]
            if size
            else item
            for item in many
        ]
        if not request.echo:
            return prompts, []
        if size is not None:
            return prompts, self.tokenizer.decode_batch(prompts)
        texts = [item if isinstance(item, str) else self.tokenizer.decode(item) for item in many]
        return prompts, texts

    def style(self, request: ChatRequest | TokenizeRequest) -> ChatStyle:
        """Of the template that the request's conversation goes through. Raises SurefootError for
        one that is not taken."""
        if request.chat_template is None:
            return self._styles[bool(_tools(request))]
        if not self._trust_templates:
            raise SurefootError(
                "chat_template",
                "is not taken from requests by this server",
                "start it with --trust-request-chat-template, or with --chat-template FILE",
            )
        template = request.chat_template
        if len(template) > MOST_TEMPLATE or template.count("{") > MOST_BRACES:
            problem = f"has over {MOST_TEMPLATE} characters, or {MOST_BRACES} braces that open"
            raise SurefootError(
                "chat_template", problem, "start the server with --chat-template FILE"
            )
        return self._style_of(template)

    async def conversation(self, request: ChatRequest) -> ChatPrompt:
        """The prompt of a conversation. Raises SurefootError."""
        size = self._truncated_size(request.truncate_prompt_tokens, request.limit() or 1)
        text = await self._render(request)
        ids = await self._encode(text.text, request.add_special_tokens, text.tokenizer, size)
        return ChatPrompt(ids, text.inside, text.may_think)

    async def length(self, request: ChatRequest) -> int:
        """How many tokens a conversation's prompt has, be they too many. Raises SurefootError."""
        text = await self._render(request)
        special = request.add_special_tokens
        return len(await self.encoder.any_ids(text.text, special, text.tokenizer))

    async def tokenized(self, request: TokenizeRequest) -> list[int]:
        """What ``/tokenize`` answers with. Raises SurefootError."""
        if (request.prompt is None) == (request.messages is None):
            raise SurefootError("prompt", "or messages is wanted", "give one of the two")
        if request.messages is not None:
            text = await self._render(request)
            special = bool(request.add_special_tokens)
            return await self.encoder.any_ids(text.text, special, text.tokenizer)
        for name in ("tools", "chat_template_kwargs", "chat_template", "continue_final_message"):
            if getattr(request, name) not in (None, False):
                raise SurefootError(name, "does nothing for a prompt", "give messages")
        special = request.add_special_tokens is not False
        return await self.encoder.any_ids(request.prompt or "", special)

    def _truncated_size(self, wanted: int | None, max_tokens: int) -> int | None:
        """How many tokens of a prompt are taken, at most; None: all."""
        room = self.encoder.most
        if wanted is None or wanted == -1:
            return wanted if wanted is None else max(1, room + 1 - max_tokens)
        if not 1 <= wanted <= room:
            option = "truncate_prompt_tokens"
            raise SurefootError(option, f"{wanted} is out of range", f"use 1 to {room}, or -1")
        return wanted

    async def _encode(
        self, text: str, add_special_tokens: bool, tokenizer: Tokenizer, size: int | None
    ) -> list[int]:
        if size is None:
            return await self.encoder.ids(text, add_special_tokens, tokenizer)
        ids = await self.encoder.any_ids(text, add_special_tokens, tokenizer)
        if len(ids) <= size:
            return ids
        # What the tokenizer puts before a text is not part of it.
        added = add_special_tokens and size > 1 and ids[0] == tokenizer.bos_id
        return [ids[0], *ids[1 - size :]] if added else ids[-size:]

    async def _render(self, request: ChatRequest | TokenizeRequest) -> _Rendered:
        """From a thread, as how long a template takes over its variables cannot be told from their
        size; nor can it of a template that a request brings."""
        if request.continue_final_message and request.add_generation_prompt:
            raise SurefootError(
                "continue_final_message",
                "does not go with add_generation_prompt",
                "set add_generation_prompt to false",
            )
        large = request.large or request.chat_template is not None
        return await self.aside.run(large, self._rendered, request)

    def _rendered(self, request: ChatRequest | TokenizeRequest) -> _Rendered:
        style, variables = self.style(request), request.chat_template_kwargs
        if isinstance(request, ChatRequest):
            variables = request.variables(style)
        messages = [item.plain(index) for index, item in enumerate(request.messages or [])]
        plain, mark, end = plain_tools(_tools(request)), None, None
        begun = messages[-1]["content"] if request.continue_final_message else ""
        if not request.parse_special:
            mark = self.specials.mark()
            messages, plain = self.specials.marked((messages, plain), mark)
        if request.continue_final_message:
            end = self.specials.mark()
            messages[-1] = _open_ended(messages[-1], end)
        prompt, template = request.add_generation_prompt, request.chat_template
        text = render_messages(self.tokenizer, style, messages, plain, variables, prompt, template)
        if end is not None:
            text, *rest = text.split(end)
            if len(rest) != 1:
                raise SurefootError(
                    "continue_final_message",
                    "the chat template does not write the final message as it is given",
                    "drop it",
                )
        thinks = style.thinks(text) or style.thinks_on(begun), style.may_think(text)
        if mark is None:
            return _Rendered(text, self.tokenizer, *thinks)
        return _Rendered(*self.specials.settled(text, mark), *thinks)


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text, and what reads it; the rest as in ``ChatPrompt``."""

    text: str
    tokenizer: Tokenizer
    inside: bool
    may_think: bool


def _tools(request: ChatRequest | TokenizeRequest) -> Sequence[ToolDefinition] | None:
    """Those that the prompt tells of."""
    return None if isinstance(request, ChatRequest) and not request.uses_tools else request.tools


def _open_ended(message: Mapping[str, Any], end: str) -> dict[str, Any]:
    """The message with ``end`` where it is to be continued."""
    if message.get("tool_calls"):
        raise SurefootError(
            "continue_final_message", "the final message ends with tool calls", "drop them"
        )
    return {**message, "content": message["content"] + end}


def _contents(messages: list[Any]) -> Iterator[str]:
    """The texts of messages, or of items, before anybody has looked at them."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _is_ids(prompt: list[Any]) -> bool:
    return not prompt or isinstance(prompt[0], int)
