"""OpenAI's responses and Anthropic's messages: what they ask for, and what they are told, by the
types of OpenAI's client and by Anthropic's documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from server_harness import write_emoji_tokenizer
from server_scripted import END, ScriptedCore, ask
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.messages import Add
from tiny_models import write_tokenizer

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}: {{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant: {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TEXT = f"<think>\nWell, é.\n</think>\n\nLet me see.\n{CALL}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    write_emoji_tokenizer(folder)
    tokenizer = read_hf_tokenizer(folder)
    # What tells the formats of calls and reasoning stands in a template.
    tokenizer.replace_chat_template("{#<tool_call>#}" + TEMPLATE)
    return tokenizer


def script(tokenizer: Tokenizer, text: str, size: int = 3, end: bool = True) -> list[list[int]]:
    ids = [*tokenizer.encode(text), *([END] if end else [])]
    return [ids[at : at + size] for at in range(0, len(ids), size)]


def post(
    tokenizer: Tokenizer, path: str, *bodies: Any, text: str = TEXT, end: bool = True, **more: Any
) -> tuple[list[httpx.Response], list[Add]]:
    """The answers to these bodies from a model that says ``text``, and what the core was asked."""

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        answers = [await client.post(path, json=body, **more) for body in bodies]
        return answers, [item for item in core.received if isinstance(item, Add)]

    return ask(tokenizer, script(tokenizer, text, end=end), use)


def prompt(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> str:
    [answer], [add] = post(tokenizer, path, body, text="a")
    assert answer.status_code == 200, answer.text
    return tokenizer.decode(add.prompt)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream whose events have names."""
    assert answer.status_code == 200, answer.text
    found = []
    *parts, rest = answer.text.split("\n\n")
    assert rest == ""
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


TOOL = {"type": "function", "name": "weather", "parameters": WEATHER}
ASKED = {"input": "a cat", "tools": [TOOL], "instructions": "Be short."}


def test_responses_are_whole_what_they_are_streamed(tokenizer: Tokenizer) -> None:
    [whole, streamed], _ = post(tokenizer, RESPONSES, ASKED, {**ASKED, "stream": True})
    response = whole.json()
    OpenAIResponse.model_validate(response, strict=True)
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Well, é."}]
    [part] = message["content"]
    assert part["text"] == "Let me see." and message["role"] == "assistant"
    assert call["name"] == "weather" and json.loads(call["arguments"]) == {"city": "Zürich"}
    assert response["status"] == "completed" and response["store"] is False
    used = response["usage"]
    assert 0 < used["output_tokens_details"]["reasoning_tokens"] < used["output_tokens"]
    events = events_of(streamed)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        adapter.validate_python(event, strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    folded = [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]]
    block = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert folded == [
        *("created", "in_progress"),
        *(*block[0], "reasoning_text.delta", "reasoning_text.done", *block[1]),
        *(*block[0], "output_text.delta", "output_text.done", *block[1]),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert kinds.count("output_text.delta") > 1 and kinds.count("reasoning_text.delta") > 1
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    told = events[-1]["response"]
    for answer in (response, told):
        # Ids are new each time.
        text = json.dumps(answer["output"]).replace(answer["id"][5:], "ID")
        answer["output"] = text.replace(answer["output"][2]["call_id"], "CALL")
    differing = {name for name in response if response[name] != told[name]}
    assert differing <= {"id", "created_at"}, differing
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert deltas == "Let me see."


def test_responses_that_are_cut(tokenizer: Tokenizer) -> None:
    bodies = {"input": "a"}, {"input": "a", "stream": True}
    [whole, streamed], _ = post(tokenizer, RESPONSES, *bodies, text="a cat", end=False)
    for response in (whole.json(), events_of(streamed)[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_items_become_messages(tokenizer: Tokenizer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "d"}]},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "developer", "content": "g"},
    ]  # fmt: skip
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    text = prompt(tokenizer, RESPONSES, {"input": items, "instructions": "i"})
    assert text == (
        f"[system: |i][user: |a][assistant: hm|b{json.dumps(calls)}]"
        "[tool: |c(1)][tool: |d(2)][assistant: |e][assistant: |f][system: |g][assistant: "
    )


def test_fields_of_responses_reach_the_engine(tokenizer: Tokenizer) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = {
        "input": "a",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "seed": 4,
        "priority": 2,
        "truncate_prompt_tokens": 2,
        "bad_words": ["x"],
        "speculation": {"method": "off"},
        "text": {"format": form},
        "metadata": {"a": "b"},
        "previous_response_id": None,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
    }
    [answer], [add] = post(tokenizer, RESPONSES, body)
    response, params = answer.json(), add.params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (7, 0.5, 3, 4)
    assert add.priority == 2 and len(add.prompt) == 2 and params.bad_words == ["x"]
    assert add.speculation.method == "off"
    assert params.structured_outputs is not None
    assert json.loads(str(params.structured_outputs.json)) == schema
    assert response["metadata"] == {"a": "b"} and response["temperature"] == 0.5
    assert response["text"]["format"]["schema"] == schema
    OpenAIResponse.model_validate(response, strict=True)


RESPONSES_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "earlier items in input"),
    ({"background": True}, "background", "stream"),
    ({"truncation": "auto"}, "truncation", "truncate_prompt_tokens"),
    ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
    ({"input": []}, "input", ""),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0]", "text only"),
    ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role", ""),
    ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood", "no field"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]", "encrypted"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "give functions"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", ""),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
     "input", "no JSON"),
    ({"colour": 1}, "colour", "no field"),
]  # fmt: skip


def test_what_responses_do_not_have_is_refused_by_name(tokenizer: Tokenizer) -> None:
    bodies = [{"input": "a", **more} for more, _, _ in RESPONSES_REFUSED]
    # A template that knows no effort.
    own = Tokenizer(tokenizer.backend, tokenizer.settings)
    own.replace_chat_template("{{ messages[0].content }}{{ tools }}")
    answers, _ = post(own, RESPONSES, *bodies)
    for answer, (more, param, words) in zip(answers, RESPONSES_REFUSED, strict=True):
        assert answer.status_code == 400, (more, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param and words in error["message"], (more, error)


SAID = {"messages": [{"role": "user", "content": "a cat"}], "max_tokens": 50}
CUSTOM = {"name": "weather", "input_schema": WEATHER, "cache_control": {"type": "ephemeral"}}


def test_messages_are_whole_what_they_are_streamed(tokenizer: Tokenizer) -> None:
    body = {**SAID, "tools": [CUSTOM], "system": [{"type": "text", "text": "Be short."}]}
    [whole, streamed], _ = post(tokenizer, MESSAGES, body, {**body, "stream": True})
    message = whole.json()
    assert (message["type"], message["role"], message["stop_reason"]) == (
        *("message", "assistant"),
        "tool_use",
    )
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Well, é.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "weather",
        {"city": "Zürich"},
    )
    start, *events, delta, stop = events_of(streamed)
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    assert start["message"]["content"] == [] and start["message"]["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == message["usage"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert index == len(blocks)
            blocks.append({**event["content_block"], "open": True, "json": ""})
            continue
        assert blocks[index]["open"] and index == len(blocks) - 1
        if kind == "content_block_stop":
            blocks[index]["open"] = False
            continue
        assert kind == "content_block_delta"
        match event["delta"]:
            case {"type": "text_delta", "text": more}:
                blocks[index]["text"] += more
            case {"type": "thinking_delta", "thinking": more}:
                blocks[index]["thinking"] += more
            case {"type": "input_json_delta", "partial_json": more}:
                blocks[index]["json"] += more
    for block, wanted in zip(blocks, message["content"], strict=True):
        arguments = block.pop("json")
        assert not block.pop("open")
        if arguments:
            block |= {"input": json.loads(arguments), "id": wanted["id"]}
        assert block == wanted


def test_blocks_become_messages(tokenizer: Tokenizer) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "d"}]},
            {"type": "tool_result", "tool_use_id": "2", "is_error": True},
            {"type": "text", "text": "e"},
        ]},
    ]  # fmt: skip
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    text = prompt(tokenizer, MESSAGES, {**SAID, "messages": turns, "system": "s"})
    assert text == (
        f"[system: |s][user: |a\nb][assistant: hm|c{json.dumps(call)}]"
        "[tool: |d(1)][tool: |(2)][user: |e][assistant: "
    )
    # What the assistant has begun goes on.
    begun = [*turns, {"role": "assistant", "content": "It is "}]
    text = prompt(tokenizer, MESSAGES, {**SAID, "messages": begun})
    assert text.endswith("[user: |e][assistant: |It is ")
    off = prompt(tokenizer, MESSAGES, {**SAID, "thinking": {"type": "disabled"}})
    assert off.endswith("[assistant: <think></think>")


def test_tokens_of_messages_are_counted(tokenizer: Tokenizer) -> None:
    body = {"messages": SAID["messages"], "tools": [CUSTOM], "system": "s"}
    [counted], _ = post(tokenizer, f"{MESSAGES}/count_tokens", body)
    [answer], [add] = post(tokenizer, MESSAGES, {**body, "max_tokens": 5})
    assert counted.json() == {"input_tokens": len(add.prompt)}
    assert answer.json()["usage"]["input_tokens"] == len(add.prompt)


def test_how_messages_end(tokenizer: Tokenizer) -> None:
    def ends(text: str, end: bool, **more: Any) -> tuple[Any, Any]:
        [answer], _ = post(tokenizer, MESSAGES, {**SAID, **more}, text=text, end=end)
        return answer.json()["stop_reason"], answer.json()["stop_sequence"]

    assert ends("a cat", True) == ("end_turn", None)
    assert ends("a cat", False) == ("max_tokens", None)
    assert ends("a cat", False, stop_sequences=["c"]) == ("stop_sequence", "c")
    broken = CALL.replace("}}", "")
    [answer], _ = post(tokenizer, MESSAGES, {**SAID, "tools": [CUSTOM]}, text=broken)
    [call] = answer.json()["content"]
    assert "Zürich" in call["input"]["INVALID_JSON"]


MESSAGES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"container": "x"}, "container"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
     "context_management"),
    ({"stop_sequences": [""]}, "stop_sequences"),
]  # fmt: skip


def test_what_messages_do_not_have_is_refused_in_anthropics_form(tokenizer: Tokenizer) -> None:
    answers, _ = post(tokenizer, MESSAGES, *({**SAID, **more} for more, _ in MESSAGES_REFUSED))
    for answer, (more, param) in zip(answers, MESSAGES_REFUSED, strict=True):
        assert answer.status_code == 400, (more, answer.text)
        body = answer.json()
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(f"{param}:"), (more, body)
    [missing], _ = post(tokenizer, MESSAGES, {**SAID, "model": "other"})
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


def test_the_key_may_come_as_anthropic_sends_it(tokenizer: Tokenizer) -> None:
    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Sequence[httpx.Response]:
        keys = {"x-api-key": "secret"}, {"x-api-key": "wrong"}, {"authorization": "Bearer secret"}
        return [await client.post(MESSAGES, json=SAID, headers=key) for key in keys]

    answers = ask(tokenizer, script(tokenizer, "a"), use, api_keys=("secret",))
    assert [answer.status_code for answer in answers] == [200, 401, 200]
    assert answers[1].json()["error"]["type"] == "authentication_error"


def test_openais_client_reads_responses(tokenizer: Tokenizer) -> None:
    async def use(http: Any, core: ScriptedCore) -> Any:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        tools: Any = [{**TOOL, "strict": False}]
        options: Any = {"model": "scripted", "input": "a cat", "tools": tools}
        whole = await client.responses.create(**options)
        async with client.responses.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        return whole, kinds, final

    whole, kinds, final = ask(tokenizer, script(tokenizer, TEXT), use)
    assert whole.output_text == final.output_text == "Let me see."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert kinds[-1] == "response.completed"
