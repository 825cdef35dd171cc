"""The server's answers: the same texts as offline, in the shapes that OpenAI's client reads."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import fresh_hidden
from server_harness import (
    LOOP,
    Server,
    emoji_model,
    offline,
    only,
    params_of,
    running_server,
    sse,
    wait_for,
)
from surefoot import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emoji_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running_server(model) as running:
        yield running
        running.wait_idle()
        # A front that is gone, however it went, takes its core along.
        core = running.core
        running.process.kill()
        wait_for(lambda: not Path(f"/proc/{core}").exists())


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return offline(model)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def repeating() -> dict[str, Any]:
    """A request whose text repeats itself, so that drafts are offered and right."""
    body = {"prompt": [5, 6, 7, 8] * 6, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    return {**body, "logit_bias": {"5": 100, "6": 100, "7": 100}}


def bodies(llm: LLM) -> list[dict[str, Any]]:
    """Requests of many kinds, stop strings that span tokens and characters among them."""
    common: dict[str, Any] = {"prompt": LOOP, "max_tokens": 50, "ignore_eos": True}
    emoji = {str(token): bias for token, bias in only(llm, "🙂🙃é a").items()}
    found = [
        {**common, "temperature": 0},
        {**common, "temperature": 1.2, "seed": 3, "top_p": 0.9, "min_p": 0.01},
        {**common, "temperature": 1, "seed": 4, "top_k": 9, "repetition_penalty": 1.2},
        {**common, "temperature": 1, "seed": 5, "n": 3, "frequency_penalty": 0.5},
        {**common, "temperature": 4, "seed": 7, "logit_bias": emoji, "n": 2},
    ]
    bases = [{**common, "temperature": 4, "seed": s, "logit_bias": emoji} for s in range(20)]
    stoppable = []
    for base, text in zip(bases, offline_texts(llm, bases), strict=True):
        at = max(text.rfind("🙂", 1, -2), text.rfind("🙃", 1, -2))
        if at > 0:
            stoppable.append((base, text, at))
    assert len(stoppable) >= 3, "there are no emoji to stop at"
    for base, text, at in stoppable[:3]:
        for keep in (False, True):
            stops = [text[at - 1 : at + 2], "never there"]
            found.append({**base, "stop": stops, "include_stop_str_in_output": keep})
        found.append({**base, "stop": text[at], "min_tokens": 20})
    return found


def offline_texts(llm: LLM, requests: list[dict[str, Any]]) -> list[str]:
    params = [params_of(body) for body in requests]
    outputs = llm.generate([body["prompt"] for body in requests], params)
    return [output.outputs[0].text for output in outputs]


def streamed(server: Server, body: dict[str, Any]) -> tuple[list[str], list[str], list[list[int]]]:
    """(texts, reasons, token ids) by choice, put together from a stream."""
    n = body.get("n", 1)
    texts, reasons, ids = [""] * n, [""] * n, [[] for _ in range(n)]
    answer = server.post("/v1/completions", **body, stream=True, return_token_ids=True)
    for event in sse(answer.text):
        for choice in event["choices"]:
            index = choice["index"]
            assert not reasons[index], "something came after the end"
            texts[index] += choice["text"]
            ids[index] += choice["token_ids"]
            reasons[index] = choice["finish_reason"] or ""
    return texts, reasons, ids


def test_streamed_is_whole_is_offline(server: Server, llm: LLM) -> None:
    every, stopped = bodies(llm), 0
    alone = llm.generate([body["prompt"] for body in every], [params_of(body) for body in every])
    with ThreadPoolExecutor(len(every)) as pool:
        wholes = pool.map(lambda body: server.complete(**body, return_token_ids=True), every)
        streams = pool.map(lambda body: streamed(server, body), every)
    for output, whole, (texts, reasons, ids) in zip(alone, wholes, streams, strict=True):
        for index, expected in enumerate(output.outputs):
            choice = whole["choices"][index]
            assert choice["text"] == expected.text == texts[index]
            assert choice["token_ids"] == expected.token_ids == ids[index]
            assert choice["finish_reason"] == expected.finish_reason == reasons[index]
            assert choice["stop_reason"] == expected.stop_reason
            stopped += isinstance(expected.stop_reason, str)
        used = whole["usage"]
        assert used["completion_tokens"] == sum(len(c.token_ids) for c in output.outputs)
        assert used["prompt_tokens"] == len(output.prompt_token_ids)
    assert stopped >= 6


def test_speculation_is_reported_and_can_be_chosen(server: Server) -> None:
    body = repeating()
    drafted = server.complete(**body)["usage"]["speculation"]
    [proposer] = drafted["proposers"]
    assert drafted["accepted"] > 0
    assert drafted["proposers"][proposer] == {key: drafted[key] for key in ("verified", "accepted")}
    assert drafted["accepted_length"] == pytest.approx(40 / drafted["rounds"])
    for choice in ("off", {"method": "off"}, {"method": "auto", "max_draft_tokens": 0}):
        assert server.complete(**body, speculation=choice)["usage"]["speculation"]["verified"] == 0
    headers = {"surefoot-speculation": f"{proposer}; max_draft_tokens=1"}
    limited = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()
    used = limited["usage"]["speculation"]
    assert 0 < used["verified"] < used["rounds"] and used["accepted_length"] <= 2


def test_sources_of_tokens_are_told_when_asked_for(server: Server, llm: LLM) -> None:
    body = {**repeating(), "surefoot": {"proposed_by": True}}
    whole = server.complete(**body)
    [choice] = whole["choices"]
    assert len(choice["surefoot"]["proposed_by"]) == 40
    names = [name for name in choice["surefoot"]["proposed_by"] if name]
    assert len(names) == whole["usage"]["speculation"]["accepted"] > 0
    events = sse(server.post("/v1/completions", **body, stream=True).text)
    told = [item for e in events for item in e["choices"][0]["surefoot"]["proposed_by"]]
    assert told == choice["surefoot"]["proposed_by"]
    pieces = [text for e in events for text, _ in e["choices"][0]["surefoot"]["pieces"]]
    assert "".join(pieces) == choice["text"]
    plain = server.complete(**{**body, "surefoot": None})
    assert "surefoot" not in plain["choices"][0]


def test_prompts_as_text_ids_and_batches(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode("a cat")
    common = {"max_tokens": 5, "temperature": 0}
    alone = server.complete(prompt="a cat", **common)["choices"][0]["text"]
    assert server.complete(prompt=ids, **common)["choices"][0]["text"] == alone
    for many in (["a cat", "a dog"], [ids, llm.tokenizer.encode("a dog")]):
        both = server.complete(prompt=many, n=2, **common)["choices"]
        assert [choice["index"] for choice in both] == [0, 1, 2, 3]
        assert both[0]["text"] == both[1]["text"] == alone != both[2]["text"]


def test_logprobs_match_offline(server: Server, llm: LLM) -> None:
    body = {"prompt": LOOP, "max_tokens": 8, "temperature": 1, "seed": 1, "logprobs": 3}
    output = llm.generate(LOOP, params_of(body))[0].outputs[0]
    assert output.logprobs is not None
    given = server.complete(**body)["choices"][0]
    scores = given["logprobs"]
    expected = [item.logprob for item in output.logprobs]
    assert scores["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    for entry, item in zip(scores["top_logprobs"], output.logprobs, strict=True):
        # By text, as OpenAI has it: the model's rows without a token all read alike.
        likely = {token for token, _ in item.top} | {item.token_id}
        assert len(entry) == len({llm.tokenizer.token_bytes(token) for token in likely})
    events = sse(server.post("/v1/completions", **body, stream=True).text)
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name, values in scores.items():
        joined = [value for part in parts for value in part[name]]
        if name in ("tokens", "text_offset"):
            assert joined == values
    offset, text = scores["text_offset"][-1], given["text"]
    assert scores["text_offset"][0] == 0 and 0 < offset <= len(text)


def test_echo_scores_the_prompt(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode(LOOP)
    echoed = server.complete(prompt=LOOP, echo=True, logprobs=1, max_tokens=0)
    [choice] = echoed["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == LOOP == "".join(scores["tokens"])
    assert echoed["usage"]["completion_tokens"] == 0
    params = params_of({"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1})
    expected = llm.generate(LOOP, params)[0].prompt_logprobs
    assert expected is not None
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(
        [item.logprob for item in expected if item], abs=1e-4
    )
    assert [LOOP[at] for at in scores["text_offset"]] == list(LOOP)
    body = {"prompt": [ids, ids[:5]], "echo": True, "logprobs": 0, "max_tokens": 3, "n": 2}
    whole = server.complete(**body, temperature=1, seed=2)
    for choice in whole["choices"]:
        prompt = ids if choice["index"] < 2 else ids[:5]
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 3
        assert choice["text"].startswith(llm.tokenizer.decode(prompt))
    joined = [""] * 4
    for event in sse(
        server.post("/v1/completions", **body, temperature=1, seed=2, stream=True).text
    ):
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    assert joined == [choice["text"] for choice in whole["choices"]]


def test_the_best_of_many_have_the_highest_mean_logprobs(server: Server) -> None:
    # Texts of many lengths.
    body = {"prompt": ["a cat", "a dog"], "max_tokens": 40, "seed": 5, "stop": list("aeiou")}
    answer = server.complete(**body, n=4, logprobs=0)
    every = answer["choices"]

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)

    best = server.complete(**body, n=2, best_of=4)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    ranked = [sorted(every[i : i + 4], key=mean, reverse=True)[:2] for i in (0, 4)]
    texts = [choice["text"] for choice in best["choices"]]
    assert texts == [choice["text"] for group in ranked for choice in group]
    assert best["choices"][0]["logprobs"] is None
    # All were generated.
    assert best["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_tokens_that_requests_rule_out(server: Server, llm: LLM) -> None:
    common = {"prompt": LOOP, "max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    letters = {str(token): bias for token, bias in only(llm, "theca").items()}
    ruled = (
        {"logit_bias": letters},
        {"logit_bias": letters, "bad_words": ["t", "ca"]},
        {"allowed_token_ids": llm.tokenizer.encode("hec")},
    )
    texts = []
    for more in ruled:
        body = {**common, **more}
        [choice] = server.complete(**body)["choices"]
        assert choice["text"] == llm.generate(LOOP, params_of(body))[0].outputs[0].text
        texts.append(choice["text"])
    assert "t" in texts[0] and "ca" in texts[0]
    assert "c" in texts[1] and "t" not in texts[1] and "ca" not in texts[1]
    assert set(texts[2]) == set("hec")


def test_prompt_logprobs_by_token_id(server: Server) -> None:
    answer = server.complete(prompt=[5, 6, 7], prompt_logprobs=2, max_tokens=1)
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, entry in zip((6, 7), rest, strict=True):
        assert str(token) in entry and 2 <= len(entry) <= 3
        assert entry[str(token)]["rank"] >= 1


def test_openai_client(client: openai.OpenAI, llm: LLM, model: Path) -> None:
    [listed] = client.models.list().data
    name = listed.id
    assert name == model.name and client.models.retrieve(name).id == name
    messages: Any = [{"role": "user", "content": "a cat"}]
    params = params_of({"max_tokens": 12, "temperature": 1, "seed": 9, "n": 2, "logprobs": 2})
    expected = llm.chat(messages, params)[0].outputs
    options: Any = {"model": name, "messages": messages, "max_completion_tokens": 12}
    options |= {"temperature": 1, "seed": 9, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**options)
    texts, lengths, usage = ["", ""], [0, 0], None
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    roles = []
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            roles.append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None and choice.logprobs.content is not None:
                lengths[choice.index] += len(choice.logprobs.content)
    assert roles.count("assistant") == 2
    for index, output in enumerate(expected):
        choice = answer.choices[index]
        assert choice.message.content == output.text == texts[index]
        assert choice.finish_reason == output.finish_reason
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert output.logprobs is not None
        assert lengths[index] == len(choice.logprobs.content) == len(output.logprobs)
        for entry, score in zip(choice.logprobs.content, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(score.logprob, abs=1e-4)
            assert bytes(entry.bytes or []) == llm.tokenizer.token_bytes(score.token_id)
            assert len(entry.top_logprobs) == 2
    assert usage is not None and answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens
    completed = client.completions.create(model=name, prompt="a cat", max_tokens=4, seed=1)
    assert completed.choices[0].finish_reason == "length"


def test_async_openai_client(server: Server, llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=(await client.models.list()).data[0].id,
            messages=[{"role": "user", "content": "a dog"}],
            max_tokens=20,
            seed=seed,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(12)))

    texts = asyncio.run(ask_all())
    params = [params_of({"max_tokens": 20, "seed": seed}) for seed in range(12)]
    talk: Any = [{"role": "user", "content": "a dog"}]
    expected = llm.chat([talk] * 12, params)
    assert texts == [output.outputs[0].text for output in expected]


REFUSED = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"max_tokens": 9999}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"logprobs": 99}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ({"top_k": 2**70}, "top_k"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"logit_bias": {str(2**70): 1}}, "logit_bias"),
    ({"prompt": [2**70]}, "prompt"),
    ({"min_tokens": 50, "max_tokens": 5}, "min_tokens"),
    ({"best_of": 3, "n": 4}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"best_of": 200}, "best_of"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids"),
    ({"priority": 2**70}, "priority"),
    ({"request_id": "a b"}, "request_id"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ({"speculation": "dragon"}, "speculation.method"),
    ({"speculation": {"method": "auto", "max_draft_tokens": 99}}, "speculation.max_draft_tokens"),
    ({"speculation": {"kind": "auto"}}, "speculation"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"echo": True, "prompt": [-1]}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda item: str(item)[:40])
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/completions", **{"prompt": "a", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param) and param.split(".")[0] in error["message"]


UNTYPED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True}}
NO_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "objct"}},
}
CHAT_REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [STRICT], "min_tokens": 2}, "min_tokens"),
    ({"tools": [{**STRICT, "function": {**NO_SCHEMA["function"], "strict": True}}]}, "tools"),
    (
        {"tools": [STRICT], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_ch",
    ),
    ({"tools": [STRICT], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
    ({"tools": [NO_SCHEMA], "tool_choice": "required"}, "tools"),
    ({"tools": [UNTYPED], "parallel_tool_calls": False, "ignore_eos": True}, "ignore_eos"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs.template"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED, ids=lambda item: str(item)[:40])
def test_chat_refuses_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **fields}
    answer = server.post("/v1/chat/completions", **body)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param)


def test_embeddings_are_served(server: Server, llm: LLM) -> None:
    texts = ["a cat", "a dog and a cat", "é"]
    answer = server.post("/v1/embeddings", input=texts, normalize=False)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    decoder, tokenizer = llm.engine.decoder, llm.tokenizer
    means = []
    for text, item in zip(texts, body["data"], strict=True):
        hidden = fresh_hidden(decoder, tokenizer.encode(text))
        normed = decoder.backend.rms_norm(hidden, decoder.norm, decoder.config.norm_eps)
        means.append(normed.double().mean(0).tolist())
        assert item["embedding"] == pytest.approx(means[-1], abs=1e-5)
    count = sum(len(tokenizer.encode(text)) for text in texts)
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    # OpenAI's client asks for base64; they have length 1 unless told otherwise.
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        told = client.embeddings.create(model=body["model"], input=texts).data
    for item, mean in zip(told, means, strict=True):
        assert item.embedding == pytest.approx([x / math.hypot(*mean) for x in mean], abs=1e-5)
    ids = tokenizer.encode(texts[1])
    plain: dict[str, Any] = {"input": [ids], "truncate_prompt_tokens": 3}
    [one] = server.post("/v1/embeddings", **plain).json()["data"]
    [same] = server.post("/v1/embeddings", input=ids[-3:], encoding_format="base64").json()["data"]
    raw = base64.b64decode(same["embedding"])
    assert one["embedding"] == pytest.approx(struct.unpack(f"<{len(raw) // 4}f", raw), abs=1e-6)


EMBEDDINGS_REFUSED = [
    ({"dimensions": 8}, "dimensions"),
    ({"input": []}, "input"),
    ({"input": "x" * 600}, "input"),
    ({"input": [999]}, "input"),
    ({"encoding_format": "int8"}, "encoding_format"),
    ({"stream": True}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), EMBEDDINGS_REFUSED)
def test_what_embeddings_do_not_have_is_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/embeddings", **{"input": "a", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_harmless_fields_and_values_are_accepted(server: Server) -> None:
    body = {"user": "me", "metadata": {"a": "b"}, "store": True, "best_of": 1, "suffix": None}
    server.complete(prompt="a", max_tokens=1, **body, response_format={"type": "text"})


def test_bodies_that_are_no_request(server: Server) -> None:
    deep = b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    json = {"content-type": "application/json"}
    for content in (b"{", b"\xff", b"[]", b"1", b'{"prompt": "\\ud800"}', deep, b'{"n": NaN}'):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = httpx.post(server.url + path, content=content, headers=json)
            assert answer.status_code == 400, (content[:20], answer.text)
            assert answer.json()["error"]["message"]
    assert server.get("/nowhere").json()["error"]["message"] == "Not Found"
    assert server.get("/v1/completions").status_code == 405
    wrong = server.post("/v1/completions", prompt="a", model="other")
    assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"


def test_json_must_be_called_so(server: Server) -> None:
    """A page of another origin may post plain text without asking the browser's leave."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    for headers in ({}, {"content-type": "text/plain"}):
        answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
    typed = {"content-type": "application/json"}
    assert httpx.post(server.url + "/v1/completions", content=body, headers=typed).is_success


def test_openai_client_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=client.models.list().data[0].id, prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    both: Any = {"extra_body": {"speculation": "off"}}
    both["extra_headers"] = {"surefoot-speculation": "auto"}
    with pytest.raises(openai.BadRequestError, match="speculation"):
        client.completions.create(model=client.models.list().data[0].id, prompt="a", **both)


def test_tokenize_and_back(server: Server, llm: LLM) -> None:
    text = "a 🙂 cat, é"
    ids = llm.tokenizer.encode(text)
    answer = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == llm.engine.max_model_len
    assert len(answer["token_strs"]) == len(ids)
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": text}
    talk: Any = [{"role": "user", "content": "a"}]
    assert server.post("/tokenize", messages=talk).json()["tokens"] == llm.render_chat(talk)
    for body in ({}, {"prompt": "a", "messages": talk}, {"prompt": "a", "tools": []}):
        assert server.post("/tokenize", **body).status_code == 400
    assert server.post("/detokenize", tokens=[9999]).status_code == 400


def test_version_and_documents(server: Server) -> None:
    from surefoot import __version__

    assert server.get("/version").json() == {"version": __version__}
    assert server.get("/health").status_code == 200
    document = server.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    page = server.get("/docs")
    assert page.status_code == 200 and "://" not in page.text


def test_limits_are_printed(server: Server, llm: LLM) -> None:
    printed = "\n".join(server.lines)
    for name in (
        "tool calls read as hermes",
        "max_model_len 512",
        "max_num_seqs 8",
        "kv_cache_memory",
    ):
        assert name in printed
    assert f"for {llm.engine.kv_tokens} tokens" in printed


def test_tools_reach_the_template(server: Server, llm: LLM) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    talk: Any = [{"role": "user", "content": "a"}]
    ids = server.post("/tokenize", messages=talk, tools=tools).json()["tokens"]
    assert ids == llm.render_chat(talk, tools=tools)
    body: dict[str, Any] = {"messages": talk, "tools": tools, "max_tokens": 2}
    used = server.post("/v1/chat/completions", **body).json()["usage"]
    assert used["prompt_tokens"] == len(ids)
    without = server.post("/v1/chat/completions", **body, tool_choice="none").json()["usage"]
    assert without["prompt_tokens"] == len(llm.render_chat(talk))


def test_metrics_count_what_happened(server: Server) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "request_generation_tokens_count")
    before = [server.metric(f"vllm:{name}") for name in names]
    server.complete(**repeating(), n=2)
    after = [server.metric(f"vllm:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [24, 80, 2]
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert server.metric(f"vllm:{name}_seconds_count") > 0
    drafted = server.metric("surefoot_verified_tokens_total")
    assert drafted == server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert drafted == server.metric("surefoot_verified_tokens_by_position_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") > 0
    assert accepted == server.metric("surefoot_accepted_tokens_total")
    assert 0 < server.metric("vllm:spec_decode_num_drafts_total") <= drafted
    assert server.metric("surefoot_rows_total") > server.metric("surefoot_rounds_total") > 0
    offered, verified, accepted = (
        by_position(server, f"surefoot_{kind}_tokens_by_position_total", "ngram")
        for kind in ("offered", "verified", "accepted")
    )
    assert list(offered) == list(verified) == list(accepted) == ["0", "1", "2", "3"]
    assert all(offered[i] >= verified[i] >= accepted[i] > 0 for i in verified)
    assert sum(offered.values()) == server.metric("surefoot_offered_tokens_total")


def by_position(server: Server, name: str, proposer: str) -> dict[str, float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return {s.labels["position"]: s.value for s in samples if s.labels["proposer"] == proposer}
