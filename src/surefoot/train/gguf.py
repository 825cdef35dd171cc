"""Drafters as GGUF files of 8-bit and 4-bit blocks, in llama.cpp's layouts.

On a CPU reading the weights is most of what a draft costs, so a drafter in fewer bytes drafts
sooner; and it can be shipped. Vectors stay float32, as llama.cpp keeps them. The tokenizer is not
copied: it is the target's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import BLOCK, BYTES_PER_BLOCK, QuantTensor, dense
from surefoot.models.config import ModelConfig
from surefoot.models.loading.gguf_file import BLOCK_NAMES
from surefoot.speculation.drafting import gguf as layout
from surefoot.speculation.drafting.checkpoints import interface
from surefoot.speculation.drafting.fit import misfits, refuse_misfits
from surefoot.speculation.drafting.folders import DrafterCheckpoint, find_folder
from surefoot.train.registry import KINDS
from surefoot.train.target import Target

if TYPE_CHECKING:
    from gguf import GGUFWriter

_VOCABULARY_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Tensors with a row for each token of the draft vocabulary."""
_READ_WHOLE = "layers.", "fc."
"""How the names of matrices begin that are read whole for each draft, and may be of 4 bits. Rows
of tables are not, and few bits cost these more."""
KINDS_BY_BITS = {8: "Q8_0", 4: "Q4_1"}
_ROUNDING = 2**-7
"""Relative difference between numbers that are the same but for bfloat16."""


def export_gguf(
    drafter: str,
    path: Path,
    target: Target,
    vocabulary: torch.Tensor | None = None,
    bits: int = 8,
) -> bool:
    """Write the ``drafter`` (a folder or a name of the hub) to the file ``path``; a head that is
    made of the target's rows is left out. Whether one is. ``vocabulary`` int64 [n], ascending ids
    of the target: draft these only. ``bits`` as for ``write``. Raises SurefootError for what is no
    drafter of a kind that is trained here, for this target."""
    folder = find_folder(drafter)
    for kind in KINDS.values():
        known, opened, written = kind.files()
        if known(folder):
            checkpoint = opened(drafter)
            problems = misfits(interface(checkpoint, target.config), target.config)
            refuse_misfits(problems, folder, None)
            if vocabulary is not None:
                checkpoint = smaller(checkpoint, vocabulary)
            few = len(checkpoint.target_ids) < target.config.vocab_size
            # Rows that are left out are taken from the target's embedding, if its head is that.
            kept = "lm_head.weight" in checkpoint.tensors and few
            own = (kept and not target.config.tied_embeddings) or own_head(checkpoint, target)
            written(path, checkpoint, target.config, own, bits)
            return not own
    raise SurefootError("drafter", f"{folder} holds no drafter of a kind that is written")


def smaller(checkpoint: DrafterCheckpoint[Any], ids: torch.Tensor) -> DrafterCheckpoint[Any]:
    """The drafter with those of its draft vocabulary that are among ``ids``, int64 ascending."""
    kept = torch.isin(checkpoint.target_ids, ids)
    chosen = checkpoint.target_ids[kept]
    if not len(chosen):
        raise SurefootError("draft_vocab", "keeps no token that the drafter knows")
    tensors = {name: item for name, item in checkpoint.tensors.items() if name != "t2d"}
    for name in _VOCABULARY_ROWS:
        if name in tensors:
            tensors[name] = dense(tensors[name])[kept]
    tensors[layout.IDS] = chosen - torch.arange(len(chosen))
    config = replace(checkpoint.config, draft_vocab_size=len(chosen))
    return replace(checkpoint, config=config, tensors=tensors, target_ids=chosen)


def own_head(checkpoint: DrafterCheckpoint[Any], target: Target) -> bool:
    """Whether the head says something that the target's rows do not, but for rounding."""
    head = checkpoint.tensors.get("lm_head.weight")
    if head is None or head.shape[1] != target.config.hidden_size:
        return head is not None
    rows = target.head_rows(checkpoint.target_ids).cpu()
    return not torch.allclose(dense(head).float(), rows, rtol=_ROUNDING, atol=1e-6)


def names_in(own: Mapping[str, str], in_blocks: Mapping[str, str], layers: int) -> dict[str, str]:
    """The file's names by the canonical ones."""
    names = {value: key for key, value in own.items()}
    for index in range(layers):
        for key, value in in_blocks.items():
            names[f"layers.{index}.{value}"] = f"blk.{index}.{key}"
        for key, value in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"layers.{index}.{value}.{kind}"] = f"blk.{index}.{key}.{kind}"
    return names


def write(
    path: Path,
    architecture: str,
    layer: ModelConfig,
    keys: Mapping[str, Any],
    taps: tuple[int, ...],
    tensors: Mapping[str, Weight],
    checkpoint: DrafterCheckpoint[Any],
    names: Mapping[str, str],
    mask_token_id: int | None = None,
    bits: int = 8,
) -> None:
    """All of it or nothing. ``bits``: of the weights of layers, and of what joins the target's
    features; others have 8."""
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
            few = bits if name.startswith(_READ_WHOLE) else 8
            _add(writer, names[name], weight, KINDS_BY_BITS[few])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, path)


def _add(writer: GGUFWriter, name: str, weight: Weight, kind: str) -> None:
    from gguf import GGMLQuantizationType

    if len(weight.shape) < 2 or weight.shape[-1] % BLOCK:
        values = dense(weight).float()
        # As llama.cpp's converter has it: rows that blocks do not fit are float16.
        values = values if len(values.shape) < 2 else values.half()
        writer.add_tensor(name, values.contiguous().numpy())
        return
    most = BYTES_PER_BLOCK[kind]
    if not isinstance(weight, QuantTensor) or BYTES_PER_BLOCK[weight.kind] > most:
        weight = QuantTensor.of(dense(weight), kind)
    raw = GGMLQuantizationType[weight.kind]
    writer.add_tensor(name, weight.data.contiguous().numpy(), raw_dtype=raw)
