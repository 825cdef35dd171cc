"""A checkpoint of the DFlash family: tensors under one set of names, from a folder or made up.

Canonical names are those of ``expected_shapes``; files may prefix them with ``model.``, and heads
with ``logit_head.``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.models.config import ModelConfig
from surefoot.models.decoder import layer_shapes
from surefoot.speculation.drafting import dummy
from surefoot.speculation.drafting.checkpoints import checked, interface
from surefoot.speculation.drafting.facts import drafter_facts, fit_facts
from surefoot.speculation.drafting.fit import Interface
from surefoot.speculation.drafting.fit import misfits as usual_misfits
from surefoot.speculation.drafting.folders import (
    DrafterCheckpoint,
    errors_about,
    find_folder,
    read_tensor_file,
    read_tensors,
)
from surefoot.speculation.drafting.gguf import holds, is_gguf
from surefoot.speculation.proposers.dflash.config import (
    Convolutions,
    DFlashConfig,
    MarkovShape,
    Selector,
    Visibility,
)
from surefoot.speculation.proposers.dflash.gguf import (
    ARCHITECTURE,
    open_gguf,
    read_gguf_config,
    read_gguf_tensors,
)
from surefoot.speculation.proposers.dflash.layouts import is_dflash, read_config

OPTION = "dflash.path"
MASK = "mask_embedding"
"""What the masks of a block are embedded as, where that is no token's."""
_MASK_FILE = "mask_embedding.pt"
DUMMIES = {
    dummy.NAME: ("DFlash", 16),
    f"{dummy.NAME}-dspark": ("DSpark", 7),
    f"{dummy.NAME}-dflash2": ("DFlash 2", 8),
}
"""Families and block sizes of random weights, by what takes the place of a path."""
DFlashCheckpoint = DrafterCheckpoint[DFlashConfig]


def open_config(path: str) -> tuple[Path, DFlashConfig]:
    """The folder, the GGUF file, or the repository ``org/name`` of the Hugging Face hub, and its
    config. Raises SurefootError about ``dflash.path``."""
    with errors_about(OPTION):
        if is_gguf(path):
            file = Path(path).expanduser()
            return file, read_gguf_config(open_gguf(file))
        folder = find_folder(path)
        return folder, read_config(folder)


def open_checkpoint(path: str) -> DFlashCheckpoint:
    """As ``open_config``, with the tensors."""
    folder, config = open_config(path)
    with errors_about(OPTION):
        stored = read_gguf_tensors(open_gguf(folder)) if is_gguf(path) else read_tensors(folder)
        stored = {name.removeprefix("logit_head."): tensor for name, tensor in stored.items()}
        if not is_gguf(path) and (folder / _MASK_FILE).is_file():
            stored[MASK] = read_tensor_file(folder / _MASK_FILE).flatten()
        optional = {MASK: (config.layer.hidden_size,)}
        return checked(folder, config, stored, expected_shapes(config), optional)


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a drafter of this config must hold."""
    layer = config.layer
    hidden, vocab = layer.hidden_size, layer.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.captured * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(layer.layers):
        shapes |= layer_shapes(layer, f"layers.{index}.")
        if config.convolutions is not None:
            taps, group = config.convolutions.taps, config.convolutions.group
            for name in ("attention_conv", "mlp_conv"):
                prefix = f"layers.{index}.{name}."
                shapes[f"{prefix}base_kernel"] = (2, taps, hidden)
                shapes[f"{prefix}kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
    rank = 0
    if config.markov is not None:
        rank = config.markov.rank
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if config.markov.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if config.markov.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence:
        width = hidden + (rank if config.confidence_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    if config.selector is not None:
        rank = config.selector.rank
        shapes["candidate_selector.predecessor_codebook"] = (vocab, rank)
        shapes["candidate_selector.successor_codebook"] = (vocab, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    return shapes


def misfits(own: Interface, target: ModelConfig) -> list[str]:
    """As ``fit.misfits``; and the last layer's output is none of the streams that it may read."""
    problems = usual_misfits(own, target)
    if target.layers in own.captured_layers:
        problems.append("it reads the last layer's output, which projects norm before or do not")
    return problems


def dummy_checkpoint(
    name: str, target: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> DFlashCheckpoint:
    """Random weights of the public drafters' sizes for this target; ``name`` is one of
    ``DUMMIES``."""
    config = dummy_config(name, target)
    tensors = dummy.dummy_tensors(expected_shapes(config), device, dtype)
    return DFlashCheckpoint(Path(name), config, tensors, torch.arange(target.vocab_size))


def dummy_config(name: str, target: ModelConfig) -> DFlashConfig:
    """Five layers of the target's widths that read five of its layers."""
    (family, block), layers = DUMMIES[name], 5
    # The usual places where there are as many, else whatever layers there are.
    places = None if target.layers >= 2 * layers else tuple(range(min(layers, target.layers)))
    return DFlashConfig(
        layout="dummy",
        layer=replace(
            target, architecture="qwen3", layers=layers, qk_norm=True, attention_bias=False,
            output_bias=False, mlp_bias=False, tied_embeddings=False,
        ),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        block_size=block,
        layer_ids=places,
        mask_token_id=target.vocab_size - 1,
        anchor_predicts=family == "DSpark",
        layers=(Visibility(causal=False),) * layers,
        markov=MarkovShape("vanilla", 256) if family == "DSpark" else None,
        confidence=family == "DSpark",
        confidence_with_markov=family == "DSpark",
        convolutions=Convolutions(2, 16) if family == "DFlash 2" else None,
        selector=Selector(256, min(16, target.vocab_size)) if family == "DFlash 2" else None,
    )  # fmt: skip


def checkpoint_facts(path: str, target: ModelConfig | None) -> dict[str, Any] | None:
    """JSON-ready facts about the local folder or file, and with ``target`` whether it fits; None if
    it holds no drafter of this family. Raises SurefootError for one that is broken."""
    folder = Path(path).expanduser()
    known = holds(folder, ARCHITECTURE) if is_gguf(path) else folder.is_dir() and is_dflash(folder)
    if not known:
        return None
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    layers, markov = config.layers, config.markov
    window = max(layer.window for layer in layers)
    variants = {
        f"{markov.kind if markov else 'no'} Markov head": markov is not None,
        "confidence head": config.confidence,
        "convolutions and a path selector": config.selector is not None,
        "the current token's row drafts": config.anchor_predicts,
        "causal layers": any(layer.causal for layer in layers),
        f"windows of {window}": window > 0,
        "own mask embedding": MASK in checkpoint.tensors,
        "biases": config.layer.attention_bias,
    }
    facts = drafter_facts(checkpoint, f"{config.family} drafter", config.layer, variants)
    facts["sizes"]["target_hidden"] = config.target_hidden_size
    facts["block"], facts["drafts"] = config.block_size, config.most_drafts
    facts |= {"layout": config.layout, "made_for": config.verifier}
    if target is None:
        return facts
    touching = interface(checkpoint, target)
    return facts | fit_facts(touching, misfits(touching, target))


def drafts_of(path: str) -> int:
    """How many drafts it gives at once."""
    if path in DUMMIES:
        family, block = DUMMIES[path]
        return block if family == "DSpark" else block - 1
    return open_config(path)[1].most_drafts
