"""The DFlash family as users meet it: command line, Python, certificate, memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dflash_engines import KINDS, folder
from dflash_reference import Flags, random_checkpoint
from eagle3_engines import target
from harness import VOCAB, tiny_config
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
from surefoot.kernels.backend import AttentionShape
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.loading import read_model_config
from surefoot.speculation.drafting.pools import DrafterPools
from surefoot.speculation.proposers.dflash.checkpoint import DUMMIES, dummy_config
from surefoot.speculation.proposers.dflash.proposer import DFlashOptions, DFlashProposer
from surefoot.speculation.state import SlotState
from tiny_models import tiny_hf_model

TORCH = ["--backend", "torch", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter")
    vocab = read_model_config(str(model)).vocab_size
    flags = Flags("dspark", "deepseek", hidden=64, target_hidden=64, vocab=vocab, draft_vocab=vocab)
    random_checkpoint(path, flags)
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(item) for item in arguments])


def test_generate_says_what_plain_decoding_says(model: Path, drafter: Path) -> None:
    line = ["generate", "the cat", "-m", model, *TORCH, "--max-tokens", "20", "--json"]
    plain = json.loads(run(*line, "--speculation", "off").stdout)
    drafted = run(*line, "--dflash", drafter, "--draft-policy", "fixed")
    assert drafted.exit_code == 0, drafted.output
    [found], [expected] = json.loads(drafted.stdout)["outputs"], plain["outputs"]
    assert found["token_ids"] == expected["token_ids"]
    assert found["speculation"]["verified"] > 10 and expected["speculation"]["verified"] == 0


def test_several_are_loaded_and_chosen_by_request(model: Path, drafter: Path) -> None:
    llm = LLM(
        str(model), backend="torch", dtype="float32", threads=1, max_num_seqs=4,
        proposers=("ngram", "eagle3=dummy", f"dflash={drafter}"), draft_policy="fixed",
    )  # fmt: skip
    assert llm.engine.config.max_draft_tokens == 8
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["the cat sat on the mat the cat sat"] * 4
    methods: list[Any] = ["off", "eagle3", "dflash", {"method": "auto", "max_draft_tokens": 1}]
    outputs = llm.generate(prompts, params, speculation=methods)
    assert len({output.outputs[0].text for output in outputs}) == 1


def test_a_drafter_is_inspected(model: Path, drafter: Path) -> None:
    facts = json.loads(run("models", "inspect", drafter, "--json").stdout)
    assert facts["kind"] == "DSpark drafter" and facts["layout"] == "deepseek"
    assert (facts["block"], facts["drafts"]) == (5, 5)
    assert "vanilla Markov head" in facts["variants"] and "confidence head" in facts["variants"]
    fits = run("models", "inspect", drafter, "--target", model)
    assert fits.exit_code == 0 and "fits the target   yes" in fits.stdout
    other = run("models", "inspect", folder("random"), "--target", model)
    assert other.exit_code == 1 and "its features are 32 wide, not 64" in other.stdout
    assert "windows of 7" in other.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dflash", "/nowhere"], "--dflash: there is no folder"),
        (["--proposer", "dflash"], "--dflash: is missing"),
        (["--dflash", "DRAFTER", "--proposer-option", "dflash.draft_tokens=6"], "above the 5 of a"),
        (["--dflash", "OTHER"], "--dflash: .* does not fit the target"),
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


@pytest.mark.parametrize("name", ["dummy", "dummy-dspark", "dummy-dflash2"])
def test_random_weights_draft_all_that_they_can(name: str, model: Path) -> None:
    llm = LLM(
        str(model), backend="torch", dtype="float32", threads=1, max_num_seqs=2,
        proposers=(f"dflash={name}",), draft_policy="fixed",
    )  # fmt: skip
    most = 15 if name == "dummy" else 7
    assert llm.engine.config.max_draft_tokens == most
    params = SamplingParams(temperature=0, max_tokens=most + 2, ignore_eos=True)
    [output] = llm.generate(["the cat"], params)
    assert len(output.outputs[0].token_ids) == most + 2


@pytest.mark.parametrize("kind", ["skilled", "skilled DSpark", "skilled DFlash 2"])
def test_the_certificate_finds_no_stale_state(kind: str) -> None:
    """Spells without verification and without proposals, preemption, prefix hits."""
    assert KINDS[kind].drafts <= 5
    config = EngineConfig(proposers=(f"dflash={folder(kind)}",))
    subject = Subject(target(), config, default_prompts(VOCAB, 160))
    noise = measure_noise(subject.decoder, calibration_texts(subject))
    size = replace(QUICK, greedy_jobs=4, greedy_length=30)
    section = run_offers(Judge(subject, noise), size, lambda label, done, total: None)
    assert section.problems == [] and section.gaps == []
    details = section.details["dflash"]
    assert details["checked"] >= QUICK.min_offers
    assert {"prefix hit", "preemption"} <= set(details["situations"])


@pytest.mark.parametrize("name", DUMMIES)
def test_what_it_takes_at_64_requests_beside_its_weights(name: str) -> None:
    """Of Qwen3-4B's shapes: scratch is shared between requests and rows, and stays below 0.3 GB;
    as much for twice the requests is far from twice as much."""
    shape = tiny_config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, heads=32, kv_heads=8,
        head_dim=128, layers=36, max_positions=40960,
    )  # fmt: skip
    config, backend = dummy_config(name, shape), TorchBackend("cpu", torch.bfloat16)
    network: Any = SimpleNamespace(
        config=config, backend=backend, layers=5, shape=AttentionShape(32, 8, 128, 1.0), behind=0,
        block=config.block_size, weight_bytes=0, captured_layers=(), max_positions=40960,
    )  # fmt: skip
    found = []
    for requests in (64, 128):
        state = SlotState(requests, 64, 15, 16, 151936, backend.device)
        proposer = DFlashProposer(DFlashOptions(path=name), state)
        proposer.network = network
        proposer.pools = DrafterPools(network, state, proposer.scratch_keys)
        assert proposer.needs().kv_bytes_per_token == 5 * 2 * 8 * 128 * 2
        found.append(proposer.needs().fixed_bytes)
    assert 64 * 16 * 20480 < found[0] < 300_000_000 and found[1] < 1.6 * found[0]
