"""EAGLE-3 checkpoints in every layout and variant; what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_golden import BLOCK, GOLDEN
from eagle3_reference import Flags, Reference, config_of, random_checkpoint, random_tensors
from harness import random_weights, tiny_config
from surefoot.errors import SurefootError
from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.config import read_config
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter

VARIANTS = {
    "plain": Flags(),
    "midlayer": Flags(nested=False),
    "prefixed": Flags(nested=False, prefix="model."),
    "draft vocabulary": Flags(draft_vocab=20),
    "norm before residual": Flags(norm_before_residual=True),
    "norm before fc": Flags(norm_before_fc=True),
    "norm per layer": Flags(fc_norm=True),
    "norm fed back": Flags(norm_output=True),
    "qk norm": Flags(qk_norm=True),
    "biases": Flags(attention_bias=True),
    "other theta": Flags(theta=500000.0),
    "own embedding": Flags(own_embedding=True),
    "narrower": Flags(hidden=16, own_embedding=True, heads=2, kv_heads=1),
}


def target(**overrides: Any) -> Decoder:
    config = tiny_config(layers=8, max_positions=256, **overrides)
    return Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return target()


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_their_formulas(
    name: str, pickled: bool, decoder: Decoder, tmp_path: Path
) -> None:
    flags = VARIANTS[name]
    tensors = random_checkpoint(tmp_path, flags, pickled=pickled)
    drafter = Eagle3Drafter(open_checkpoint(str(tmp_path)), decoder)
    reference = Reference(
        flags, tensors, random_weights(decoder.config)["model.embed_tokens.weight"]
    )
    torch.manual_seed(3)
    captured, tokens = torch.randn(9, 96), torch.randint(0, 48, (9,))
    kv = decoder.backend.allocate_kv(1, 5, BLOCK, drafter.shape)
    tables = torch.tensor([[4, 2, 1, 3]], dtype=torch.int32)

    def batch(tokens: torch.Tensor, keys: torch.Tensor) -> FlatBatch:
        zero = torch.zeros(1, dtype=torch.int64)
        return FlatBatch(tokens, keys - 1, keys, keys * 0, tables, zero, 12, first_key=1)

    g = drafter.fuse(captured)
    assert torch.allclose(g.double(), reference.fuse(captured), atol=1e-4)
    hidden = drafter.step(g.clone(), batch(tokens, torch.arange(9) + 1), kv)
    expected = reference.layer(reference.fuse(captured), tokens)
    assert torch.allclose(hidden.double(), expected, atol=1e-4)
    assert torch.allclose(drafter.logits(hidden).double(), reference.logits(expected), atol=1e-4)
    back = drafter.fed_back(hidden[-1:])
    again = drafter.step(back.clone(), batch(tokens[:1], torch.tensor([10])), kv)
    if flags.norm_output:
        expected = torch.cat(
            (reference.fuse(captured), reference.norm(expected, "norm.weight")[-1:])
        )
    else:
        expected = torch.cat((reference.fuse(captured), expected[-1:]))
    expected = reference.layer(expected, torch.cat((tokens, tokens[:1])))
    assert torch.allclose(again.double(), expected[-1:], atol=1e-4)
    ids = drafter.target_ids
    assert (torch.arange(48) if ids is None else ids).tolist() == reference.target_ids.tolist()


def test_an_embedding_that_repeats_the_targets_is_not_kept(
    decoder: Decoder, tmp_path: Path
) -> None:
    tensors = random_tensors(Flags())
    tensors["embed_tokens.weight"] = random_weights(decoder.config)["model.embed_tokens.weight"]
    random_checkpoint(tmp_path, Flags(), tensors)
    assert Eagle3Drafter(open_checkpoint(str(tmp_path)), decoder).entry.table is decoder.table
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].clone()
    tensors["embed_tokens.weight"][47, 31] += 1
    random_checkpoint(tmp_path, Flags(), tensors)
    assert Eagle3Drafter(open_checkpoint(str(tmp_path)), decoder).entry.table is not decoder.table


@pytest.mark.parametrize(
    ("flags", "layers", "expected"),
    [
        (Flags(), 30, (2, 15, 27)),
        (Flags(extra={"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}), 30, (2, 15, 27)),
        (Flags(extra={"eagle_aux_hidden_state_layer_ids": [3, 9, 20]}), 30, (3, 9, 20)),
        # Counted as outputs: known by being the default less one, or by where the ids stand.
        (Flags(extra={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}), 30, (2, 15, 27)),
        (
            Flags(
                nested=False,
                extra={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 9, 20]}},
            ),
            30,
            (4, 10, 21),
        ),
    ],
)
def test_captured_layers_in_one_convention(
    flags: Flags, layers: int, expected: tuple[int, ...], tmp_path: Path
) -> None:
    random_checkpoint(tmp_path, flags)
    assert read_config(tmp_path).layers_of(layers) == expected


def test_flat_norm_output_is_about_the_head(decoder: Decoder, tmp_path: Path) -> None:
    flags = Flags(nested=False, extra={"norm_output": False})
    random_checkpoint(tmp_path, flags)
    config = read_config(tmp_path)
    assert not config.norm_before_head and not config.norm_fed_back
    drafter = Eagle3Drafter(open_checkpoint(str(tmp_path)), decoder)
    hidden = torch.randn(3, 32)
    weight = random_tensors(flags)["lm_head.weight"]
    assert torch.allclose(drafter.logits(hidden), hidden @ weight.T, atol=1e-5)


def without(name: str) -> dict[str, torch.Tensor]:
    return {
        key: value for key, value in random_tensors(Flags(draft_vocab=20)).items() if key != name
    }


REFUSED: dict[str, tuple[Flags, dict[str, torch.Tensor] | None, str]] = {
    "missing": (Flags(draft_vocab=20), without("fc.weight"), "fc.weight is missing"),
    "no vocabulary map": (
        Flags(draft_vocab=20),
        {k: v for k, v in without("d2t").items() if k != "t2d"},
        "neither d2t nor t2d",
    ),
    "vocabulary maps disagree": (
        Flags(draft_vocab=20),
        {**random_tensors(Flags(draft_vocab=20)), "t2d": torch.arange(48) < 20},
        "disagree",
    ),
    "map out of range": (
        Flags(draft_vocab=20),
        {**without("t2d"), "d2t": torch.full((20,), 40)},
        "does not map",
    ),
    "unread tensor": (
        Flags(),
        {**random_tensors(Flags()), "layers.0.extra.weight": torch.zeros(2)},
        r"layers\.0\.extra\.weight is not known",
    ),
    "shape": (
        Flags(),
        {**random_tensors(Flags()), "fc.weight": torch.zeros(32, 64)},
        r"fc\.weight is \(32, 64\), expected \(32, 96\)",
    ),
    "flag": (Flags(extra={"norm_twice": True}), None, "norm_twice, which is not known"),
    "flat flag": (Flags(nested=False, extra={"fc_twice": 1}), None, "fc_twice, which is not known"),
    "section flag": (
        Flags(nested=False, extra={"eagle_config": {"mystery": 1}}), None, r"eagle_config\.mystery"
    ),
    "both norms": (Flags(norm_before_fc=True, fc_norm=True), None, "both fc_norm and"),
    "other kind": (Flags(extra={"speculators_model_type": "dflash"}), None, "'dflash' drafter"),
    "wider target": (
        Flags(target_hidden=64), None, "64 wide, not 32; it was made for some/target"
    ),
    "other vocabulary": (Flags(vocab=50, draft_vocab=50), None, "50 tokens, not 48"),
    "layers": (
        Flags(extra={"eagle_aux_hidden_state_layer_ids": [2, 4, 20]}), None, r"\[2, 4, 20\] of a"
    ),
    "no embedding": (Flags(hidden=16), None, "no embedding"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, decoder: Decoder, tmp_path: Path) -> None:
    flags, tensors, message = REFUSED[name]
    random_checkpoint(tmp_path, flags, tensors)
    with pytest.raises(SurefootError, match=message) as caught:
        Eagle3Drafter(open_checkpoint(str(tmp_path)), decoder)
    assert caught.value.option == "eagle3.path"


def test_more_than_one_layer_is_refused(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, Flags())
    config = config_of(Flags())
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurefootError, match="2 layers"):
        open_checkpoint(str(tmp_path))


def test_no_folder() -> None:
    with pytest.raises(SurefootError, match="there is no folder"):
        open_checkpoint("./nowhere")


def test_a_pickled_file_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "sprung").touch, ())

    random_checkpoint(tmp_path, Flags())
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SurefootError, match="cannot be read"):
        open_checkpoint(str(tmp_path))
    assert not (tmp_path / "sprung").exists()


def test_golden_checkpoints_are_flat() -> None:
    for name, theta in (("eagle3_chain", 10000.0), ("eagle3_tree", 500000.0)):
        config = read_config(GOLDEN / name / "draft")
        assert config.layout == "flat" and config.layer.rope_theta == theta
        assert replace(config, layer_ids=None) == config
