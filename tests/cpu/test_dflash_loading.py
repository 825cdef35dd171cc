"""Checkpoints of the DFlash family in every layout; what cannot be honoured is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_golden import GOLDEN
from dflash_reference import FULL, SLIDING, Flags, config_of, random_checkpoint, random_tensors
from harness import random_weights, tiny_config
from surefoot.errors import SurefootError
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposers.dflash.checkpoint import DUMMIES, dummy_config, open_checkpoint
from surefoot.speculation.proposers.dflash.config import (
    Convolutions,
    DFlashConfig,
    MarkovShape,
    Selector,
    Visibility,
    default_layers,
)
from surefoot.speculation.proposers.dflash.layouts import is_dflash, read_config
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.speculation.proposers.eagle3.config import is_eagle3

BOTH = Visibility(causal=False)
TAPS = (2, 6, 10)
VANILLA = MarkovShape("vanilla", 16)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash/draft": ("DFlash", {"layout": "z-lab", "block_size": 8, "anchor_predicts": False}),
    "dspark/draft": (
        "DSpark",
        {"layout": "deepseek", "block_size": 7, "anchor_predicts": True, "markov": VANILLA},
    ),
    "dspark/layouts/specforge": (
        "DSpark",
        {"layout": "specforge", "block_size": 7, "anchor_predicts": True, "markov": VANILLA},
    ),
    "dspark/layouts/specforge_normalized": (
        "DSpark",
        {"layout": "specforge", "block_size": 7, "anchor_predicts": True, "markov": VANILLA},
    ),
    "dflash2/draft": (
        "DFlash 2",
        {
            "layout": "z-lab", "block_size": 8, "anchor_predicts": False, "mask_token_id": 371,
            "convolutions": Convolutions(2, 16), "selector": Selector(24, 16),
            "layers": (Visibility(False, 10), BOTH, Visibility(False, 10)),
        },
    ),
    "dspark_speculators/anchor_predicts": (
        "DSpark",
        {"layout": "speculators", "anchor_predicts": True, "draft_vocab_size": 96},
    ),
    "dspark_speculators/anchor_is_bonus": (
        "DSpark",
        {"layout": "speculators", "anchor_predicts": False, "verifier": "golden/target"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_told_by_its_keys(name: str) -> None:
    folder, (family, expected) = GOLDEN / name, LAYOUTS[name]
    config = read_config(folder)
    assert is_dflash(folder) and not is_eagle3(folder) and config.family == family
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.layers_of(12) == TAPS and config.captured == 3 and config.layer.qk_norm
    assert config.confidence == config.confidence_with_markov == (family == "DSpark")


def written(folder: Path, flags: Flags, **changes: Any) -> DFlashConfig:
    """The config of ``flags`` with keys changed, of ``a.b`` in section a; None takes one away."""
    data = config_of(flags)
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = data
        for section in sections:
            place = place[section]
        place[last] = value
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    return read_config(folder)


NESTED = "transformer_layer_config__"
DSPARK = Flags("dspark", "specforge")
SLIDES = Flags(types=(SLIDING, FULL), window=4)
SPECULATORS = replace(SLIDES, layout="speculators")
READINGS: dict[str, tuple[Flags, dict[str, Any], dict[str, Any]]] = {
    # Rows that draft.
    "DeepSeek's DFlash drafts from the anchor": (
        Flags(layout="deepseek"), {}, {"anchor_predicts": True, "most_drafts": 5}
    ),
    "SpecForge's does not": (
        Flags(layout="specforge"), {}, {"anchor_predicts": False, "most_drafts": 4}
    ),
    "a normalised export of plain DFlash does": (
        Flags(), {"architectures": ["Qwen3DSparkModel"]}, {"anchor_predicts": True}
    ),
    "DSpark told by its Markov head alone": (
        Flags(), {"dflash_config__markov_rank": 8}, {"anchor_predicts": True}
    ),
    "speculators without the key": (
        Flags("dspark", "speculators"), {"sample_from_anchor": None}, {"anchor_predicts": False}
    ),
    # Where keys stand, and defaults.
    "a block size in the section": (
        Flags(), {"block_size": None, "dflash_config__block_size": 6}, {"block_size": 6}
    ),
    "no block size": (Flags(), {"block_size": None}, {"block_size": 16}),
    "a dspark section": (
        Flags(), {"dspark_config": {"markov_rank": 4}}, {"markov": MarkovShape("vanilla", 4)}
    ),
    "no Markov head": (DSPARK, {"dflash_config__markov_rank": 0,
        "dflash_config__enable_confidence_head": False}, {"markov": None, "confidence": False}),
    "a confidence head by its weight in training": (
        DSPARK,
        {"dflash_config__enable_confidence_head": None, "dflash_config__confidence_head_alpha": 1.0,
         "dflash_config__confidence_head_with_markov": None},
        {"confidence": True, "confidence_with_markov": False},
    ),
    "speculators' heads unless it says otherwise": (
        Flags("dspark", "speculators"),
        {"markov_rank": None, "enable_confidence_head": None, "confidence_head_with_markov": None},
        {"markov": MarkovShape("vanilla", 256), "confidence": True, "confidence_with_markov": True},
    ),
    "the old spelling of the RoPE base": (
        Flags(), {"rope_parameters": None, "rope_theta": 5e5}, {"rope_theta": 5e5}
    ),
    # Captured layers.
    "outputs are one less than entries": (
        Flags(), {"dflash_config__target_layer_ids": [0, 7]}, {"layer_ids": (1, 8)}
    ),
    "the embeddings": (
        Flags(), {"dflash_config__target_layer_ids": [-1, 7]}, {"layer_ids": (0, 8)}
    ),
    "speculators' are entries": (
        Flags(layout="speculators"), {"aux_hidden_state_layer_ids": [1, 8]}, {"layer_ids": (1, 8)}
    ),
    "none": (Flags(), {"dflash_config__target_layer_ids": None}, {"layer_ids": None}),
    # What rows see.
    "sliding layers are causal": (SLIDES, {}, {"layers": (Visibility(True, 4), BOTH)}),
    "unless is_causal says otherwise": (
        SLIDES, {"is_causal": False}, {"layers": (Visibility(False, 4), BOTH)}
    ),
    "is_causal is for all layers": (
        SLIDES, {"is_causal": True}, {"layers": (Visibility(True, 4), Visibility(True))}
    ),
    "and before the section's": (
        SLIDES, {"is_causal": False, "dflash_config__causal": True},
        {"layers": (Visibility(False, 4), BOTH)},
    ),
    "a window of its own": (
        SLIDES, {"dflash_config__swa_window_size": 3}, {"layers": (Visibility(True, 3), BOTH)}
    ),
    "a window that is off": (
        SLIDES, {"use_sliding_window": False}, {"layers": (Visibility(True), BOTH)}
    ),
    "all layers slide": (
        replace(SLIDES, types=(FULL, FULL)), {"dflash_config__use_swa": True},
        {"layers": (Visibility(True, 4), Visibility(True, 4))},
    ),
    "no list of types": (SLIDES, {"layer_types": None}, {"layers": (BOTH, BOTH)}),
    "types by their number": (
        SLIDES, {"layer_types": None, "max_window_layers": 1},
        {"layers": (BOTH, Visibility(True, 4))},
    ),
    "speculators' full layers are never causal": (
        SPECULATORS, {}, {"layers": (Visibility(True, 4, from_anchor=True), BOTH)}
    ),
    "and sliding ones need not be": (
        SPECULATORS, {"sliding_window_non_causal": True},
        {"layers": (Visibility(False, 4, from_anchor=True), BOTH)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_keys_mean_what_their_projects_mean(name: str, tmp_path: Path) -> None:
    flags, changes, expected = READINGS[name]
    config = written(tmp_path, flags, **changes)
    for key, value in expected.items():
        assert getattr(config if hasattr(config, key) else config.layer, key) == value


def test_layers_are_captured_where_the_projects_do() -> None:
    """HF's entries, one more than the outputs of the projects' formula, halves to even."""
    assert default_layers(5, 36) == (2, 10, 18, 26, 34)
    assert default_layers(5, 30) == (2, 9, 15, 21, 28)
    assert default_layers(1, 30) == (16,)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in random_tensors(DSPARK).items() if key != name}


BARE = Flags("dspark", "speculators")
REFUSED: dict[str, tuple[Flags, dict[str, Any], str]] = {
    "DeepSeek-V4": (Flags(), {"dspark_block_size": 5}, "DeepSeek-V4"),
    "another head": (Flags(), {"dflash_config__projector_type": "domino"}, "'domino' projector"),
    "places that disagree": (
        DSPARK, {"markov_rank": 9}, r"contradicts itself: dflash_config\.markov_rank = 8, markov_"
    ),
    "unknown, nested": (Flags(), {"dflash_config__causal_head": True}, r"_config\.causal_head"),
    "unknown, flat": (Flags(), {"attention_sink_bias": True}, "attention_sink_bias, which is not"),
    "scaled values": (Flags(), {"attention_value_scale": 2.0}, "attention_value_scale"),
    "unknown of speculators": (BARE, {"mystery": 3}, "mystery, which is not known"),
    "interleaved RoPE": (Flags(), {"is_neox_style": False}, "half-split"),
    "interleaved, in other words": (Flags(), {"rope_is_neox_style": False}, "half-split"),
    "another architecture": (Flags(), {"model_type": "gemma4"}, "'gemma4'"),
    "another kind of layer": (Flags(), {"layer_types": [FULL, "linear_attention"]}, "linear"),
    "a kind of speculators'": (BARE, {"speculators_model_type": "mtp"}, "'mtp' drafter"),
    "no layers": (BARE, {"transformer_layer_config": None}, "lacks transformer_layer_config"),
    "no mask": (Flags(), {"dflash_config__mask_token_id": None}, "lacks mask_token_id"),
    "a mask beyond": (Flags(), {"dflash_config__mask_token_id": 48}, "mask_token_id 48 in a vocab"),
    "no Markov head of that kind": (DSPARK, {"dflash_config__markov_head_type": "tree"}, "'?tree"),
    "a confidence head on air": (
        DSPARK, {"dflash_config__markov_rank": 0}, "reads a Markov head, and no Markov head"
    ),
    "mixed families": (
        Flags("dflash2"), {"dflash_config__markov_rank": 4}, "mixes DFlash 2 with another"
    ),
    "half of DFlash 2": (Flags("dflash2"), {"dflash_config__selector_rank": None}, "lacks select"),
    "groups that do not fit": (
        Flags("dflash2"), {"dflash_config__conv_group_size": 5}, "conv_group_size 5"
    ),
    "selecting from a part": (
        Flags("dflash2", "speculators"), {"draft_vocab_size": 20}, "over a draft vocabulary"
    ),
    "a long block": (Flags(), {"block_size": 64}, "block_size of 64; known: 2 to 63"),
    "layers in disorder": (Flags(), {"dflash_config__target_layer_ids": [7, 0]}, "ascending"),
    "DeepSeek with windows": (
        Flags(layout="deepseek"), {"layer_types": [SLIDING, FULL]}, "causal or sliding"
    ),
    "DeepSeek in one direction": (Flags(layout="deepseek"), {"is_causal": True}, "causal or slid"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    flags, changes, message = REFUSED[name]
    with pytest.raises(SurefootError, match=message):
        written(tmp_path, flags, **changes)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = tiny_config(layers=8, max_positions=256)
    return Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32))


MISFITS: dict[str, tuple[Flags, dict[str, torch.Tensor] | None, str]] = {
    "missing": (DSPARK, without("markov_head.markov_w1.weight"), "markov_w1.weight is missing"),
    "another head": (
        DSPARK, {**random_tensors(DSPARK), "prefix_gru.weight": torch.zeros(2)}, "prefix_gru"
    ),
    "fused projections": (
        Flags(), {**random_tensors(Flags()), "layers.0.self_attn.g_proj.weight": torch.zeros(2, 2)},
        "g_proj",
    ),
    "sinks": (
        Flags(),
        {**random_tensors(Flags()), "layers.0.self_attn.attention_sink_bias": torch.zeros(4)},
        "attention_sink_bias is not known",
    ),
    "a mask of another width": (
        Flags(), {**random_tensors(Flags()), "mask_embedding": torch.zeros(30)}, "mask_embedding is"
    ),
    "a wider target": (Flags(target_hidden=64), None, "features are 64 wide, not 32"),
    "another vocabulary": (Flags(vocab=50, draft_vocab=50), None, "50 tokens, not 48"),
    "layers beyond": (Flags(taps=(2, 20)), None, r"\[2, 20\] of a"),
    "the last output": (Flags(taps=(2, 8)), None, "the last layer's output"),
    "no embedding": (Flags(hidden=16, own_head=True), None, "no embedding"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_by_name(name: str, decoder: Decoder, tmp_path: Path) -> None:
    flags, tensors, message = MISFITS[name]
    random_checkpoint(tmp_path, flags, tensors)
    with pytest.raises(SurefootError, match=message) as caught:
        DFlashNetwork(open_checkpoint(str(tmp_path)), decoder)
    assert caught.value.option == "dflash.path"


def test_copies_of_the_targets_embedding_and_head_are_not_kept(
    decoder: Decoder, tmp_path: Path
) -> None:
    """As DeepSeek's files carry them: neither is loaded a second time, nor counted."""
    embedding = random_weights(decoder.config)["model.embed_tokens.weight"]
    tensors = random_tensors(DSPARK)
    bare = random_checkpoint(tmp_path, DSPARK, tensors)
    plain = DFlashNetwork(open_checkpoint(str(tmp_path)), decoder)
    both = {**bare, "embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    random_checkpoint(tmp_path, DSPARK, both)
    network = DFlashNetwork(open_checkpoint(str(tmp_path)), decoder)
    assert network.table is decoder.table and network.head is decoder.head_linear
    assert network.weight_bytes == plain.weight_bytes
    both["lm_head.weight"][47, 31] += 1
    random_checkpoint(tmp_path, DSPARK, both)
    network = DFlashNetwork(open_checkpoint(str(tmp_path)), decoder)
    assert network.head is not decoder.head_linear
    assert network.weight_bytes == plain.weight_bytes + 48 * 32 * 4


def test_heads_of_early_exports_are_found(tmp_path: Path) -> None:
    tensors = random_tensors(DSPARK)
    nested = {
        f"logit_head.{name}" if "head" in name else name: tensor for name, tensor in tensors.items()
    }
    random_checkpoint(tmp_path, DSPARK, nested)
    assert open_checkpoint(str(tmp_path)).tensors.keys() == tensors.keys()


def test_a_mask_file_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "sprung").touch, ())

    random_checkpoint(tmp_path, Flags())
    torch.save({"mask": Trap()}, tmp_path / "mask_embedding.pt")
    with pytest.raises(SurefootError, match="cannot be read"):
        open_checkpoint(str(tmp_path))
    assert not (tmp_path / "sprung").exists()


def test_dummies_are_of_the_public_sizes() -> None:
    target = tiny_config(layers=36)
    sizes = {name: dummy_config(name, target) for name in DUMMIES}
    assert [config.family for config in sizes.values()] == ["DFlash", "DSpark", "DFlash 2"]
    assert [config.most_drafts for config in sizes.values()] == [15, 7, 7]
    assert all(config.layers_of(36) == (2, 10, 18, 26, 34) for config in sizes.values())
    assert dummy_config("dummy", tiny_config(layers=2)).layers_of(2) == (0, 1)
