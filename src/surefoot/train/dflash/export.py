"""Checkpoints of the DFlash family: DSpark as DeepSeek writes it, DFlash as z-lab does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.train.dflash.network import DFlashTraining
from surefoot.train.target import Target


def write_checkpoint(folder: Path, network: DFlashTraining, target: Target) -> None:
    """``config.json`` and ``model.safetensors``, weights in the target's dtype; embedding and head
    are the target's and left out. Raises SurefootError if what was written does not load as the
    same drafter."""
    from safetensors.torch import save_file

    tensors = {
        name: value.to("cpu", target.dtype).contiguous()
        for name, value in network.tensors().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(config_json(network, target), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    _check(folder, network, target)


def config_json(network: DFlashTraining, target: Target) -> dict[str, Any]:
    """The layers are Qwen3's, whatever the target's are. Captured layers are counted by their
    outputs."""
    own, layer = network.config, network.config.layer
    assert own.layer_ids is not None
    shape = {
        "model_type": "qwen3",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.layers,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": layer.max_positions,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": layer.vocab_size,
        "bos_token_id": layer.bos_token_id,
        "eos_token_id": list(layer.eos_token_ids),
        "torch_dtype": str(target.dtype).removeprefix("torch."),
        "num_target_layers": target.config.layers,
        "block_size": own.block_size,
    }
    places = {
        "target_layer_ids": [index - 1 for index in own.layer_ids],
        "mask_token_id": own.mask_token_id,
    }
    if not own.anchor_predicts:
        return {"architectures": ["DFlashDraftModel"], **shape, "dflash_config": places}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **shape,
        **places,
        "markov_rank": 0 if own.markov is None else own.markov.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": own.confidence,
        "confidence_head_with_markov": own.confidence_with_markov,
    }


def _check(folder: Path, network: DFlashTraining, target: Target) -> None:
    """Load what was written as an engine would."""
    wanted, checkpoint = network.config, open_checkpoint(str(folder))
    found = checkpoint.config
    DFlashNetwork(checkpoint, target.decoder)
    names = ("layer_ids", "block_size", "mask_token_id", "anchor_predicts", "layers", "markov")
    for name in (*names, "confidence", "confidence_with_markov", "layout"):
        if getattr(found, name) != getattr(wanted, name):
            raise SurefootError(
                "out",
                f"{folder} loads with {name} {getattr(found, name)}, and was trained with "
                f"{getattr(wanted, name)}",
            )
    if found.layer.rope_theta != wanted.layer.rope_theta:
        raise SurefootError("out", f"{folder} has another rope_theta than was trained")
