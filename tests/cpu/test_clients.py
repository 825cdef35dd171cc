"""Clients that people have, as they are, in their default modes (others: docs/log.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

from server_harness import Server, emoji_model, running_server

MODEL = "llama-0"
QUESTION = "How is it in Bern?"
SAMPLING: dict[str, Any] = {"temperature": 1, "seed": 3}


class Weather(BaseModel):
    """The weather in a town."""

    model_config = ConfigDict(extra="forbid")

    town: Literal["Bern", "Basel"]
    degrees: int = Field(ge=-20, le=50)
    sunny: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Schemas in prompts are long where a character is a token.
    model = emoji_model(tmp_path_factory.mktemp("model"), max_positions=2048)
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def chat(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=lambda: "none",
        max_completion_tokens=200,
        stream_usage=True,
        max_retries=0,
        **SAMPLING,
    )


def test_instructor_reads_a_model_s_fields(server: Server) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"))
    weather = client.chat.completions.create(
        model=MODEL,
        response_model=Weather,
        # A second attempt would hide that the first was wrong.
        max_retries=0,
        messages=[{"role": "user", "content": QUESTION}],
        **SAMPLING,
    )
    assert isinstance(weather, Weather)


def test_langchain_streams_the_text_that_it_gets_whole(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert whole.content and "".join(str(chunk.content) for chunk in chunks) == whole.content
    [usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert isinstance(whole, AIMessage) and whole.usage_metadata is not None
    for name in ("input_tokens", "output_tokens"):
        assert usage[name] == whole.usage_metadata[name] > 0


def test_langchain_calls_functions(chat: ChatOpenAI) -> None:
    """One that it must call, streamed and whole; the result goes back; any of two; and its own way
    to structured output, by function and by schema."""
    tools = [Weather, {**TIME, "strict": True}]
    bound = chat.bind_tools([Weather], tool_choice="Weather", strict=True)
    answer = bound.invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    assert call["name"] == "Weather" and Weather(**call["args"])
    whole: Any = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("Weather", call["args"])]
    told = ToolMessage("12 degrees", tool_call_id=call["id"])
    assert chat.invoke([HumanMessage(QUESTION), answer, told]).content
    some = chat.bind_tools(tools, tool_choice="any", strict=True, parallel_tool_calls=False)
    some_answer = some.invoke(QUESTION)
    assert isinstance(some_answer, AIMessage)
    [call] = some_answer.tool_calls
    assert call["name"] in ("Weather", "now")
    for method in ("function_calling", "json_schema"):
        made = chat.with_structured_output(Weather, method=method, strict=True)
        assert isinstance(made.invoke(QUESTION), Weather)


TIME: dict[str, Any] = {
    "name": "now",
    "description": "The time.",
    "parameters": {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    },
}
