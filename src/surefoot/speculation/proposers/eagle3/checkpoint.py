"""An EAGLE-3 checkpoint: tensors under one set of names, from a folder or made up.

Canonical names are those of ``expected_shapes``; files may prefix them with ``model.`` and call
the layer ``midlayer``.
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
from surefoot.speculation.drafting.fit import misfits
from surefoot.speculation.drafting.folders import (
    DrafterCheckpoint,
    errors_about,
    find_folder,
    read_tensors,
)
from surefoot.speculation.drafting.gguf import holds, is_gguf
from surefoot.speculation.proposers.eagle3.config import Eagle3Config, is_eagle3, read_config
from surefoot.speculation.proposers.eagle3.gguf import (
    ARCHITECTURE,
    open_gguf,
    read_gguf_config,
    read_gguf_tensors,
)

LAYER = "layers.0."
OPTION = "eagle3.path"
Eagle3Checkpoint = DrafterCheckpoint[Eagle3Config]


def open_checkpoint(path: str) -> Eagle3Checkpoint:
    """Read the folder, the GGUF file, or the repository ``org/name`` of the Hugging Face hub.
    Raises SurefootError about ``eagle3.path``."""
    with errors_about(OPTION):
        if is_gguf(path):
            file = open_gguf(Path(path).expanduser())
            config = read_gguf_config(file)
            tensors = read_gguf_tensors(file, config)
            return checked(file.path, config, tensors, expected_shapes(config))
        folder = find_folder(path)
        config = read_config(folder)
        stored = {canonical(name): tensor for name, tensor in read_tensors(folder).items()}
        qk_norm = f"{LAYER}self_attn.q_norm.weight" in stored
        config = replace(config, layer=replace(config.layer, qk_norm=qk_norm))
        return checked(folder, config, stored, expected_shapes(config))


def canonical(name: str) -> str:
    """One name for what the layouts call differently."""
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The tensors that a drafter of this config must hold."""
    hidden, fused = config.layer.hidden_size, config.captured * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fused), "norm.weight": (hidden,)}
    shapes |= layer_shapes(config.layer, LAYER, 2 * hidden)
    shapes[f"{LAYER}hidden_norm.weight"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if config.fc_norm:
        for index in range(config.captured):
            shapes[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    return shapes


def dummy_checkpoint(
    target: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> Eagle3Checkpoint:
    """Random weights of the public heads' sizes: one Llama layer of the target's widths on three of
    its layers, and a head over a draft vocabulary."""
    ids = dummy.dummy_target_ids(target.vocab_size)
    config = Eagle3Config(
        layout="flat",
        layer=replace(
            target, architecture="llama", layers=1, qk_norm=False, attention_bias=False,
            output_bias=False, mlp_bias=False, tied_embeddings=False,
        ),
        draft_vocab_size=len(ids),
        target_hidden_size=target.hidden_size,
        captured=3,
        # The usual places where there are some, else whatever layers there are.
        layer_ids=None if target.layers > 5 else tuple(range(3)),
        ids_are_outputs=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_before_head=True,
        norm_fed_back=False,
        logit_scale=1.0,
        verifier=None,
    )  # fmt: skip
    shapes = {**expected_shapes(config), "lm_head.weight": (len(ids), target.hidden_size)}
    return Eagle3Checkpoint(
        Path(dummy.NAME), config, dummy.dummy_tensors(shapes, device, dtype), ids
    )


def checkpoint_facts(path: str, target: ModelConfig | None) -> dict[str, Any] | None:
    """JSON-ready facts about the local folder or file, and with ``target`` whether it fits; None if
    it holds no EAGLE-3 drafter. Raises SurefootError for one that is broken."""
    folder = Path(path).expanduser()
    known = holds(folder, ARCHITECTURE) if is_gguf(path) else folder.is_dir() and is_eagle3(folder)
    if not known:
        return None
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    variants = {
        "residual from the normed state": config.norm_before_residual,
        "norm before fc": config.norm_before_fc,
        "norm of each captured layer": config.fc_norm,
        "no norm before the head": not config.norm_before_head,
        "normed state fed back": config.norm_fed_back,
        "norms of q and k": config.layer.qk_norm,
        "biases": config.layer.attention_bias,
    }
    facts = drafter_facts(checkpoint, "EAGLE-3 drafter", config.layer, variants)
    facts["sizes"]["target_hidden"] = config.target_hidden_size
    facts |= {"layout": config.layout, "made_for": config.verifier}
    if target is None:
        return facts
    touching = interface(checkpoint, target)
    return facts | fit_facts(touching, misfits(touching, target))
