"""``surefoot bench --traffic`` on engines of its own: its report, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot.cli.main import app
from surefoot.request import SpeculationParams
from tiny_models import tiny_hf_model

OFF = SpeculationParams("off")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("models"))


QUICK = ["--backend", "torch", "--dtype", "float32", "--threads", "1"]
SMALL = ["--requests", "8", "--at-once", "3", "--max-tokens", "4-24", "--repeats", "2"]


def bench(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(item) for item in arguments)])


def report(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_traffic_on_random_weights(model: Path) -> None:
    line = [
        "--dummy-weights",
        model,
        "--synthetic-acceptance",
        "0.9,0.6",
        "--modes",
        "plain,2,auto",
    ]
    result = bench("--traffic", *line, *SMALL, "--prompt-tokens", "5-60", *QUICK)
    found = report(result)
    modes = {entry["mode"]: entry for entry in found["modes"]}
    assert list(modes) == ["plain", "2", "auto"]
    for mode, entry in modes.items():
        assert len(entry["runs"]) == 2 and entry["completed"] == 8 and entry["failed"] == 0
        assert entry["p50_itl_ms"] <= entry["p90_itl_ms"] <= entry["p99_itl_ms"]
        low, high = entry["low_high"]["output_throughput"]
        assert 0 < low <= entry["output_throughput"] <= high
        assert sum(kind["share"] for kind in entry["rounds"].values()) == pytest.approx(1)
        ratio = entry["of_plain"]
        assert ratio is None if mode == "plain" else ratio["count"] == 2
        assert entry["total_output_tokens"] == modes["plain"]["total_output_tokens"]
    assert modes["plain"]["accepted_length"] == 1 < modes["2"]["accepted_length"]
    assert found["settings"]["at_once"] == 3 and found["settings"]["prompt_tokens"] == [5, 60]
    assert found["engine"]["max_num_seqs"] == 3 and found["engine"]["max_model_len"] == 84
    assert "8 requests, at most 3 at once" in result.stdout


def test_traffic_on_a_model_with_prompts_that_arrive(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat sat on the mat"}\n{"turns": ["the dog"]}\n')
    line = ["-m", model, "--prompts", prompts, "--requests", "6", "--rate", "50", "--no-json"]
    result = bench("--traffic", *line, "--max-tokens", "8", "--repeats", "1", *QUICK)
    assert result.exit_code == 0, result.output
    assert "6 requests, 50 arriving a second; prompts of" in result.stdout
    assert "outputs of 48; 1 pass of" in result.stdout and not result.stdout.endswith("}\n")


REFUSED = [
    ("--requests 4", "--requests"),
    ("--at-once 4", "--at-once"),
    ("--rate 4", "--rate"),
    ("--url http://x", "--url"),
    ("--vocab-size 9", "--vocab-size"),
    ("--concurrency 2 --rate 4", "--rate"),
    ("--traffic --concurrency 2", "--concurrency"),
    ("--traffic --batch-size 2", "--batch-size"),
    ("--traffic --show-drafts", "--show-drafts"),
    ("--traffic --prefix-caching", "--prefix-caching"),
    ("--traffic --parts", "--parts"),
    ("--traffic --plot x.png", "--plot"),
    ("--traffic --speculation off", "--speculation"),
    ("--traffic --draft-policy fixed", "--draft-policy"),
    ("--traffic --categories a", "--categories"),
    ("--traffic --requests 0", "--requests"),
    ("--traffic --at-once 0", "--at-once"),
    ("--traffic --rate 0", "--rate"),
    ("--traffic --rate nan", "--rate"),
    ("--traffic --repeats 0", "--repeats"),
    ("--traffic --prompt-tokens 9-3", "--prompt-tokens"),
    ("--traffic --prompt-tokens 3-9-12", "--prompt-tokens"),
    ("--traffic --max-tokens 0-4", "--max-tokens"),
    ("--traffic --max-tokens many", "--max-tokens"),
    ("--max-tokens 4-8", "--max-tokens"),
    ("--concurrency 1 --prompt-tokens 4-8", "--prompt-tokens"),
    ("--traffic --modes often", "--modes"),
    ("--traffic --vocab-size 9", "--vocab-size"),
    ("--traffic --dummy-weights x --model y", "--dummy-weights"),
    ("--traffic --synthetic-acceptance 0.5 --proposer ngram", "--proposer"),
    ("--traffic --url http://x --dummy-weights x", "--dummy-weights"),
    ("--traffic --url http://x --synthetic-acceptance 0.5", "--synthetic-acceptance"),
    ("--traffic --url http://x --device cuda", "--device"),
    ("--traffic --url http://x --modes 3", "--modes"),
    ("--traffic --url http://x --vocab-size 0", "--vocab-size"),
    ("--traffic --url ftp://x", "--url"),
    ("--traffic --url http://x:port", "--url"),
    ("--traffic --url http://127.0.0.1:9", "--url"),
]


@pytest.mark.parametrize(("line", "option"), REFUSED)
def test_options_that_do_not_apply_are_refused_by_name(line: str, option: str) -> None:
    result = bench(*line.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option}: ") and result.stderr.count("\n") == 1


def test_prompts_go_with_a_tokenizer_only(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    for option in ("--dummy-weights", "--prompt-tokens", "--vocab-size"):
        result = bench("--traffic", "--url", "http://127.0.0.1:9", "--prompts", prompts, option, 5)
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {option}: ")
