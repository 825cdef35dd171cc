"""What an EAGLE-3 checkpoint is, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.models.config import ModelConfig
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.config import is_eagle3
from surefoot.speculation.proposers.eagle3.drafter import misfits


def checkpoint_facts(path: str, target: ModelConfig | None) -> dict[str, Any] | None:
    """JSON-ready facts about the local folder, and with ``target`` whether it fits; None if it
    holds no EAGLE-3 drafter. Raises SurefootError for one that is broken."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or not is_eagle3(folder):
        return None
    checkpoint = open_checkpoint(path)
    config, tensors = checkpoint.config, checkpoint.tensors
    layer = config.layer
    counted = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    facts: dict[str, Any] = {
        "name": folder.resolve().name,
        "source": str(folder),
        "kind": "EAGLE-3 drafter",
        "layout": config.layout,
        "parameters": sum(tensor.numel() for tensor in counted),
        "sizes": {
            "hidden": layer.hidden_size,
            "intermediate": layer.intermediate_size,
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "target_hidden": config.target_hidden_size,
        },
        "vocabulary": layer.vocab_size,
        "draft_vocabulary": config.draft_vocab_size,
        "context_length": layer.max_positions,
        "rope": {"theta": layer.rope_theta, "kind": layer.rope_scaling.kind},
        "variants": _variants(config, tensors) or None,
        "made_for": config.verifier,
    }
    if target is not None:
        facts["captured_layers"] = list(config.layers_of(target.layers))
        problems = misfits(checkpoint, target)
        facts["fits_the_target"] = not problems
        if problems:
            facts["why_not"] = problems
    return facts


def _variants(config: Any, tensors: Any) -> list[str]:
    """Where it departs from the plain network."""
    found = {
        "residual from the normed state": config.norm_before_residual,
        "norm before fc": config.norm_before_fc,
        "norm of each captured layer": config.fc_norm,
        "no norm before the head": not config.norm_before_head,
        "normed state fed back": config.norm_fed_back,
        "norms of q and k": config.layer.qk_norm,
        "biases": config.layer.attention_bias,
        "own embedding": "embed_tokens.weight" in tensors,
        "the target's head": "lm_head.weight" not in tensors,
    }
    return [name for name, present in found.items() if present]
