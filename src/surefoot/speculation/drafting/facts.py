"""What a drafter's checkpoint is, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.models.config import ModelConfig
from surefoot.speculation.drafting.fit import Interface
from surefoot.speculation.drafting.folders import DrafterCheckpoint


def drafter_facts(
    checkpoint: DrafterCheckpoint[Any],
    kind: str,
    layer: ModelConfig,
    variants: Mapping[str, bool],
) -> dict[str, Any]:
    """JSON-ready. ``layer``: sizes of its layers; ``variants``: where it may depart from the plain
    network, and whether it does."""
    tensors = checkpoint.tensors
    counted = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    variants = {
        **variants,
        "own embedding": "embed_tokens.weight" in tensors,
        "the target's head": "lm_head.weight" not in tensors,
    }
    return {
        "name": checkpoint.folder.resolve().name,
        "source": str(checkpoint.folder),
        "kind": kind,
        "parameters": sum(math.prod(tensor.shape) for tensor in counted),
        "sizes": {
            "layers": layer.layers,
            "hidden": layer.hidden_size,
            "intermediate": layer.intermediate_size,
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
        },
        "vocabulary": layer.vocab_size,
        "draft_vocabulary": len(checkpoint.target_ids),
        "context_length": layer.max_positions,
        "rope": {"theta": layer.rope_theta, "kind": layer.rope_scaling.kind},
        "variants": [name for name, present in variants.items() if present] or None,
    }


def fit_facts(own: Interface, problems: Sequence[str]) -> dict[str, Any]:
    """Whether it fits a target, and why not."""
    facts: dict[str, Any] = {"fits_the_target": not problems}
    if own.captured_layers:
        facts = {"captured_layers": list(own.captured_layers), **facts}
    if problems:
        facts["why_not"] = list(problems)
    return facts
