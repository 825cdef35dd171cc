"""Drafters that come with the package: loaded unasked for their model, and for no other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from surefoot import LLM, SamplingParams, SurefootError
from surefoot.cli.checks import check_drafter
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.models.loading import load_checkpoint
from surefoot.speculation import shipped
from surefoot.speculation.proposers.eagle3.checkpoint import dummy_checkpoint
from surefoot.speculation.registry import default, inspect_drafter
from surefoot.speculation.shipped import shipped_drafters, with_shipped
from surefoot.train.eagle3.gguf import write_eagle3
from tiny_models import tiny_hf_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def drafter(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An EAGLE-3 drafter that is shipped for ``model``."""
    checkpoint = load_checkpoint(str(model), dtype=torch.float32)
    decoder = Decoder(checkpoint.config, checkpoint.weights, TorchBackend("cpu", torch.float32))
    path = tmp_path / "tiny.gguf"
    made = dummy_checkpoint(decoder.config, "cpu", torch.float32)
    write_eagle3(path, made, decoder.config, head=True)
    entry = {"proposer": "eagle3", "file": path.name, "size": path.stat().st_size}
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    index = {str(model): [entry | {"default": True}]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return path


def test_it_is_loaded_unasked_and_changes_no_text(model: Path, drafter: Path) -> None:
    llm = LLM(
        str(model), max_num_seqs=1, max_model_len=64, kv_blocks=8,
        draft_policy="fixed",
    )  # fmt: skip
    assert [item.name for item in llm.engine.proposers] == ["ngram", "eagle3"]
    assert "eagle3" in llm.engine.drafts_from
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with_drafts = llm.generate("one two", params)[0].outputs[0].token_ids
    assert llm.generate("one two", params, speculation="off")[0].outputs[0].token_ids == with_drafts


def test_who_gets_it(model: Path, drafter: Path) -> None:
    options = {"eagle3": {"path": str(drafter)}}
    name = str(model)
    found = with_shipped(EngineConfig(model=name))
    assert found.proposers == (*default(), "eagle3") and found.proposer_options == options
    # By its name alone, with other options kept.
    asked = EngineConfig(
        model=name, proposers=("eagle3",), proposer_options={"eagle3": {"top_k": 2}}
    )
    assert with_shipped(asked).proposer_options == {"eagle3": {"top_k": 2, **options["eagle3"]}}
    for other in (
        EngineConfig(model=name, proposers=default()),
        EngineConfig(model=name, proposers=()),
        EngineConfig(model=name, max_draft_tokens=0),
        EngineConfig(model=name, proposers=("eagle3=mine",)),
        EngineConfig(model="another"),
    ):
        assert with_shipped(other) == other


def test_a_damaged_one_is_told_of(model: Path, drafter: Path) -> None:
    data = drafter.read_bytes()
    assert check_drafter("another") is None
    found = check_drafter(str(model))
    assert found is not None and found.status == "ok" and "loaded by default" in found.detail
    drafter.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SurefootError, match="is damaged") as caught:
        with_shipped(EngineConfig(model=str(model)))
    assert caught.value.option == "eagle3.path"
    with_shipped(EngineConfig(model=str(model), proposers=default()))
    drafter.unlink()
    found = check_drafter(str(model))
    assert found is not None and found.status == "fail" and found.fix


def test_it_is_listed(model: Path, drafter: Path) -> None:
    assert str(drafter) in CliRunner().invoke(app, ["models", "list"]).stdout
    listed = json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).stdout)
    wanted = {"model": str(model), "proposer": "eagle3", "path": str(drafter)}
    assert listed["drafters"] == [wanted]


def test_the_packages_own_are_whole() -> None:
    for item in shipped_drafters():
        assert item.is_whole() and item.size <= 16_000_000
        facts = inspect_drafter(str(item.path))
        assert facts is not None and facts["kind"]
