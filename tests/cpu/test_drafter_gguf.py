"""Drafters written as GGUF files: what llama.cpp's converter writes, and what drafts the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dflash_golden import GOLDEN
from eagle3_golden import golden_target
from surefoot.cli.main import app
from surefoot.errors import SurefootError
from surefoot.kernels.quant import QuantTensor, dense
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint as open_dflash
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.speculation.proposers.eagle3.checkpoint import checkpoint_facts
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint as open_eagle3
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter
from surefoot.train.dflash.gguf import write_dflash
from surefoot.train.eagle3.gguf import write_eagle3
from surefoot.train.gguf import export_gguf
from test_eagle3_drafter import backend_of
from test_train_dflash import recipe_of as spark_of
from train_harness import recipe_of, tiny_target


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_blocks_are_rounded_as_elsewhere(kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    matrix = torch.randn(70, 96, generator=torch.Generator().manual_seed(5))
    matrix[2, 32:64] = 0
    matrix[3, :32] = 0.25
    found = QuantTensor.of(matrix, kind)
    assert found.kind == kind
    wanted = quantize(matrix.numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(found.data.numpy(), wanted)
    if kind == "Q8_0":
        assert torch.equal(QuantTensor.of(found.dequantize()).data, found.data)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        QuantTensor.of(matrix[:, :40], kind)
    with pytest.raises(ValueError, match="nothing is rounded to Q4_0"):
        QuantTensor.of(matrix, "Q4_0")


def test_dspark_is_written_as_by_its_converter(tmp_path: Path) -> None:
    checkpoint = open_dflash(str(GOLDEN / "dspark" / "draft"))
    target = replace(checkpoint.config.layer, layers=30)
    write_dflash(tmp_path / "own.gguf", checkpoint, target, head=False)
    found = GgufFile(tmp_path / "own.gguf")
    wanted = GgufFile(GOLDEN / "gguf_drafters" / "dspark-q8_0.gguf")
    for key, value in found.metadata.items():
        if key.startswith("dflash.") and key in wanted.metadata:
            assert value == wanted.metadata[key], key
    assert found.metadata["tokenizer.ggml.mask_token_id"] == checkpoint.config.mask_token_id
    assert set(wanted.tensors) - set(found.tensors) <= {"token_embd.weight"}
    for name, tensor in found.tensors.items():
        other = wanted.tensors[name]
        assert (tensor.kind, tensor.shape) == (other.kind, other.shape), name
        assert torch.equal(found.raw(tensor), wanted.raw(other)), name
    again = open_dflash(str(tmp_path / "own.gguf"))
    assert replace(again.config, layout="", layer=checkpoint.config.layer) == replace(
        checkpoint.config, layout=""
    )


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_eagle3_in_8_bits_drafts_nearly_the_same(backend: str, tmp_path: Path) -> None:
    folder = GOLDEN / "eagle3_chain"
    checkpoint = open_eagle3(str(folder / "draft"))
    target = golden_target(folder, backend_of(backend), 512, 64)
    path = tmp_path / "own.gguf"
    write_eagle3(path, checkpoint, target.config, head=True)
    again = open_eagle3(str(path))
    assert again.config.layers_of(target.config.layers) == checkpoint.config.layers_of(
        target.config.layers
    )
    assert torch.equal(again.target_ids, checkpoint.target_ids)
    assert isinstance(again.tensors["fc.weight"], QuantTensor)
    facts = checkpoint_facts(str(path), target.config)
    assert facts is not None and facts["layout"] == "gguf" and facts["fits_the_target"]
    for name, tensor in again.tensors.items():
        expected = dense(checkpoint.tensors[name]).float()
        assert (dense(tensor) - expected).abs().max() <= expected.abs().max() / 127, name
    features = torch.randn(3, 3 * 64, generator=torch.Generator().manual_seed(1))
    small, large = (Eagle3Drafter(each, target) for each in (again, checkpoint))
    hidden, expected = small.fuse(features), large.fuse(features)
    assert (hidden - expected).norm() < 0.02 * expected.norm()
    logits, expected = small.logits(expected), large.logits(expected)
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_a_head_that_is_left_out_is_the_targets_rows(tmp_path: Path) -> None:
    folder = GOLDEN / "eagle3_chain"
    checkpoint = open_eagle3(str(folder / "draft"))
    path = tmp_path / "own.gguf"
    for name in ("torch", "native", "triton"):
        target = golden_target(folder, backend_of(name), 512, 64)
        if not target.config.tied_embeddings:
            target.config = replace(target.config, tied_embeddings=True)
        write_eagle3(path, checkpoint, target.config, head=False)
        again = open_eagle3(str(path))
        assert "lm_head.weight" not in again.tensors
        drafter = Eagle3Drafter(again, target)
        rows = target.backend.embed(target.table, checkpoint.target_ids)
        hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
        found = target.backend.linear(drafter.head, hidden)
        torch.testing.assert_close(found, hidden @ rows.float().T, atol=1e-4, rtol=1e-4)
        loose = replace(target.config, tied_embeddings=False)
        target.config = loose
        with pytest.raises(SurefootError, match="no lm_head for its draft vocabulary"):
            Eagle3Drafter(again, target)


def test_what_the_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    checkpoint = open_eagle3(str(GOLDEN / "eagle3_chain" / "draft"))
    layer = checkpoint.config.layer
    for change in ({"norm_fed_back": True}, {"logit_scale": 2.0}, {"captured": 5}):
        other = replace(checkpoint, config=replace(checkpoint.config, **change))
        with pytest.raises(SurefootError, match="does not know"):
            write_eagle3(tmp_path / "x.gguf", other, layer, head=True)
    family = open_dflash(str(GOLDEN / "dflash2" / "draft"))
    with pytest.raises(SurefootError, match="not written as GGUF"):
        write_dflash(tmp_path / "x.gguf", family, layer, head=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_command_writes_what_loads_and_drafts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe: Any = (
        recipe_of(tmp_path / "data", [(2, 9)] * 3)
        if kind == "eagle3"
        else spark_of(tmp_path / "data", "dspark")
    )
    recipe.export(tmp_path / "drafter")
    monkeypatch.setattr("surefoot.train.target.load_target", lambda *_: tiny_target())
    path = tmp_path / "drafter.gguf"
    wanted = ["train", "export", "--target", "t", "--drafter", str(tmp_path / "drafter")]
    result = CliRunner().invoke(app, [*wanted, "--out", str(path)])
    assert result.exit_code == 0 and "the head is the target's" in result.output
    opened: Any = (open_eagle3 if kind == "eagle3" else open_dflash)(str(path))
    assert set(opened.tensors) & {"lm_head.weight", "embed_tokens.weight"} == set()
    made = Eagle3Drafter if kind == "eagle3" else DFlashNetwork
    decoder = tiny_target().decoder
    assert made(opened, decoder).captured_layers == recipe.layers
    few = [*wanted, "--out", str(path), "--draft-vocab", "7"]
    assert CliRunner().invoke(app, few).exit_code != 0
    result = CliRunner().invoke(app, [*few, "--data", str(tmp_path / "data")])
    assert result.exit_code == 0 and "% of the texts" in result.output
    cut: Any = (open_eagle3 if kind == "eagle3" else open_dflash)(str(path))
    assert len(cut.target_ids) == 7 == cut.config.draft_vocab_size
    hidden = torch.randn(2, decoder.config.hidden_size, generator=torch.Generator().manual_seed(2))
    whole, small = made(opened, decoder), made(cut, decoder)
    places = torch.searchsorted(opened.target_ids, cut.target_ids)
    torch.testing.assert_close(small.logits(hidden), whole.logits(hidden)[:, places])
    result = CliRunner().invoke(app, [*wanted, "--out", str(tmp_path / "other.bin")])
    assert result.exit_code != 0
    result = CliRunner().invoke(app, [*wanted, "--out", str(path), "--bits", "5"])
    assert result.exit_code != 0 and "use 8 or 4" in result.output
    coarse, fine = tmp_path / "coarse.gguf", tmp_path / "fine.gguf"
    for bits, name in (("4", coarse), ("8", fine)):
        result = CliRunner().invoke(app, [*wanted, "--out", str(name), "--bits", bits])
        assert result.exit_code == 0, result.output
    assert coarse.stat().st_size < fine.stat().st_size
    with torch.no_grad():
        recipe.network.tensors()["lm_head.weight" if kind == "eagle3" else "fc.weight"][0] += 1
    recipe.export(tmp_path / "other")
    assert export_gguf(str(tmp_path / "other"), path, tiny_target()) == (kind == "dspark")
    if kind == "eagle3":
        assert "lm_head.weight" in open_eagle3(str(path)).tensors


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_layers_of_4_bits_are_those_of_8_but_for_rounding(kind: str, tmp_path: Path) -> None:
    """Tables keep 8, and what has 4 already keeps its blocks."""
    folder = GOLDEN / ("eagle3_chain" if kind == "eagle3" else "dspark") / "draft"
    opened: Any = open_eagle3 if kind == "eagle3" else open_dflash
    written: Any = write_eagle3 if kind == "eagle3" else write_dflash
    checkpoint = opened(str(folder))
    target = replace(checkpoint.config.layer, layers=30)
    path, again = tmp_path / "own.gguf", tmp_path / "again.gguf"
    written(path, checkpoint, target, False, bits=4)
    found = opened(str(path))
    kinds: dict[str, set[str]] = {}
    for name, tensor in found.tensors.items():
        if isinstance(tensor, QuantTensor):
            kinds.setdefault(tensor.kind, set()).add(name)
            expected = dense(checkpoint.tensors[name]).float()
            steps = 15 if tensor.kind == "Q4_1" else 127
            off = (dense(tensor) - expected).abs().max()
            assert off <= 1.02 * expected.abs().max() / steps, name
    assert all(name.startswith(("layers.", "fc.")) for name in kinds["Q4_1"])
    assert {"fc.weight", "layers.0.mlp.down_proj.weight"} <= kinds["Q4_1"]
    if kind == "dspark":
        assert "embed_tokens.weight" in kinds["Q8_0"]
        written(again, found, target, False)
        assert torch.equal(
            opened(str(again)).tensors["fc.weight"].data, found.tensors["fc.weight"].data
        )


def test_training_goes_on_from_8_bits_and_fewer_tokens(tmp_path: Path) -> None:
    source = spark_of(tmp_path / "data", "dspark", mask_token=7)
    source.export(tmp_path / "spark")
    kept = torch.arange(3, 40, 2)
    path = tmp_path / "spark.gguf"
    export_gguf(str(tmp_path / "spark"), path, tiny_target(), kept)
    recipe = spark_of(tmp_path / "data", "dspark")
    before = recipe.network.tensors()["markov_head.markov_w2.weight"].clone()
    recipe.begin_from(str(path))
    assert recipe.config.mask_token_id == recipe.network.config.mask_token_id == 7
    stored = open_dflash(str(path)).tensors
    for name, value in recipe.network.tensors().items():
        given = dense(stored[name]).float()
        if name == "markov_head.markov_w2.weight":
            assert torch.equal(value[kept], given), name
            others = torch.tensor([token for token in range(len(value)) if token not in kept])
            assert torch.equal(value[others], before[others]), "random as they were"
        else:
            assert torch.equal(value, given), name
    with pytest.raises(SurefootError, match=r"init_from.*layers = 2, and 3"):
        spark_of(tmp_path / "data", "dspark", layers=3).begin_from(str(path))
    with pytest.raises(SurefootError, match="mask token 7, not 9"):
        spark_of(tmp_path / "data", "dspark", mask_token=9).begin_from(str(path))
    with pytest.raises(SurefootError, match="init_from"):
        recipe_of(tmp_path / "data", [(2, 6)] * 3).begin_from(str(path))
