"""litellm, as people call servers that speak OpenAI's language with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import litellm
import pytest

from server_harness import Server, offline, params_of

SAMPLING: dict[str, Any] = {"temperature": 1, "seed": 3}
QUESTION = [{"role": "user", "content": "How is it in Bern?"}]
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Bern", "Basel"]}, "sunny": {"type": "boolean"}},
    "required": ["town", "sunny"],
    "additionalProperties": False,
}


@pytest.fixture
def options(server: Server) -> dict[str, Any]:
    return {
        "model": "openai/llama-0",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "max_tokens": 200,
        "num_retries": 0,
        **SAMPLING,
    }


def test_a_chat_streams_the_text_that_it_gets_whole(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **options)
    chunks = litellm.completion(messages=QUESTION, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text and text == whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def test_structured_output_is_as_asked_for(options: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(messages=QUESTION, response_format=form, **options)
    assert set(json.loads(answer.choices[0].message.content)) == {"town", "sunny"}


def test_functions_are_called(options: dict[str, Any]) -> None:
    function = {"name": "weather", "parameters": SCHEMA, "strict": True}
    tools = [{"type": "function", "function": function}]
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {"messages": QUESTION, "tools": tools, "tool_choice": choice, **options}
    [call] = litellm.completion(**asked).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"town", "sunny"}
    pieces = [chunk.choices[0].delta for chunk in litellm.completion(**asked, stream=True)]
    calls = [each for piece in pieces for each in piece.tool_calls or []]
    assert "".join(each.function.arguments or "" for each in calls) == call.function.arguments


def test_completions_have_logprobs(options: dict[str, Any], model: Path) -> None:
    asked = {**options, "model": "text-completion-openai/llama-0", "max_tokens": 8}
    answer = litellm.text_completion(prompt="the cat sat", logprobs=2, **asked)
    params = params_of({**SAMPLING, "max_tokens": 8, "logprobs": 2})
    [output] = offline(model).generate("the cat sat", params)
    [expected] = output.outputs
    assert answer.choices[0].text == expected.text and expected.logprobs is not None
    own = [score.logprob for score in expected.logprobs]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(own, abs=1e-4)


def test_refusals_are_its_own_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=QUESTION, **{**options, "temperature": -1})
