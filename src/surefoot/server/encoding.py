"""Texts to token ids, beside everybody else's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import Tokenizer

SHORT_TEXT = 4096
"""Characters that are encoded on the spot; more go to a thread, so that nobody waits."""
LONG_TEXT = 1 << 18
"""More characters than this are encoded one text at a time: each takes a processor for a while, and
a hundred bytes per token."""
MOST_CHARACTERS, MOST_TOKENS = 1 << 19, 1 << 18
"""Of a text whose tokens were asked for, rather than its continuation, and the other way round."""


class Encoder:
    """Encodes for a model with room for ``most`` tokens. Longer texts are refused; where their
    length says so already, before they are encoded."""

    def __init__(self, tokenizer: Tokenizer, most: int) -> None:
        self.tokenizer = tokenizer
        self.most = most
        self._long = ThreadPoolExecutor(1, "long-texts")

    async def ids(
        self, text: str, add_special_tokens: bool, tokenizer: Tokenizer | None = None
    ) -> list[int]:
        """Ids of a prompt, by another tokenizer where one is given. Raises SurefootError."""
        tokenizer = tokenizer or self.tokenizer
        self.check([text], tokenizer=tokenizer)
        return await self._encode(tokenizer, text, add_special_tokens, self.most)

    async def any_ids(
        self, text: str, add_special_tokens: bool, tokenizer: Tokenizer | None = None
    ) -> list[int]:
        """Ids of a text that need not fit the model's context. Raises SurefootError."""
        self.check_asked([text])
        return await self._encode(tokenizer or self.tokenizer, text, add_special_tokens, None)

    async def _encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int | None
    ) -> list[int]:
        if len(text) <= SHORT_TEXT:
            return tokenizer.encode(text, add_special_tokens, most)
        pool = self._long if len(text) > LONG_TEXT else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, tokenizer.encode, text, add_special_tokens, most)

    def check(
        self, texts: Sequence[str], option: str = "prompt", tokenizer: Tokenizer | None = None
    ) -> None:
        """Refuse a prompt that is, or has in it, texts whose lengths say that it is too long.
        Raises SurefootError."""
        count = sum(map(len, texts))
        if count <= self.most:
            return
        lengths = (tokenizer or self.tokenizer).lengths
        if lengths is not None and lengths.exceed(texts, self.most):
            raise SurefootError(option, too_long(count, "characters", self.most), "shorten it")

    @staticmethod
    def check_asked(texts: Sequence[str], option: str = "prompt") -> None:
        """Refuse more than is tokenised for its own sake. Raises SurefootError."""
        count = sum(map(len, texts))
        if count > MOST_CHARACTERS:
            problem = f"has {count} characters, more than {MOST_CHARACTERS}"
            raise SurefootError(option, problem, "send it in pieces")


def too_long(count: int, what: str, most: int) -> str:
    """The problem of a prompt that has ``count`` of something."""
    return f"has {count} {what}, which are more than {most} tokens, the most there is room for"
