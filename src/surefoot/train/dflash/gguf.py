"""Drafters of the DFlash family as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.speculation.drafting.folders import DrafterCheckpoint
from surefoot.speculation.proposers.dflash import gguf as dflash
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint
from surefoot.speculation.proposers.dflash.config import DFlashConfig
from surefoot.speculation.proposers.dflash.layouts import is_dflash
from surefoot.train.gguf import names_in, write


def write_dflash(
    path: Path,
    checkpoint: DrafterCheckpoint[DFlashConfig],
    target: ModelConfig,
    head: bool,
    bits: int = 8,
) -> None:
    """DSpark or DFlash with full attention in both directions; ``head`` and ``bits`` as for
    ``write_eagle3``."""
    config = checkpoint.config
    usual = all(not each.causal and not each.window for each in config.layers)
    scaled = config.embedding_scale != 1 or config.logit_scale != 1 or config.logit_cap
    mixed = config.confidence and config.confidence_with_markov != (config.markov is not None)
    other = config.markov is not None and config.markov.kind != "vanilla"
    if not usual or scaled or mixed or other or config.selector or config.layer.attention_bias:
        raise SurefootError("drafter", "is of a variant that is not written as GGUF")
    keys: dict[str, Any] = {"block_size": config.block_size}
    if config.markov is not None or config.anchor_predicts:
        keys["sample_from_anchor"] = config.anchor_predicts
        keys["has_confidence_head"] = config.confidence
    names = names_in(dflash.NAMES, dflash.BLOCK_NAMES, config.layer.layers)
    tensors = {name: item for name, item in checkpoint.tensors.items() if name != "t2d"}
    if "mask_embedding" in tensors:
        raise SurefootError("drafter", "has an embedding for masks, which GGUF has no name for")
    if not head:
        tensors.pop("lm_head.weight", None)
    taps = config.layers_of(target.layers)
    write(
        path, dflash.ARCHITECTURE, config.layer, keys, taps, tensors, checkpoint, names,
        config.mask_token_id, bits,
    )  # fmt: skip


FILES = is_dflash, open_checkpoint, write_dflash
"""Whether a folder holds one, how it is opened, how it is written."""
