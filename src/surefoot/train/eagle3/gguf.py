"""EAGLE-3 drafters as GGUF files."""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.kernels.quant import dense
from surefoot.models.config import ModelConfig
from surefoot.models.loading.gguf_file import permute
from surefoot.speculation.drafting.folders import DrafterCheckpoint
from surefoot.speculation.proposers.eagle3 import gguf as eagle3
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.config import Eagle3Config, is_eagle3
from surefoot.train.gguf import names_in, write


def write_eagle3(
    path: Path,
    checkpoint: DrafterCheckpoint[Eagle3Config],
    target: ModelConfig,
    head: bool,
    bits: int = 8,
) -> None:
    """``head`` False: leave the head out, as it is the target's rows. ``bits`` as for
    ``train.gguf.write``. Raises SurefootError for what the layout cannot express."""
    config = checkpoint.config
    plain = config.norm_before_head and not config.norm_fed_back and config.logit_scale == 1
    if not plain or config.fc_norm or config.captured != 3 or config.layer.qk_norm:
        raise SurefootError("drafter", "is of a variant that llama.cpp's eagle3 does not know")
    keys = {
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    names = names_in(eagle3.NAMES, eagle3.BLOCK_NAMES, 1)
    tensors = {name: item for name, item in checkpoint.tensors.items() if name != "t2d"}
    if not head:
        tensors.pop("lm_head.weight", None)
    for part, heads in (("q", config.layer.heads), ("k", config.layer.kv_heads)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = permute(dense(tensors[name]), heads)
    taps = config.layers_of(target.layers)
    write(
        path, eagle3.ARCHITECTURE, config.layer, keys, taps, tensors, checkpoint, names, bits=bits
    )


FILES = is_eagle3, open_checkpoint, write_eagle3
"""Whether a folder holds one, how it is opened, how it is written."""
