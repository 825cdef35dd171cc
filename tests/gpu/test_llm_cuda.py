"""As a user would: a model folder, ``device="cuda"``, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from typer.testing import CliRunner

from certify_setups import SMALL
from surefoot import LLM, SamplingParams
from surefoot.certify.sizes import SCENARIOS
from surefoot.cli.main import app
from tiny_models import tiny_hf_model

pytestmark = pytest.mark.gpu
ON_DEVICE = False


def texts(model: Path, way: str, **options: Any) -> list[list[int]]:
    llm = LLM(str(model), dtype="float32", max_num_seqs=4, max_model_len=100, **options)
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)
    ]
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7]]
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, speculation=way)]


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_texts_are_those_of_the_cpu(device: str, tmp_path: Path) -> None:
    model = tiny_hf_model("llama", tmp_path)
    expected = texts(model, "off", backend="torch")
    for way in ("off", "auto"):
        assert texts(model, way, device=device) == expected


def test_certify_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "min_positions": 400,
        "min_verified": 20,
        "min_accepted": 1,
        "min_rejections": 20,
        "min_near": 0,
    }
    size = replace(SMALL, scenarios=SCENARIOS[:6], greedy_length=40, min_offers=1, **few)
    monkeypatch.setattr("surefoot.certify.sizes.QUICK", size)
    model, where = tiny_hf_model("llama", tmp_path), tmp_path / "result.json"
    line = ["certify", str(model), "--device", "cuda", "--dtype", "float32", "--quick"]
    result = CliRunner().invoke(app, [*line, "--no-self-test", "--json", str(where)])
    assert result.exit_code == 0, result.output
    written = json.loads(where.read_text())
    assert written["setup"]["rounds"] == "recorded" and written["rounds"]["recorded"] > 100
    assert written["setup"]["backend"] == "triton" and written["setup"]["gpu"]
