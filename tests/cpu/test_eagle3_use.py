"""EAGLE-3 as users meet it: command line, Python, certificate."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle3_engines import folder, target
from eagle3_reference import Flags, random_checkpoint
from harness import VOCAB
from surefoot import LLM, SamplingParams
from surefoot.certify.certificate import calibration_texts
from surefoot.certify.compare import Judge
from surefoot.certify.noise import measure_noise
from surefoot.certify.offers import run_offers
from surefoot.certify.prompts import default_prompts
from surefoot.certify.sizes import QUICK
from surefoot.certify.subject import Subject
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.models.loading import read_model_config
from tiny_models import tiny_hf_model

TORCH = ["--backend", "torch", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter")
    vocab = read_model_config(str(model)).vocab_size
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    flags = Flags(hidden=64, target_hidden=64, vocab=vocab, draft_vocab=vocab, extra=layers)
    random_checkpoint(path, flags)
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(item) for item in arguments])


def test_generate_says_what_plain_decoding_says(model: Path, drafter: Path) -> None:
    line = ["generate", "the cat", "-m", model, *TORCH, "--max-tokens", "20", "--json"]
    plain = json.loads(run(*line, "--speculation", "off").stdout)
    drafted = run(*line, "--eagle3", drafter, "--draft-policy", "fixed", "--max-draft-tokens", "3")
    assert drafted.exit_code == 0, drafted.output
    [found], [expected] = json.loads(drafted.stdout)["outputs"], plain["outputs"]
    assert found["token_ids"] == expected["token_ids"]
    assert found["speculation"]["verified"] > 10 and expected["speculation"]["verified"] == 0


def test_several_are_loaded_and_chosen_by_request(model: Path, drafter: Path) -> None:
    llm = LLM(
        str(model), backend="torch", dtype="float32", threads=1, max_num_seqs=4,
        proposers=("ngram", f"eagle3={drafter}"), proposer_options={"eagle3": {"draft_tokens": 2}},
        draft_policy="fixed",
    )  # fmt: skip
    assert [proposer.name for proposer in llm.engine.proposers] == ["ngram", "eagle3"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["the cat sat on the mat the cat sat"] * 4
    methods: list[Any] = ["off", "ngram", "eagle3", {"method": "auto", "max_draft_tokens": 1}]
    outputs = llm.generate(prompts, params, speculation=methods)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert "eagle3" in llm.engine.controller.names
    with pytest.raises(SurefootError, match="two paths"):
        EngineConfig(proposers=("eagle3=a",), proposer_options={"eagle3": {"path": "b"}})
    with pytest.raises(SurefootError, match="two paths"):
        EngineConfig(proposers=("eagle3=a", "eagle3=b"))


def test_who_is_named_twice_is_loaded_once() -> None:
    """As by ``--proposer eagle3 --eagle3 PATH``."""
    config = EngineConfig(proposers=("eagle3", "ngram", "eagle3=a", "ngram"))
    assert config.proposers == ("eagle3", "ngram")
    assert config.proposer_options == {"eagle3": {"path": "a"}}


@pytest.mark.parametrize("proposers", ["ngram", (1,), ["ngram", None], 5, iter(["ngram"])])
def test_proposers_are_a_list_of_names(proposers: Any) -> None:
    with pytest.raises(SurefootError, match=r"proposers: .* is no list of names"):
        EngineConfig(proposers=proposers)


def test_a_drafter_is_inspected(model: Path, drafter: Path) -> None:
    facts = json.loads(run("models", "inspect", drafter, "--json").stdout)
    assert facts["kind"] == "EAGLE-3 drafter" and facts["layout"] == "speculators"
    fits = run("models", "inspect", drafter, "--target", model)
    assert fits.exit_code == 0 and "fits the target   yes" in fits.stdout
    other = run("models", "inspect", folder("random"), "--target", model)
    assert other.exit_code == 1 and "its features are 32 wide, not 64" in other.stdout
    assert run("models", "inspect", model, "--target", model).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eagle3", "/nowhere"], "--eagle3: there is no folder"),
        (["--proposer", "eagle3"], "--eagle3: is missing"),
        (["--eagle3", "DRAFTER", "--proposer-option", "eagle3.draft_tokens=0"], "draft_tokens"),
        (["--eagle3", "OTHER"], "--eagle3: .* does not fit the target"),
    ],
)
def test_mistakes_name_their_option(
    arguments: list[str], message: str, model: Path, drafter: Path
) -> None:
    paths = {"DRAFTER": str(drafter), "OTHER": folder("random")}
    chosen = [paths.get(argument, argument) for argument in arguments]
    result = run("generate", "x", "-m", model, *TORCH, *chosen)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr)


@pytest.mark.parametrize(
    ("kind", "own"),
    [("skilled", {}), ("skilled", {"top_k": 3, "depth": 3, "draft_tokens": 6})],
)
def test_the_certificate_finds_no_stale_state(kind: str, own: dict[str, int]) -> None:
    """Spells without verification and without proposals, preemption, prefix hits."""
    config = EngineConfig(proposers=(f"eagle3={folder(kind)}",), proposer_options={"eagle3": own})
    subject = Subject(target(), config, default_prompts(VOCAB, 160))
    noise = measure_noise(subject.decoder, calibration_texts(subject))
    size = replace(QUICK, greedy_jobs=5, greedy_length=30)
    section = run_offers(Judge(subject, noise), size, lambda label, done, total: None)
    assert section.problems == [] and section.gaps == []
    details = section.details["eagle3"]
    assert details["checked"] >= QUICK.min_offers
    assert {"prefix hit", "preemption"} <= set(details["situations"])
