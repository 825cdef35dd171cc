"""Logprobs in the shapes of OpenAI's and vLLM's answers.

Each position is JSON at once: as Python's objects a large answer's logprobs are hundreds of
thousands, and a garbage collection that looks through them holds everybody up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from surefoot.models.loading.tokenizer import IncrementalDetokenizer, Tokenizer
from surefoot.request import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_encode = msgspec.json.Encoder().encode


def _json(value: dict[str, Any]) -> Raw:
    return Raw(_encode(value))


class TokenTexts:
    """Tokens by themselves, as text: the bytes of one that is no whole character are spelled out
    (``bytes:\\xf0\\x9f``), as in OpenAI's answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """(text, bytes)."""
        known = self._known.get(token)
        if known is None:
            raw = self.tokenizer.token_bytes(token)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            known = self._known[token] = text, list(raw)
        return known

    def text(self, token: int) -> str:
        return self.of(token)[0]


class Offsets:
    """Where tokens begin in the text that they make up, in characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._at = start

    def next(self, token: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._detokenizer.push(token))
        return at


def chat_logprobs(texts: TokenTexts, scores: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """``logprobs`` of a chat choice, for these positions."""

    def written(score: TokenLogprobs) -> Raw:
        top = [_entry(texts, token, value) for token, value in score.top]
        return _json({**_entry(texts, score.token_id, score.logprob), "top_logprobs": top})

    return {"content": [written(score) for score in scores], "refusal": None}


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = texts.of(token)
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": raw}


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    scores: Iterable[TokenLogprobs | None],
    offsets: Offsets,
) -> dict[str, Any]:
    """``logprobs`` of a completion choice, for these positions; a first token of a prompt has
    none."""
    own: list[float | None] = []
    top: list[Raw | None] = []
    for score in scores:
        own.append(None if score is None else max(score.logprob, LOWEST))
        top.append(None if score is None else _json(_by_text(texts, score)))
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": own,
        "top_logprobs": top,
        "text_offset": [offsets.next(token) for token in tokens],
    }


def _by_text(texts: TokenTexts, score: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the one that is there."""
    pairs = [*score.top, (score.token_id, score.logprob)]
    return {texts.text(token): max(value, LOWEST) for token, value in pairs}


def prompt_logprobs(texts: TokenTexts, scores: Iterable[TokenLogprobs | None]) -> list[Raw | None]:
    """vLLM's ``prompt_logprobs``: by token id, the likeliest tokens and the one that is there."""
    return [None if score is None else _json(_by_id(texts, score)) for score in scores]


def _by_id(texts: TokenTexts, score: TokenLogprobs) -> dict[str, Any]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(score.top, start=1)]
    ranked.append((score.token_id, score.logprob, score.rank))
    return {
        str(token): {
            "logprob": max(value, LOWEST),
            "rank": rank,
            "decoded_token": texts.text(token),
        }
        for token, value, rank in ranked
    }
