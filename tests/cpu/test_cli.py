"""The command line: quick help, one-line errors, and every verb on a tiny random model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from surefoot.bench.prompts import BenchPrompt
from surefoot.cli import certifying, conversation, terminal
from surefoot.cli.main import app
from surefoot.cli.values import read_logit_bias, read_proposer_options, read_size
from surefoot.errors import SurefootError
from tiny_models import tiny_hf_model

COMMAND = [sys.executable, "-m", "surefoot.cli"]
# The quickest set-up: no compiling, no measuring of costs.
QUICK = ["--backend", "torch", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("models"))


def run(*arguments: Any, stdin: str = "") -> Any:
    return CliRunner().invoke(app, [str(item) for item in arguments], input=stdin)


def test_help_is_quick() -> None:
    """In seconds of the processor, which a busy machine does not lengthen."""
    best = float("inf")
    for _ in range(5):
        before = os.times()
        result = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True)
        after = os.times()
        spent = after.children_user - before.children_user
        best = min(best, spent + after.children_system - before.children_system)
        assert result.returncode == 0 and "generate" in result.stdout
        if best < 0.5:
            return
    pytest.fail(f"the best of five took {best:.2f} s")


VERBS = ["generate", "chat", "bench", "certify", "serve", "doctor", "models", "train"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_begins_as_in_the_list(verb: str) -> None:
    assert run(verb, "--help").exit_code == 0
    command: Any = typer.main.get_command(app)
    assert command.list_commands(typer.Context(command)) == VERBS
    listed = command.commands[verb]
    _, itself, _ = command.resolve_command(typer.Context(command), [verb])
    assert cleandoc(itself.help).split("\n\n")[0].split() == listed.help.split()


def test_a_verb_that_does_not_exist_is_named_with_one_that_does() -> None:
    result = run("genrate")
    assert result.exit_code == 2 and "Did you mean 'generate'?" in result.output


USAGE_ERRORS = [
    ("generate x --dtype int8", "--dtype"),
    ("generate x --weights packed", "--weights"),
    ("generate x --backend cuda", "--backend"),
    ("generate x --weights native --backend torch", "--weights"),
    ("generate x --weights native --dtype float32", "--dtype"),
    ("generate x --threads 0", "--threads"),
    ("generate x --max-model-len 0", "--max-model-len"),
    ("generate x --max-num-seqs 0", "--max-num-seqs"),
    ("generate x --kv-cache-memory 5XB", "--kv-cache-memory"),
    ("generate x --draft-policy never", "--draft-policy"),
    ("generate x --max-draft-tokens 64", "--max-draft-tokens"),
    ("generate x --proposer-option window", "--proposer-option"),
    ("generate x --max-tokens 0", "--max-tokens"),
    ("generate x --temperature -1", "--temperature"),
    ("generate x --top-k 5", "--top-k"),
    ("generate x --top-p 0.5", "--top-p"),
    ("generate x --min-p 0.5", "--min-p"),
    ("generate x --temperature 1 --top-p 0", "--top-p"),
    ("generate x --repetition-penalty 0", "--repetition-penalty"),
    ("generate x --presence-penalty 3", "--presence-penalty"),
    ("generate x --frequency-penalty 3", "--frequency-penalty"),
    ("generate x --seed -1", "--seed"),
    ("generate x --stop-token-id -1", "--stop-token-id"),
    ("generate x --logit-bias 5", "--logit-bias"),
    ("generate x --logit-bias 5=1000", "--logit-bias"),
    ("generate x --n 0", "--n"),
    ("generate x --max-tokens 3 --min-tokens 4", "--min-tokens"),
    ("generate x --logprobs 3", "--logprobs"),
    ("generate x --json --show-drafts", "--show-drafts"),
    ("generate x --n 2 --show-drafts", "--show-drafts"),
    ("generate x --speculation off --show-drafts", "--show-drafts"),
    ("generate x --speculation off --draft-policy fixed", "--draft-policy"),
    ("generate x --speculation off --max-draft-tokens 2", "--max-draft-tokens"),
    ("generate x --prompt-file y", "--prompt-file"),
    ("generate --prompt-file /does/not/exist", "--prompt-file"),
    ("generate x --model /does/not/exist", "--model"),
    ("chat --max-tokens 0", "--max-tokens"),
    ("bench --prompts /does/not/exist", "--prompts"),
    ("bench --categories cooking", "--categories"),
    ("bench --per-category 0", "--per-category"),
    ("bench --repeats 0", "--repeats"),
    ("bench --batch-size 0", "--batch-size"),
    ("bench --warmup -1", "--warmup"),
    ("models inspect /does/not/exist", "model"),
]


@pytest.mark.parametrize(("line", "option"), USAGE_ERRORS)
def test_bad_options_are_refused_in_one_line(line: str, option: str) -> None:
    result = run(*line.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option}: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


LOADED_ERRORS = [
    (["generate", "x", "--speculation", "magic"], "--speculation"),
    (["generate", "x", "--max-tokens", "1000"], "--max-tokens"),
    (["generate", "x", "--stop-token-id", "288"], "--stop-token-id"),
    (["generate", "x", "--logit-bias", "288=1"], "--logit-bias"),
    (["generate", "x" * 600], "prompt"),
    (["generate", "x", "--proposer", "magic"], "--proposer"),
    (["generate", "x", "--proposer-option", "magic.size=1"], "--proposer-option"),
    (["generate", "x", "--max-model-len", "513"], "--max-model-len"),
    (["generate", "x", "--kv-cache-memory", "1"], "--kv-cache-memory"),
    (["bench", "--max-tokens", "512"], "--prompts"),
    (["bench", "--batch-size", "5"], "--batch-size"),
    (["chat", "--speculation", "magic"], "--speculation"),
]


@pytest.mark.parametrize(("arguments", "option"), LOADED_ERRORS)
def test_what_the_model_cannot_do_is_refused(
    arguments: list[str], option: str, model: Path
) -> None:
    result = run(*arguments, "--model", model, *QUICK)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith(f"error: {option}: ")
    assert result.stdout == ""


def test_errors_that_name_no_option_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SurefootError("disk", "is full", "free some space")

    monkeypatch.setattr("surefoot.cli.generate.load", fail)
    result = run("generate", "x")
    assert (result.exit_code, result.stderr) == (1, "error: disk: is full; free some space\n")


def test_unknown_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.cli.generate.load", lambda *_, **__: 1 / 0)
    assert isinstance(run("generate", "x").exception, ZeroDivisionError)


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("surefoot.cli.generate.load", interrupt)
    result = run("generate", "x")
    assert (result.exit_code, result.output) == (130, "")


def test_generate_is_the_same_with_and_without_speculation(model: Path) -> None:
    common = ["the cat sat on the", "-m", model, *QUICK, "--max-tokens", "40", "--ignore-eos"]
    texts = []
    for extra in (["--speculation", "off"], ["--draft-policy", "fixed"], ["--json"]):
        result = run("generate", *common, *extra)
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
    output = json.loads(texts[2])["outputs"][0]
    assert texts[0] == texts[1] == output["text"] + "\n"
    assert len(output["token_ids"]) == 40 and output["finish_reason"] == "length"


def test_generate_honours_sampling_options(model: Path) -> None:
    line = ["generate", "-m", model, *QUICK, "--json", "--max-tokens", "12", "--ignore-eos"]
    sampled = ["--temperature", "1", "--seed", "5", "--n", "2", "--logprobs", "2", "--chat"]
    result = json.loads(run(*line, "the cat", *sampled, "--logit-bias", "7=-100").stdout)
    again = json.loads(run(*line, *sampled, "--logit-bias", "7=-100", stdin="the cat\n").stdout)
    assert result["outputs"] == again["outputs"]
    assert len({output["text"] for output in result["outputs"]}) == 2
    assert all(len(output["logprobs"]) == 12 for output in result["outputs"])
    assert 7 not in result["outputs"][0]["token_ids"]


def test_generate_prints_every_choice(model: Path) -> None:
    line = ["generate", "the cat", "-m", model, *QUICK, "--max-tokens", "12"]
    line += ["--temperature", "2", "--seed", "5", "--n", "2"]
    first, second = json.loads(run(*line, "--json").stdout)["outputs"]
    assert first["text"] != second["text"]
    texts = f"--- 1 of 2\n{first['text']}\n--- 2 of 2\n{second['text']}\n"
    assert run(*line).stdout == texts


def test_generate_marks_drafts(model: Path) -> None:
    # A bias makes the model repeat one token, so that drafts are right.
    line = ["generate", "ab ab", "-m", model, *QUICK, "--max-tokens", "20", "--ignore-eos"]
    line += ["--logit-bias", "70=100", "--draft-policy", "fixed", "--show-drafts"]
    marked, _, legend = run(*line).stdout.rpartition("\n\n(")
    assert marked.count("«") == marked.count("»") > 0 and "«" in legend
    coloured = CliRunner(env={"FORCE_COLOR": "1", "NO_COLOR": ""}).invoke(
        app, [str(item) for item in line]
    )
    text = coloured.stdout.rpartition("\n\n(")[0]
    assert text.count("\x1b[32m") == text.count("\x1b[0m") > 0 and "«" not in text
    plain = marked.replace("«", "").replace("»", "")
    assert text.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


@pytest.mark.parametrize(("backend", "lines"), [("auto", 1), ("torch", 0)])
def test_missing_kernels_are_told_in_one_line(
    backend: str, lines: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "no C compiler found"
    monkeypatch.setattr("surefoot.kernels.cpu.build.native_unavailable", lambda: reason)
    options = [*QUICK, "--backend", backend, "--max-tokens", "1"]
    said = run("generate", "the cat", "-m", model, *options).stderr.splitlines()
    assert [line for line in said if "faster" in line or reason in line] == [
        f"compiled kernels would make this several times faster: {reason}"
    ] * lines


def test_default_length_is_what_the_context_leaves(model: Path) -> None:
    line = ["generate", "the cat", "-m", model, *QUICK, "--ignore-eos", "--json"]
    output = json.loads(run(*line, "--max-model-len", "32").stdout)
    assert len(output["prompt_token_ids"]) + len(output["outputs"][0]["token_ids"]) == 32


def test_bench_reports_identical_texts(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "the cat sat", "category": "cats"}\n'
        '{"turns": ["the dog", "again"], "category": "dogs", "question_id": 7}\n'
        '{"messages": [{"role": "user", "content": "hat"}], "category": "dogs"}\n'
    )
    line = ["bench", "--prompts", prompts, "-m", model, *QUICK, "--max-tokens", "8"]
    result = run(*line, "--repeats", "2", "--batch-size", "2", "--show-drafts")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["overall"]["identical"] and report["overall"]["prompts"] == 3
    assert [entry["prompts"] for entry in report["batches"]] == [["1"], ["7", "3"]]
    assert len(report["batches"][1]["plain"]["seconds"]) == 2
    assert report["hardware"]["cores"] >= 1 and report["engine"]["dtype"] == "float32"
    assert report["overall"]["ratio"]["count"] == 2 and report["overall"]["verdict"]
    words = " ".join(result.stdout.split())
    assert "3 prompts, 2 at once, up to 8 output tokens; 2 pairs of runs each" in words
    assert words.count("the same text as without speculation") == 2
    assert report["machine_load"]["busy"] == ("The machine was busy" in words)


def test_answers_of_a_comparison_are_short_unless_said(model: Path) -> None:
    line = ["bench", "-m", model, *QUICK, "--repeats", "1", "--max-model-len", "512"]
    result = run(*line, "--categories", "write")
    assert json.loads(result.stdout.splitlines()[-1])["settings"]["params"]["max_tokens"] == 96
    sweep = run(*line, "--concurrency", "1", "--modes", "plain", "--prompt-tokens", "5")
    assert json.loads(sweep.stdout.splitlines()[-1])["settings"]["params"]["max_tokens"] == 128


def test_bench_fails_when_texts_differ(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.bench import measure

    honest = measure.run_batch

    def biased(llm: Any, prompts: Any, params: Any, method: str) -> Any:
        # Another seed stands for a speculation that is not exact.
        from dataclasses import replace

        seed = 0 if method == measure.PLAIN else 1
        return honest(llm, prompts, replace(params, seed=seed), method)

    monkeypatch.setattr(measure, "run_batch", biased)
    line = ["bench", "-m", model, *QUICK, "--max-tokens", "8", "--temperature", "1"]
    result = run(*line, "--max-model-len", "512", "--categories", "write", "--repeats", "1")
    assert result.exit_code == 1
    assert "TEXTS DIFFER" in result.stdout
    assert not json.loads(result.stdout.splitlines()[-1])["overall"]["identical"]


def test_chat_reads_lines_from_a_pipe(model: Path) -> None:
    lines = "the cat\n/temperature 1\n/seed 4\n/stats\nthe dog\n/undo\n/reset\n/help\n/exit\nno\n"
    result = run("chat", "-m", model, *QUICK, "--max-tokens", "6", stdin=lines)
    assert result.exit_code == 0, result.output
    assert "6 tokens in" in result.stdout and "/speculation METHOD" in result.stdout


@pytest.mark.parametrize("line", ["/bogus", "/temperature hot", "/seed -1", "/undo", "/reset x"])
def test_chat_refuses_bad_commands(line: str, model: Path) -> None:
    result = run("chat", "-m", model, *QUICK, stdin=f"{line}\nthe cat\n")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_chat_carries_the_conversation_on(model: Path) -> None:
    llm = terminal.load({"model": str(model), "backend": "torch", "dtype": "float32"})
    talk = conversation.Conversation(llm, {"temperature": 0.0, "max_tokens": 5}, system="Be brief.")
    talk.ask("the cat")
    talk.ask("the dog")
    assert [item["role"] for item in talk.messages] == ["system", *["user", "assistant"] * 2]
    talk.undo()
    assert talk.messages[-2] == {"role": "user", "content": "the cat"}
    with pytest.raises(SurefootError, match="speculation"):
        talk.set_speculation("magic")


class Terminal(io.StringIO):
    """As standard input; what is typed comes through ``input``."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_in_a_terminal(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mistakes and Ctrl-C cost a line, not the conversation, which Ctrl-D ends."""
    typed: Any = iter(
        ["/temperature hot", KeyboardInterrupt, "/system Be brief.", "/max-tokens 3", " ",
         "the cat", "/max-tokens", "/speculation off", "/drafts", EOFError]
    )  # fmt: skip
    asked: list[Any] = []
    ask = conversation.Conversation.ask

    def type_in(prompt: str) -> str:
        item = next(typed)
        if isinstance(item, str):
            return item
        raise item

    def watched(talk: conversation.Conversation, line: str, interruptible: bool) -> None:
        ask(talk, line, interruptible=interruptible)
        asked.append((line, talk.system, interruptible))
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", type_in)
    monkeypatch.setattr(conversation.Conversation, "ask", watched)
    app(["chat", "-m", str(model), *QUICK, "--stats"], standalone_mode=False)
    shown = capsys.readouterr()
    assert asked == [("the cat", "Be brief.", True)] and not list(typed)
    assert "error: /temperature: " in shown.err
    for part in ("Type a question", "(/exit or Ctrl-D leaves)", "3 tokens in", " (stopped)"):
        assert part in shown.out


def test_ctrl_c_stops_an_answer_only(model: Path) -> None:
    llm = terminal.load({"model": str(model), "backend": "torch", "dtype": "float32"})
    talk = conversation.Conversation(llm, {"temperature": 0.0, "ignore_eos": True})
    honest, rounds = llm.engine.step, [0]

    def step() -> Any:
        rounds[0] += 1
        if rounds[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return honest()

    llm.engine.step = step  # type: ignore[method-assign]
    talk.ask("the cat")
    assert rounds[0] == 3 and not llm.engine.has_work
    assert talk.messages[-1]["role"] == "assistant"


def test_models_are_listed_and_inspected(model: Path) -> None:
    assert "smollm2-135m" in run("models", "list").stdout
    assert json.loads(run("models", "inspect", model, "--json").stdout)["architecture"] == "llama"
    assert "architecture" in run("models", "inspect", model).stdout
    assert run("models", "fetch", model).stdout == f"{model}\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1TiB", "nan", "1e400", "one"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(SurefootError):
        read_size(text)


def test_repeated_options() -> None:
    options = read_proposer_options(["a.size=4", "a.kind=big", "b.on=true"])
    assert options == {"a": {"size": 4, "kind": "big"}, "b": {"on": True}}
    assert read_logit_bias(["3=-1.5", "4=2"]) == {3: -1.5, 4: 2.0}
    for bad in (["a.b=1", "a.b=2"], ["a=1"], [".b=1"]):
        with pytest.raises(SurefootError):
            read_proposer_options(bad)
    with pytest.raises(SurefootError):
        read_logit_bias(["3=1", "3=2"])


@pytest.fixture(autouse=True)
def no_leftover_colour(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield


def test_a_certificate_runs_the_prompts_that_it_is_given(model: Path) -> None:
    options = {"model": str(model), "backend": "torch", "dtype": "float32"}
    llm = terminal.load(options)
    talk = ({"role": "user", "content": "the dog"},)
    chosen = [BenchPrompt("a", "all", text="the cat"), BenchPrompt("b", "all", messages=talk)]
    subject = certifying._subject(llm, options, chosen)
    text, rendered, *patterns = subject.prompts
    assert text == tuple(llm.tokenizer.encode("the cat", add_special_tokens=True))
    assert rendered == tuple(llm.render_chat(talk)) and patterns
    long = BenchPrompt("c", "all", text="the cat sat " * 400)
    with pytest.raises(SurefootError, match=r"c has \d+ tokens; use 1 to 256"):
        certifying._subject(llm, options, [long])
