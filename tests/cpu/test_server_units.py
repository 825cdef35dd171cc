"""The server's parts that need no server."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from surefoot.errors import SurefootError
from surefoot.request import Request, SamplingParams, SpeculationParams, TokenLogprobs
from surefoot.server.chat_schema import ChatRequest
from surefoot.server.errors import field_path
from surefoot.server.fields import read_speculation_header
from surefoot.server.generation import Choice
from surefoot.server.guards import ApiKey
from surefoot.server.logprobs import prompt_logprobs
from surefoot.server.messages import Add, News, decode_to_core, encode, pack_score
from surefoot.server.schema import CompletionRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", SpeculationParams("off")),
        (" auto ; max_draft_tokens = 3", SpeculationParams("auto", 3)),
        ("auto; max_draft_tokens=x", None),
        ("auto; other=3", None),
        ("auto; max_draft_tokens=3; max_draft_tokens=4", None),
        ("", None),
    ],
)
def test_speculation_header(text: str, expected: SpeculationParams | None) -> None:
    if expected is None:
        with pytest.raises(SurefootError):
            read_speculation_header(text)
    else:
        assert read_speculation_header(text) == expected


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer secret", 200),
        (b"Bearer secrets", 401),
        (b"Bearer secret ", 401),
        (b"Bearer secre", 401),
        (b"Bearer ", 401),
        (b"", 401),
        (b"Bearer other", 200),
        (b"bearer secret", 200),
        (b"Basic secret", 401),
        (b"secret", 401),
        (b"Bearer secret\xff", 401),
        (None, 401),
    ],
)
def test_the_key_must_be_equal(header: bytes | None, status: int) -> None:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header)]
    scope = {"type": "http", "path": "/v1/models", "headers": headers, "method": "GET"}
    asyncio.run(ApiKey(app, ["other", "secret"])(scope, receive, send))
    assert sent[0]["status"] == status


def test_places_of_tokens_in_their_drafts() -> None:
    """From 1; the target's own have none."""
    request = Request("r", (3,), SamplingParams(), SpeculationParams(), 0, 99)
    stream: Any = SimpleNamespace(push=lambda tokens, last: None, stopped_by=None)
    generation: Any = None
    choice = Choice(0, request, stream, generation)
    choice.enter(News("r", [5], offered=2), ["ngram"])
    choice.enter(News("r", [6, 7, 8], 0, 0, verified=3, accepted=2), ["ngram"])
    assert request.output == [5, 6, 7, 8]
    assert choice.draft_positions == [None, 1, 2, None]
    assert request.proposed_by == [None, "ngram", "ngram", None]


@pytest.mark.parametrize("scores", [[], [-1.0, -3.0], [-1.0, -3.0, -100.0]])
def test_logprobs_stay_packed_until_they_are_told(scores: list[float]) -> None:
    request = Request("r", (2, 3), SamplingParams(logprobs=1), SpeculationParams(), 0, 99)
    stream: Any = SimpleNamespace(push=lambda tokens, last: None, stopped_by=None, kept=2)
    generation: Any = None
    choice = Choice(0, request, stream, generation)
    told = [TokenLogprobs(7, value, 2, ((3, -0.5),)) for value in scores]
    for score in told:
        choice.enter(News("r", [7], logprobs=[pack_score(score)]), [])
    # A garbage collection has nothing to look through.
    assert not any(map(gc.is_tracked, choice.scores)) and not request.logprobs
    assert list(choice.logprobs(0, 9)) == told
    assert list(choice.logprobs(1, 2)) == told[1:2]
    # Of the text's two tokens.
    assert choice.mean_logprob() == (-2.0 if scores else -math.inf)


def test_ranks_of_prompt_tokens() -> None:
    """The likeliest are numbered from 1; the one that is there has a rank of its own."""
    texts: Any = SimpleNamespace(text=str)
    scores = [None, TokenLogprobs(7, -9.0, 41, ((3, -0.5), (4, -1.5))), TokenLogprobs(3, -1.0, 1)]
    none, first, second = json.loads(msgspec.json.encode(prompt_logprobs(texts, scores)))
    assert none is None
    assert {token: entry["rank"] for token, entry in first.items()} == {"3": 1, "4": 2, "7": 41}
    assert first["7"] == {"logprob": -9.0, "rank": 41, "decoded_token": "7"}
    assert {token: entry["rank"] for token, entry in second.items()} == {"3": 1}


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("messages", 0, "content", "str"), "messages[0].content"),
        (("prompt", "list[int]", 3), "prompt"),
        (("stream_options", "other"), "stream_options.other"),
        ((), None),
    ],
)
def test_field_paths(location: tuple[Any, ...], path: str | None) -> None:
    assert field_path(location) == path


def test_neutral_values_are_told_from_others_by_type() -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    ChatRequest.model_validate({**body, "best_of": 1})
    for value in (True, 2, "1"):
        with pytest.raises(ValueError, match="best_of"):
            ChatRequest.model_validate({**body, "best_of": value})


def test_every_sampling_parameter_crosses_the_socket() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "logit_bias": {"4": -3.0},
        "seed": 2**63 - 1,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "bad_words": ["x"],
        "allowed_token_ids": [4, 5],
        "n": 3,
    }
    params = CompletionRequest.model_validate({"prompt": "a", **fields}).sampling({}, 0, {})
    speculation = SpeculationParams("off", 3)
    message = decode_to_core(encode(Add(["0"], [1, 2], params, speculation)))
    assert isinstance(message, Add) and message.speculation == speculation
    for name, value in {**fields, "logit_bias": {4: -3.0}}.items():
        assert getattr(message.params, name) == value
