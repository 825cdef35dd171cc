"""Random weights for measurements of speed: an EAGLE-3 drafter for any target, which does all the
work of one without a download."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from surefoot.models.config import ModelConfig
from surefoot.speculation.proposers.eagle3.checkpoint import Eagle3Checkpoint, expected_shapes
from surefoot.speculation.proposers.eagle3.config import Eagle3Config

NAME = "dummy"
"""Takes the place of a checkpoint's path."""
DRAFT_VOCABULARY = 32000


def dummy_checkpoint(
    target: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> Eagle3Checkpoint:
    """A checkpoint of the public heads' sizes: one Llama layer of the target's widths on three of
    its layers, and a head over 32,000 tokens, or all if there are fewer. Its drafts are noise."""
    vocabulary = min(DRAFT_VOCABULARY, target.vocab_size)
    config = Eagle3Config(
        layout="flat",
        layer=replace(
            target, architecture="llama", layers=1, qk_norm=False, attention_bias=False,
            output_bias=False, mlp_bias=False, tied_embeddings=False,
        ),
        draft_vocab_size=vocabulary,
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
    generator = torch.Generator(device).manual_seed(3)
    tensors = {}
    shapes = {**expected_shapes(config), "lm_head.weight": (vocabulary, target.hidden_size)}
    for name, shape in shapes.items():
        spread = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        tensors[name] = 1 + 0.1 * spread if len(shape) == 1 else 0.02 * spread
    ids = torch.arange(vocabulary) * (target.vocab_size // vocabulary)
    return Eagle3Checkpoint(Path(NAME), config, tensors, ids)
