"""Large requests: refused before they are worked on, or worked on beside everybody else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from server_harness import write_emoji_tokenizer
from server_scripted import END, READY, ask
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.token_lengths import TokenLengths, token_lengths
from surefoot.models.loading.tokenizer import Tokenizer as OurTokenizer
from surefoot.server.chat_messages import Message
from surefoot.server.encoding import LONG_TEXT, MOST_TOKENS
from surefoot.server.json_limits import MOST_CONTAINERS, MOST_DEPTH, MOST_ENTRIES, MOST_MEMBERS
from surefoot.server.translating import Conversation
from tiny_models import write_tokenizer

BYTES = {character: index for index, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> OurTokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    write_emoji_tokenizer(folder)
    return read_hf_tokenizer(folder)


def byte_level(
    missing: str = "", normalizer: Any = None, more: Any = None, **options: Any
) -> Tokenizer:
    """Byte by byte, but ``aa`` is one token, and the characters of ``missing`` are none."""
    vocab = {piece: index for piece, index in BYTES.items() if piece not in missing}
    backend = Tokenizer(models.BPE({**vocab, "aa": 300}, [("a", "a")], **options))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False), *([more] if more else [])]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def with_added(backend: Tokenizer, **options: Any) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<|end|>", **options)])
    return backend


def fallback() -> Tokenizer:
    backend = Tokenizer(models.BPE({**FALLBACK, "a": 256}, [], byte_fallback=True))
    backend.normalizer = normalizers.Prepend("▁")
    return backend


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "a byte is missing": lambda: byte_level(missing="Ĉ"),
    "composed": lambda: byte_level(normalizer=normalizers.NFKC()),
    "special": lambda: with_added(byte_level()),
    "fallback": fallback,
}
UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "white space is dropped": lambda: byte_level(more=pre_tokenizers.Whitespace()),
    "stripped": lambda: byte_level(normalizer=normalizers.Strip()),
    "a special token takes the space behind it": lambda: with_added(byte_level(), rstrip=True),
    "unknown characters are one token": lambda: byte_level(unk_token="aa", fuse_unk=True),
    "unknown characters are dropped": lambda: Tokenizer(models.BPE({"a": 0}, [])),
    "continuations are missing": lambda: byte_level(missing="¡"),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
}


@pytest.mark.parametrize("kind", KNOWN)
@settings(max_examples=40)
@given(parts=st.lists(st.sampled_from([*"aaaab \t\x08é\u0301e🙂\u1f82", "<|end|>"])))
def test_no_text_has_fewer_tokens_than_its_length_says(kind: str, parts: list[str]) -> None:
    backend, text = KNOWN[kind](), "".join(parts)
    lengths = token_lengths(backend)
    assert lengths is not None
    for whole in (text, text * 9, "aa" * len(text)):
        assert not lengths.exceed([whole], len(backend.encode(whole).ids))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_some_lengths_say_nothing(kind: str) -> None:
    assert token_lengths(UNKNOWN[kind]()) is None


def test_texts_of_too_many_tokens() -> None:
    for lengths, text in ((TokenLengths(3), "x" * 7), (TokenLengths(3, "\x08"), "x\x08" * 7)):
        assert [lengths.exceed([text], most) for most in range(5)] == [True] * 3 + [False] * 2
    assert not TokenLengths(3, "\x08").exceed(["\x08" * 99], 0)
    assert token_lengths(byte_level(missing="Ĉ")) == TokenLengths(2, "\x08")


def post(tokenizer: OurTokenizer, path: str, body: Any, **settings: Any) -> tuple[Any, int, int]:
    """(answer, turns of the event loop meanwhile, requests that reached the core)."""

    async def use(client: httpx.AsyncClient, core: Any) -> tuple[Any, int, int]:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        turning = asyncio.ensure_future(turn())
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        turning.cancel()
        return answer, turns, len(core.received)

    return ask(tokenizer, [[5], [END]], use, **settings)


def test_a_text_that_is_too_long_is_refused_unread(
    tokenizer: OurTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OurTokenizer, "encode", None)
    text = "x" * 8_000_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["y" * 20_000, text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        answer, _, reached = post(tokenizer, path, body, max_body_bytes=9_000_000)
        assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] in body or path == "/tokenize"
        assert not reached


def test_everybody_has_turns_while_a_long_text_is_encoded(tokenizer: OurTokenizer) -> None:
    """The text may fit, as far as its length tells."""
    roomy = {name: getattr(READY, name) for name in READY.__struct_fields__}
    roomy.update(max_model_len=1 << 19, kv_tokens=1 << 19)
    text = "the cat sat on the mat. " * (3 * LONG_TEXT // 24)
    answer, turns, reached = post(
        tokenizer, "/v1/completions", {"prompt": text}, ready=type(READY)(**roomy)
    )
    assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]
    assert turns > 20 and not reached


CHAT, CALL = "/v1/chat/completions", "messages[0].tool_calls[0].function.arguments"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def call(arguments: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls}


MANY: dict[str, tuple[str, Any, str | None]] = {
    "prompts": ("/v1/completions", {"prompt": ["a"] * 1000}, "prompt"),
    "texts": ("/v1/completions", {"prompt": ["a"] * 3, "n": 7}, "n"),
    "ids": ("/v1/completions", {"prompt": [5] * 1_000_000}, "prompt"),
    "ids of one": ("/v1/completions", {"prompt": [[5], [5] * 5000]}, "prompt"),
    "mistaken ids": ("/v1/completions", {"prompt": [5, *["a"] * 4000]}, "prompt"),
    "messages": ("/v1/chat/completions", {"messages": [{}] * 5000}, "messages"),
    "lists": ("/v1/completions", b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}", None),
    "objects": ("/tokenize", {"messages": [{"a": {}}] * MOST_CONTAINERS}, None),
    "entries": ("/v1/completions", {"prompt": "a", "stop": ["x"] * (MOST_ENTRIES + 1)}, None),
    "members": ("/v1/completions", {f"x{i}": 1 for i in range(MOST_MEMBERS + 1)}, None),
    "values": ("/v1/completions", b'{"prompt": [' + b"5," * ((1 << 20) + 1) + b"5]}", None),
    "levels": ("/v1/chat/completions", {"tools": nested(MOST_DEPTH)}, None),
    "arguments": (CHAT, {"messages": [call("[" + "[]," * MOST_CONTAINERS + "[]]")]}, CALL),
    "levels of arguments": (CHAT, {"messages": [call(json.dumps(nested(MOST_DEPTH + 1)))]}, CALL),
    "unknown fields": (
        "/v1/completions",
        {"prompt": "a", **{f"x{i}": 1 for i in range(9999)}},
        "x0",
    ),
    "biases": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {i: "" for i in range(2000)}},
        "logit_bias",
    ),
    "stop tokens": (
        "/v1/completions",
        {"prompt": "a", "stop_token_ids": [5] * 129},
        "stop_token_ids",
    ),
    "characters to stop": (
        "/v1/completions",
        {"prompt": "a", "stop": ["x" * 9000]},
        "stop",
    ),
    "tokens": ("/detokenize", {"tokens": [5] * (MOST_TOKENS + 1)}, "tokens"),
}


@pytest.mark.parametrize("kind", MANY)
def test_too_many_of_something_are_counted_first(tokenizer: OurTokenizer, kind: str) -> None:
    path, body, field = MANY[kind]
    answer, _, reached = post(tokenizer, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field or error["param"].startswith(f"{field}[")
    assert len(answer.content) < 500 and not reached


def test_brackets_in_texts_are_no_lists(tokenizer: OurTokenizer) -> None:
    text = '{["\\' * 20_000
    assert text.count("[") + text.count("{") > MOST_CONTAINERS
    answer, _, _ = post(tokenizer, "/tokenize", {"prompt": text})
    assert answer.json()["tokens"] == tokenizer.encode(text)


def test_answers_have_no_more_logprobs_than_fit(tokenizer: OurTokenizer) -> None:
    for field, more in (
        ("prompt_logprobs", {"prompt": [[5] * 4000] * 6, "n": 2, "max_tokens": 1}),
        ("logprobs", {"prompt": ["a"] * 6, "n": 2, "max_tokens": 4000}),
    ):
        body = {**more, field: 50}
        answer, _, reached = post(tokenizer, "/v1/completions", body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == field and not reached
        body[field] = 5
        assert post(tokenizer, "/v1/completions", body)[0].status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_large_conversations_are_read_aside(
    tokenizer: OurTokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once."""
    threads: list[threading.Thread] = []
    translate, plain = Conversation.__init__, Message.plain

    def translated(self: Conversation) -> None:
        threads.append(threading.current_thread())
        translate(self)

    def rendered(self: Message, index: int) -> Any:
        if not index:
            threads.append(threading.current_thread())
        return plain(self, index)

    monkeypatch.setattr(Conversation, "__init__", translated)
    monkeypatch.setattr(Message, "plain", rendered)
    kind = "input_text" if "responses" in path else "text"
    turn = {"role": "user", "content": [{"type": kind, "text": "a"}]}
    name = "input" if "responses" in path else "messages"
    more = {} if "responses" in path else {"max_tokens": 5}
    answer, _, reached = post(tokenizer, path, {name: [turn] * 3000, **more})
    assert answer.status_code == 400 and "tokens" in answer.text and not reached
    assert len(threads) == (1 if path == CHAT else 2) and len({*threads}) == 1
    assert threads[0] is not threading.main_thread()


def test_texts_are_refused_before_they_are_rendered(
    tokenizer: OurTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OurTokenizer, "render_chat", None)
    part = {"type": "text", "text": "x" * 3_000_000}
    for body in (
        {"messages": [{"role": "user", "content": [part, part]}]},
        {"messages": [{"role": "user", "content": "y" * 3_000_000}] * 2},
    ):
        for more in ({}, {"truncate_prompt_tokens": 5}):
            answer, _, _ = post(tokenizer, CHAT, {**body, **more}, max_body_bytes=9_000_000)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "messages"
            assert "6000000 characters" in error["message"]
