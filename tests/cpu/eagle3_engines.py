"""Targets and drafters to run engines with: one pair that agrees mostly, one that never met."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch

from eagle3_reference import Flags, random_checkpoint, random_tensors
from harness import native_backend, random_weights, tiny_config
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder

LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
RANDOM = Flags(draft_vocab=40, extra=LAYERS)
SKILLED = Flags(attention_bias=True, draft_vocab=44, extra=LAYERS)


def target_weights() -> dict[str, torch.Tensor]:
    """Random, but what it says next depends mostly on the current token."""
    weights = random_weights(tiny_config())
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weight * 0.25
    return weights


@functools.cache
def target(backend: str = "torch") -> Decoder:
    chosen = TorchBackend("cpu", torch.float32) if backend == "torch" else native_backend()
    return Decoder(tiny_config(), target_weights(), chosen)


def skilled_tensors() -> dict[str, torch.Tensor]:
    """Attends to the current token alone (queries and keys are constants, which RoPE turns apart)
    and gives its embedding to the target's head; features add a little."""
    weights, tensors = target_weights(), random_tensors(SKILLED, seed=5)
    attention = "layers.0.self_attn."
    for name in ("q", "k", "v", "o"):
        tensors[f"{attention}{name}_proj.weight"].zero_()
        tensors[f"{attention}{name}_proj.bias"].zero_()
    for name, heads in (("q", 4), ("k", 2)):
        tensors[f"{attention}{name}_proj.bias"].view(heads, 16)[:, :3] = 13.0
    tensors[f"{attention}v_proj.weight"][:, :32] = torch.eye(32)
    # Heads 0 and 2 read the two kv heads.
    tensors[f"{attention}o_proj.weight"][:16, 0:16] = torch.eye(16)
    tensors[f"{attention}o_proj.weight"][16:, 32:48] = torch.eye(16)
    tensors["fc.weight"] *= 0.3
    tensors["layers.0.mlp.down_proj.weight"] *= 0.1
    tensors["layers.0.input_layernorm.weight"].fill_(1.0)
    tensors["norm.weight"] = weights["model.norm.weight"].clone()
    kept = tensors["t2d"].nonzero().flatten()
    tensors["lm_head.weight"] = weights["model.embed_tokens.weight"][kept].clone()
    return tensors


@functools.cache
def folder(kind: str) -> str:
    """A checkpoint's folder: ``random`` or ``skilled``."""
    path = Path(tempfile.mkdtemp(prefix=f"surefoot-{kind}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    if kind == "random":
        random_checkpoint(path, RANDOM)
    else:
        random_checkpoint(path, SKILLED, skilled_tensors())
    return str(path)
