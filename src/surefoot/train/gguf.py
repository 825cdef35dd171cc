"""Drafters as GGUF files of 8-bit blocks, in llama.cpp's layouts.

On a CPU reading the weights is most of what a draft costs, so a drafter in half the bytes drafts
sooner; and it can be shipped. Vectors stay float32, as llama.cpp keeps them. The tokenizer is not
copied: it is the target's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import BLOCK, QuantTensor, dense
from surefoot.models.config import ModelConfig
from surefoot.models.loading.gguf_file import BLOCK_NAMES, permute
from surefoot.speculation.drafting import gguf as layout
from surefoot.speculation.drafting.checkpoints import interface
from surefoot.speculation.drafting.fit import misfits, refuse_misfits
from surefoot.speculation.drafting.folders import DrafterCheckpoint, find_folder
from surefoot.speculation.proposers.dflash import checkpoint as dflash_checkpoint
from surefoot.speculation.proposers.dflash import gguf as dflash
from surefoot.speculation.proposers.dflash.config import DFlashConfig
from surefoot.speculation.proposers.dflash.layouts import is_dflash
from surefoot.speculation.proposers.eagle3 import checkpoint as eagle3_checkpoint
from surefoot.speculation.proposers.eagle3 import gguf as eagle3
from surefoot.speculation.proposers.eagle3.config import Eagle3Config, is_eagle3
from surefoot.train.target import Target

if TYPE_CHECKING:
    from gguf import GGUFWriter

_ROUNDING = 2**-7
"""Relative difference between numbers that are the same but for bfloat16."""


def export_gguf(drafter: str, path: Path, target: Target) -> bool:
    """Write the ``drafter`` (a folder or a name of the hub) to the file ``path``; a head that is
    made of the target's rows is left out. Whether one is. Raises SurefootError for what is no
    EAGLE-3, DSpark or DFlash drafter for this target."""
    folder = find_folder(drafter)
    if is_eagle3(folder):
        eagle = eagle3_checkpoint.open_checkpoint(drafter)
        refuse_misfits(misfits(interface(eagle, target.config), target.config), folder, None)
        own = _own_head(eagle, target)
        write_eagle3(path, eagle, target.config, own)
        return not own
    if not is_dflash(folder):
        raise SurefootError("drafter", f"{folder} holds no drafter of a kind that is written")
    family = dflash_checkpoint.open_checkpoint(drafter)
    refuse_misfits(misfits(interface(family, target.config), target.config), folder, None)
    own = _own_head(family, target)
    write_dspark(path, family, target.config, own)
    return not own


def _own_head(checkpoint: DrafterCheckpoint[Any], target: Target) -> bool:
    """Whether the head says something that the target's rows do not, but for rounding."""
    head = checkpoint.tensors.get("lm_head.weight")
    if head is None or head.shape[1] != target.config.hidden_size:
        return head is not None
    if len(checkpoint.target_ids) < target.config.vocab_size and not target.config.tied_embeddings:
        return True
    rows = target.head_rows(checkpoint.target_ids).cpu()
    return not torch.allclose(dense(head).float(), rows, rtol=_ROUNDING, atol=1e-6)


def write_eagle3(
    path: Path, checkpoint: DrafterCheckpoint[Eagle3Config], target: ModelConfig, head: bool
) -> None:
    """``head`` False: leave the head out, as it is the target's rows. Raises SurefootError for what
    the layout cannot express."""
    config = checkpoint.config
    plain = config.norm_before_head and not config.norm_fed_back and config.logit_scale == 1
    if not plain or config.fc_norm or config.captured != 3 or config.layer.qk_norm:
        raise SurefootError("drafter", "is of a variant that llama.cpp's eagle3 does not know")
    keys = {
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    names = _names(eagle3.NAMES, eagle3.BLOCK_NAMES, 1)
    tensors = {name: item for name, item in checkpoint.tensors.items() if name != "t2d"}
    if not head:
        tensors.pop("lm_head.weight", None)
    for part, heads in (("q", config.layer.heads), ("k", config.layer.kv_heads)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = permute(dense(tensors[name]), heads)
    taps = config.layers_of(target.layers)
    _write(path, eagle3.ARCHITECTURE, config.layer, keys, taps, tensors, checkpoint, names)


def write_dspark(
    path: Path, checkpoint: DrafterCheckpoint[DFlashConfig], target: ModelConfig, head: bool
) -> None:
    """DSpark or DFlash with full attention in both directions; ``head`` as for ``write_eagle3``."""
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
    names = _names(dflash.NAMES, dflash.BLOCK_NAMES, config.layer.layers)
    tensors = {name: item for name, item in checkpoint.tensors.items() if name != "t2d"}
    if "mask_embedding" in tensors:
        raise SurefootError("drafter", "has an embedding for masks, which GGUF has no name for")
    if not head:
        tensors.pop("lm_head.weight", None)
    taps = config.layers_of(target.layers)
    _write(
        path, dflash.ARCHITECTURE, config.layer, keys, taps, tensors, checkpoint, names,
        config.mask_token_id,
    )  # fmt: skip


def _names(own: Mapping[str, str], in_blocks: Mapping[str, str], layers: int) -> dict[str, str]:
    """The file's names by the canonical ones."""
    names = {value: key for key, value in own.items()}
    for index in range(layers):
        for key, value in in_blocks.items():
            names[f"layers.{index}.{value}"] = f"blk.{index}.{key}"
        for key, value in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"layers.{index}.{value}.{kind}"] = f"blk.{index}.{key}.{kind}"
    return names


def _write(
    path: Path,
    architecture: str,
    layer: ModelConfig,
    keys: Mapping[str, Any],
    taps: tuple[int, ...],
    tensors: Mapping[str, Weight],
    checkpoint: DrafterCheckpoint[Any],
    names: Mapping[str, str],
    mask_token_id: int | None = None,
) -> None:
    """All of it or nothing."""
    from gguf import GGUFWriter

    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, architecture)
    writer.add_name(checkpoint.folder.resolve().name)
    writer.add_vocab_size(layer.vocab_size)
    writer.add_context_length(layer.max_positions)
    writer.add_embedding_length(layer.hidden_size)
    writer.add_block_count(layer.layers)
    writer.add_feed_forward_length(layer.intermediate_size)
    writer.add_head_count(layer.heads)
    writer.add_head_count_kv(layer.kv_heads)
    writer.add_key_length(layer.head_dim)
    writer.add_value_length(layer.head_dim)
    writer.add_rope_dimension_count(layer.head_dim)
    writer.add_rope_freq_base(layer.rope_theta)
    writer.add_layer_norm_rms_eps(layer.norm_eps)
    if mask_token_id is not None:
        writer.add_mask_token_id(mask_token_id)
    writer.add_array(f"{architecture}.{layout.TAPS}", list(taps))
    for key, value in keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    if "d2t" in tensors:
        writer.add_tensor(layout.IDS, checkpoint.target_ids.numpy())
    for name, weight in tensors.items():
        if name != "d2t":
            _add(writer, names[name], weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, path)


def _add(writer: GGUFWriter, name: str, weight: Weight) -> None:
    from gguf import GGMLQuantizationType

    if len(weight.shape) < 2 or weight.shape[-1] % BLOCK:
        values = dense(weight).float()
        # As llama.cpp's converter has it: rows that blocks do not fit are float16.
        values = values if len(values.shape) < 2 else values.half()
        writer.add_tensor(name, values.contiguous().numpy())
        return
    blocks = weight if isinstance(weight, QuantTensor) else QuantTensor.of(weight)
    kind = GGMLQuantizationType[blocks.kind]
    writer.add_tensor(name, blocks.data.contiguous().numpy(), raw_dtype=kind)
