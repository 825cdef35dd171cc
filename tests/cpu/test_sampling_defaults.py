"""A model's sampling defaults: what is read, what is refused, and where they hold."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from server_harness import LOOP, emoji_model, offline, running_server
from server_scripted import END, READY, ScriptedCore, ask
from surefoot import LLM, SamplingParams, SurefootError
from surefoot.bench.subject import Subject, subject_config
from surefoot.cli import certifying
from surefoot.cli.conversation import Conversation
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.models.loading import inspect_model
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.sampling_defaults import read_gguf_sampling, read_hf_sampling
from surefoot.server.messages import Add
from tiny_models import tiny_gguf, tiny_weights

FILE = "generation_config.json"
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 40}
FIELDS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 40}
LINE = f"sampling defaults from {FILE}: temperature 0.6, top_p 0.95, top_k 20, max_tokens 40"
QUICK = ["--backend", "torch", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4"]
NEUTRAL = SamplingParams()


def write(folder: Path, **settings: Any) -> Path:
    (folder / FILE).write_text(json.dumps({"eos_token_id": 2, **settings}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(emoji_model(tmp_path_factory.mktemp("model")), **QWEN)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return offline(model, max_model_len=128)


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({}, {}),
        (QWEN, FIELDS),
        ({"min_p": 0.1, "top_k": None, "num_beams": 4}, {"temperature": 1.0, "min_p": 0.1}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({**QWEN, "do_sample": False}, {"temperature": 0.0, "max_tokens": 40}),
        ({"do_sample": False, "min_p": 0.1}, {"temperature": 0.0}),
    ],
)
def test_generation_config_is_read(settings: Any, values: Any, tmp_path: Path) -> None:
    assert read_hf_sampling(write(tmp_path, **settings)).values == values


BAD = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("top_p", 1.5),
    ("top_p", float("nan")),
    ("top_k", 2.5),
    ("min_p", True),
    ("repetition_penalty", 0),
    ("max_new_tokens", 0),
    ("do_sample", 1),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_wrong_values_are_named(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(SurefootError) as caught:
        read_hf_sampling(write(tmp_path, **{key: value}))
    assert f"{FILE} has {key} = {json.dumps(value)}" in caught.value.problem
    assert "--generation-config none" in caught.value.fix and "\n" not in str(caught.value)


def gguf(path: Path, metadata: dict[str, Any]) -> Path:
    config, weights = tiny_weights("llama", vocab_size=288)
    return tiny_gguf(path / "model.gguf", config, weights, metadata=metadata)


def test_gguf_files_recommend_too(tmp_path: Path) -> None:
    keys = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05}
    path = gguf(tmp_path, {f"general.sampling.{key}": value for key, value in keys.items()})
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
    assert read_gguf_sampling(GgufFile(path)).values == {**expected, "repetition_penalty": 1.05}
    assert inspect_model(str(path))["sampling_defaults"]["min_p"] == 0.05
    llm = LLM(str(path), backend="torch", dtype="float32", weights="dense")
    assert llm.default_sampling_params() == SamplingParams(**expected, repetition_penalty=1.05)
    path = gguf(tmp_path, {"general.sampling.top_p": 2.0})
    with pytest.raises(SurefootError, match=r"model\.gguf has general\.sampling\.top_p = 2\.0"):
        LLM(str(path), backend="torch", dtype="float32")


def test_inspection_shows_them(model: Path, tmp_path: Path) -> None:
    assert inspect_model(str(model))["sampling_defaults"] == FIELDS
    shown = CliRunner().invoke(app, ["models", "inspect", str(model)]).stdout
    assert re.search(r"^sampling defaults +temperature 0\.6, top_p 0\.95, top_k 20, ", shown, re.M)
    assert inspect_model(str(emoji_model(tmp_path)))["sampling_defaults"] is None


def params_of_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Filled with the parameters of every request from now on."""
    seen: list[SamplingParams] = []
    honest = llm.engine.make_request

    def note(name: str, tokens: Any, params: SamplingParams, *more: Any) -> Any:
        seen.append(params)
        return honest(name, tokens, params, *more)

    monkeypatch.setattr(llm.engine, "make_request", note)
    return seen


def test_llm_takes_them_where_no_parameters_are_given(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = SamplingParams(**FIELDS)
    assert llm.default_sampling_params() == defaults
    seen = params_of_requests(llm, monkeypatch)
    llm.generate([[5, 6], [7, 8]])
    llm.chat([{"role": "user", "content": "a"}])
    list(llm.stream([5, 6]))
    assert seen == [defaults] * 4
    seen.clear()
    given = SamplingParams(max_tokens=3)
    llm.generate([5, 6], given)
    list(llm.stream([5, 6], given))
    assert seen == [given] * 2
    # 110 of 128 tokens are taken: what nobody asked for must not fail.
    seen.clear()
    llm.generate([5] * 110)
    assert seen == [dataclasses.replace(defaults, max_tokens=18)]
    with pytest.raises(SurefootError, match="prompt"):
        llm.generate([5] * 128)


def test_none_leaves_them_alone(tmp_path: Path) -> None:
    folder = write(emoji_model(tmp_path), top_p=7)
    llm = offline(folder, generation_config="none")
    assert llm.default_sampling_params() == NEUTRAL
    with pytest.raises(SurefootError, match="generation_config"):
        offline(folder, generation_config="vllm")


def test_defaults_give_way_to_what_is_given() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 40}

    def merged(room: int, **given: Any) -> SamplingParams:
        return SamplingParams.with_defaults(given, defaults, room)

    assert merged(100, top_k=0, seed=3) == SamplingParams(temperature=0.6, seed=3, max_tokens=40)
    assert merged(30).max_tokens == 30 and merged(0).max_tokens is None
    assert merged(100, min_tokens=50).max_tokens == 50
    assert merged(30, max_tokens=50).max_tokens == 50
    with pytest.raises(SurefootError, match="min_tokens"):
        merged(30, min_tokens=50)


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, SamplingParams | None]]:
    """A function: arguments of a verb -> its result, and the parameters of its one text."""

    def call(*arguments: Any, stdin: str = "a\n") -> tuple[Any, SamplingParams | None]:
        seen: list[SamplingParams] = []

        def stream(self: LLM, prompt: Any, params: SamplingParams, **_: Any) -> Any:
            seen.append(params)
            yield from ()

        monkeypatch.setattr(LLM, "stream", stream)
        line = [str(item) for item in (*arguments, *QUICK)]
        result = CliRunner().invoke(app, line, input=stdin)
        return result, seen[0] if seen else None

    return call


def test_chat_takes_them(model: Path, chats: Any) -> None:
    result, params = chats("chat", "-m", model)
    assert params == SamplingParams(**FIELDS)
    assert result.stderr.splitlines().count(LINE) == 1
    _, params = chats("chat", "-m", model, "--top-k", "5", "--max-tokens", "9")
    assert params == SamplingParams(**{**FIELDS, "top_k": 5, "max_tokens": 9})
    _, params = chats("chat", "-m", model, stdin="/temperature 0\na\n")
    assert params == SamplingParams(**{**FIELDS, "temperature": 0.0})
    result, params = chats("chat", "-m", model, "--generation-config", "none")
    assert params == SamplingParams(temperature=0)
    assert "sampling defaults" not in result.stderr


def test_chat_refuses_filters_that_do_nothing(model: Path, tmp_path: Path, chats: Any) -> None:
    greedy = write(emoji_model(tmp_path), do_sample=False, top_k=3)
    for line in (["-m", greedy], ["-m", model, "--generation-config", "none"]):
        result, params = chats("chat", *line, "--top-k", "5")
        assert (result.exit_code, params) == (2, None)
        assert "error: --top-k: does nothing at temperature 0" in result.stderr


def test_verbs_that_do_not_take_them_do_not_read_them(
    model: Path, tmp_path: Path, chats: Any
) -> None:
    result, params = chats("generate", "a", "-m", model)
    assert params == SamplingParams(temperature=0, max_tokens=256)
    assert "sampling defaults" not in result.stderr
    broken = write(emoji_model(tmp_path), top_k="many")
    assert chats("generate", "a", "-m", broken)[0].exit_code == 0
    for verb in ("chat", "serve"):
        result, _ = chats(verb, "--model", broken)
        assert result.exit_code == 2
        [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: --generation-config: ")
        assert f'{FILE} has top_k = "many"' in line
    result, _ = chats("chat", "-m", model, "--generation-config", "vllm")
    assert result.exit_code == 2 and "--generation-config: 'vllm'" in result.stderr


def test_serve_passes_the_switch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def serve(engine: EngineConfig, *_: Any) -> int:
        seen.append(engine.generation_config)
        return 0

    monkeypatch.setattr("surefoot.server.serve.serve", serve)
    for arguments in ([], ["--generation-config", "none"]):
        assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    assert seen == ["auto", "none"]


def test_benchmarks_and_certificates_do_not_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"model": str(write(emoji_model(tmp_path), top_k="many")), "backend": "torch"}
    assert certifying._load(broken).default_sampling_params() == NEUTRAL
    assert subject_config(Subject(broken), 1, 64, 4).generation_config == "none"
    seen: list[Any] = []

    def load(engine: Any, **more: Any) -> LLM:
        seen.append(more["generation_config"])
        raise SurefootError("load", "is enough")

    monkeypatch.setattr("surefoot.cli.bench.load", load)
    CliRunner().invoke(app, ["bench"])
    assert seen == ["none"]


def test_max_tokens_of_a_conversation_go_back_to_the_default(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = params_of_requests(llm, monkeypatch)
    talk = Conversation(llm, {"max_tokens": 3})
    talk.ask("a")
    talk.set_sampling("max_tokens", None)
    talk.reset()
    talk.ask("a")
    assert [params.max_tokens for params in seen] == [3, 40]


REQUESTS = [
    ({}, FIELDS),
    ({"temperature": None, "top_p": None}, FIELDS),
    ({"temperature": 0}, {**FIELDS, "temperature": 0}),
    ({"top_k": 0, "top_p": 1.0}, {"temperature": 0.6, "max_tokens": 40}),
    ({"max_tokens": 7}, {**FIELDS, "max_tokens": 7}),
    ({"min_tokens": 50}, {**FIELDS, "min_tokens": 50, "max_tokens": 50}),
]


@pytest.mark.parametrize(("fields", "expected"), REQUESTS)
def test_requests_take_them(fields: Any, expected: Any, model: Path) -> None:
    ready = msgspec.structs.replace(READY, sampling_defaults=FIELDS)
    plain = {"prompt": [3], **fields}
    talk = {"messages": [{"role": "user", "content": "a"}], **fields}

    async def use(client: Any, core: ScriptedCore) -> list[SamplingParams]:
        for path, body in (("completions", plain), ("chat/completions", talk)):
            answer = await client.post(f"/v1/{path}", json=body)
            if "min_tokens" not in fields:
                assert answer.status_code == 200, answer.text
        return [item.params for item in core.received if isinstance(item, Add)]

    seen = ask(read_hf_tokenizer(model), [[END]], use, ready=ready)
    assert seen[-1] == SamplingParams(**expected)
    if "min_tokens" not in fields:
        # As in vLLM: plain completions have OpenAI's limit, whatever the model recommends.
        limit = fields.get("max_tokens", 16)
        assert seen == [SamplingParams(**{**expected, "max_tokens": limit}), seen[-1]]


def test_a_default_of_max_tokens_is_cut_to_the_context(model: Path) -> None:
    tokenizer = read_hf_tokenizer(model)
    ready = msgspec.structs.replace(READY, max_model_len=60, sampling_defaults=FIELDS)
    body = {"messages": [{"role": "user", "content": "a" * 15}]}

    async def use(client: Any, core: ScriptedCore) -> Any:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        return core.received[0]

    add = ask(tokenizer, [[END]], use, ready=ready)
    assert 20 < len(add.prompt) < 60 and add.params.max_tokens == 60 - len(add.prompt)


def test_a_server_says_what_holds_and_keeps_to_it(tmp_path: Path) -> None:
    folder = write(emoji_model(tmp_path), do_sample=False, top_k=9, max_new_tokens=30)
    talk = [{"role": "user", "content": LOOP}]
    with running_server(folder) as server:
        text = server.post("/v1/chat/completions", messages=talk, ignore_eos=True).json()
        line = f"sampling defaults from {FILE}: temperature 0, max_tokens 30"
        assert server.lines.count(line) == 1
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [expected] = offline(folder).chat(talk, greedy)
    assert text["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert text["usage"]["completion_tokens"] == 30
