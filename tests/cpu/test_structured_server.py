"""Structured output over HTTP: every way to ask for it, what is refused, and that a grammar which
takes long to compile holds up nobody else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from openai import OpenAI

from server_harness import Server, emoji_model, running_server
from surefoot.errors import SurefootError
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.sampling import grammar
from surefoot.sampling.grammar import Grammars
from surefoot.sampling.trial import Trial
from surefoot.server.compiling import SHORT_GRAMMAR, Compiler
from surefoot.server.messages import Add
from surefoot.structured import StructuredOutputsParams
from tiny_models import write_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(emoji_model(tmp_path_factory.mktemp("model"), 2048)) as started:
        yield started


def fits(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"colour", "sizes"} and value["colour"] in ("red", "green")
    assert len(value["sizes"]) <= 2
    assert all(isinstance(size, int) and size <= 99 for size in value["sizes"])


def texts(server: Server, path: str, **body: Any) -> list[str]:
    answer = server.post(path, seed=5, n=3, temperature=1.0, max_tokens=300, **body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


COMPACT = {"json": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}
WAYS = [
    {"guided_json": COMPACT["json"]},
    {"guided_json": json.dumps(COMPACT["json"])},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": COMPACT["json"], "strict": True},
        }
    },
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_all_ways_to_give_a_schema_are_one(server: Server, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else CHAT
    answers = [texts(server, path, **prompt, **way) for way in WAYS]
    for text in answers[0]:
        fits(text)
    assert all(answer == answers[0] for answer in answers)
    plain = texts(server, path, **prompt, **WAYS[0], speculation="off")
    assert plain == answers[0]


def test_regex_choice_and_grammar(server: Server) -> None:
    for text in texts(server, "/v1/completions", prompt="a", guided_regex="[a-f]{3}🙂(x|é){2}"):
        assert re.fullmatch("[a-f]{3}🙂(x|é){2}", text)
    for text in texts(server, "/v1/completions", prompt="a", guided_choice=["🙂🙃", "no", 'a"b\\']):
        assert text in ("🙂🙃", "no", 'a"b\\')
    lark = 'start: "é" | "(" end ")"\nend: "é" | "[" "é" "]"\n'
    for text in texts(server, "/v1/completions", prompt="a", guided_grammar=lark):
        assert text in ("é", "(é)", "([é])")


def test_openais_client_and_streams(server: Server) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    form: Any = WAYS[3]["response_format"]
    common: dict[str, Any] = {"model": "", "messages": CHAT["messages"], "seed": 8}
    common["model"] = client.models.list().data[0].id
    whole = client.chat.completions.create(**common, response_format=form)
    text = whole.choices[0].message.content
    assert text
    fits(text)
    stream = client.chat.completions.create(**common, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    anything = client.chat.completions.create(
        **common, response_format={"type": "json_object"}, max_tokens=40
    )
    assert (anything.choices[0].message.content or "").startswith("{")


TOOLS = [{"type": "function", "function": {"name": "f"}}]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "objct"}}, "guided_json"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format",
    ),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
def test_what_cannot_be_honoured_is_named(server: Server, body: Any, field: str) -> None:
    answer = server.post("/v1/completions", prompt="a", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_structure_does_not_go_with_tools(server: Server) -> None:
    answer = server.post("/v1/chat/completions", **CHAT, tools=TOOLS, guided_regex="a")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"
    answer = server.post(
        "/v1/chat/completions", **CHAT, tools=TOOLS, tool_choice="none", guided_regex="a"
    )
    assert answer.status_code == 200, answer.text


def members(count: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"member{i}": {"type": "string"} for i in range(count)},
        **more,
    }


def test_large_schemas_are_tried_elsewhere(server: Server) -> None:
    """A stream goes on, and small schemas are compiled, whatever the large ones cost."""
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    alone = server.complete(**body)["choices"][0]["text"]
    large = [members(count, title=str(count)) for count in (10_000, 4_000, 2_500, 200)]
    with ThreadPoolExecutor(len(large) + 2) as pool:
        answers = [
            pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=2, guided_json=each)
            for each in large
        ]
        texts_ = [pool.submit(server.complete, **body) for _ in range(2)]
        for _ in range(3):
            assert server.post("/v1/completions", prompt="a", **WAYS[0], max_tokens=2).is_success
        for text in texts_:
            assert text.result()["choices"][0]["text"] == alone
        statuses = [answer.result().status_code for answer in answers]
    assert statuses == [400, 400, 400, 200]
    told = answers[1].result().json()["error"]
    assert told["param"] == "guided_json" and "too big" in told["message"]


FUNCTIONS = {
    "paint": {
        "type": "object",
        "properties": {"colour": {"$ref": "#/$defs/::=colour"}},
        "required": ["colour"],
        "additionalProperties": False,
        "$defs": {"::=colour": {"enum": ["r,d", 'gr"n']}},
    },
    "wait": {
        "type": "object",
        "properties": {"s": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["s"],
        "additionalProperties": False,
    },
}
CALLABLE = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in FUNCTIONS.items()
]


def calls_fit(message: dict[str, Any]) -> list[str]:
    """Names of the functions called."""
    assert not message["content"]
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, FUNCTIONS[call["function"]["name"]])
    return [call["function"]["name"] for call in message["tool_calls"]]


def called(server: Server, seeds: int = 4, **body: Any) -> list[list[str]]:
    """Of so many answers, the functions called."""
    answer = server.post(
        "/v1/chat/completions", **CHAT, tools=CALLABLE, n=seeds, seed=3, temperature=9.0, **body
    )
    assert answer.status_code == 200, answer.text
    choices = [c for c in answer.json()["choices"] if c["finish_reason"] != "length"]
    assert choices and {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    return [calls_fit(choice["message"]) for choice in choices]


def test_calls_that_are_required(server: Server) -> None:
    one = called(server, tool_choice="required", parallel_tool_calls=False, seeds=16)
    assert len(one) == 16 and all(len(names) == 1 for names in one)
    assert {name for names in one for name in names} == {"paint", "wait"}
    for name in FUNCTIONS:
        choice = {"type": "function", "function": {"name": name}}
        assert called(server, tool_choice=choice) == [[name]] * 4
    # A random model seldom ends by itself what may go on.
    end = {"1": 0, "2": 3.0}
    several = called(server, tool_choice="required", logit_bias=end, max_tokens=300, seeds=8)
    assert any(len(names) > 1 for names in several)


def test_calls_that_may_be_made_fit_if_they_are_strict(server: Server) -> None:
    body: dict[str, Any] = {"seed": 3, "max_tokens": 20, "temperature": 1.0, **CHAT}
    for fields in ({"tools": CALLABLE}, {"tools": TOOLS, "parallel_tool_calls": False}):
        answer = server.post("/v1/chat/completions", **body, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


def test_required_calls_are_streamed(server: Server) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    common: Any = {"model": client.models.list().data[0].id, "messages": CHAT["messages"]}
    common |= {"tools": CALLABLE, "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**common, seed=5)
    [call] = whole.choices[0].message.tool_calls or []
    chunks = list(client.chat.completions.create(**common, seed=5, stream=True))
    told = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    functions = [part.function for part in told if part.function]
    assert (told[0].type, functions[0].name) == ("function", call.function.name)
    assert not any(part.id for part in told[1:]) and not any(f.name for f in functions[1:])
    assert len(functions) > 2, "the arguments come at once"
    assert "".join(part.arguments or "" for part in functions) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class SlowGrammars:
    """Takes as long as the test wants."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started: list[str] = []

    def knows(self, wanted: StructuredOutputsParams) -> bool:
        return False

    def start(self, wanted: StructuredOutputsParams) -> Any:
        assert self.go.wait(60)
        self.started.append(str(wanted.regex))
        if wanted.regex == "bad":
            raise SurefootError("structured_outputs.regex", "is bad")
        return SimpleNamespace()


class Trials:
    """Refuses what has an x."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, wanted: StructuredOutputsParams) -> None:
        self.asked.append(str(wanted.regex)[0])
        if "x" in str(wanted.regex):
            raise SurefootError(wanted.option, "takes too long")


def test_long_grammars_are_tried_once_and_hold_up_no_short_ones() -> None:
    grammars: Any = SlowGrammars()
    trials, woken = Trials(), threading.Semaphore(0)
    compiler = Compiler(grammars, trials, woken.release)
    grammars.go.set()
    bad, good = "x" * (SHORT_GRAMMAR + 1), "y" * (SHORT_GRAMMAR + 1)
    for name, regex in (("a", bad), ("b", bad), ("c", good), ("d", "x")):
        assert compiler.defer(add(name, regex))
    assert all(woken.acquire(timeout=60) for _ in range(4))
    errors = {message.ids[0]: error for message, error in compiler.ready()}
    assert trials.asked == ["x", "y"] and sorted(grammars.started) == ["x", good]
    assert [name for name, error in errors.items() if error] == ["a", "b"]


def test_a_trial_ends_when_its_time_is_up(tmp_path: Path) -> None:
    tokenizer = read_hf_tokenizer(write_tokenizer(tmp_path / "model"))
    trial = Trial(Grammars(tokenizer, tokenizer.vocab_size, [2]))
    small, broken = StructuredOutputsParams(regex="a+"), StructuredOutputsParams(regex="a(")
    large = StructuredOutputsParams(
        json=members(5000, required=[f"member{i}" for i in range(5000)])
    )
    try:
        trial.check(small)
        with pytest.raises(SurefootError, match="regex"):
            trial.check(broken)
        with pytest.raises(SurefootError, match="of a processor to compile"):
            trial.check(large, seconds=0.02)
        trial.check(small)
    finally:
        trial.close()


def test_a_text_whose_masks_take_too_long_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = read_hf_tokenizer(write_tokenizer(tmp_path / "model"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2])
    wanted = StructuredOutputsParams(regex="a+")
    slow, other = grammars.start(wanted), grammars.start(wanted)
    bits = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "MAX_MASK_SECONDS", -1.0)
        slow.write_masks([], bits)
    slow.sync(tokenizer.encode("a"))
    slow.write_masks([], bits)
    assert bits[0, 0] == 1 << 2 and not bits[0, 1:].any() and "ms to tell" in slow.problem
    slow.restart()
    assert slow.problem
    other.write_masks([], bits)
    assert bits.any() and not bits[0, 0] & 1 << 2 and not other.problem


def add(name: str, regex: str | None) -> Add:
    structure = None if regex is None else StructuredOutputsParams(regex=regex)
    params = SamplingParams(structured_outputs=structure)
    return Add([name], [1], params, SpeculationParams())


def test_compiling_is_waited_for_by_its_own_request_only() -> None:
    grammars: Any = SlowGrammars()
    woken = threading.Semaphore(0)
    compiler = Compiler(grammars, None, woken.release)
    assert compiler.defer(add("a", "x")) and compiler.defer(add("b", "bad"))
    assert compiler.defer(add("left", "y"))
    assert not compiler.defer(add("c", None)), "a request without a grammar waits"
    assert compiler.ready() == []
    compiler.drop(["left"])
    grammars.go.set()
    assert all(woken.acquire(timeout=60) for _ in range(3))
    (first, no_error), (second, error) = compiler.ready()
    assert (first.ids, no_error, second.ids) == (["a"], None, ["b"])
    assert error is not None and error.option == "structured_outputs.regex"
    assert grammars.started == ["x", "bad"], "a grammar was compiled that nobody waits for"
    assert compiler.ready() == []
