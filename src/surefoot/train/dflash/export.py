"""Checkpoints of the DFlash family: DSpark as DeepSeek writes it, DFlash as z-lab does; with a
draft vocabulary, both as speculators does, the only layout that has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.train.dflash.network import DFlashTraining
from surefoot.train.target import Target


def write_checkpoint(
    folder: Path, network: DFlashTraining, target_ids: torch.Tensor, target: Target
) -> None:
    """``config.json`` and ``model.safetensors``, weights in the target's dtype; embedding and head
    are the target's and left out, but for a head's rows of a draft vocabulary (``target_ids`` int64
    [draft vocabulary], ascending). Raises SurefootError if what was written does not load as the
    same drafter."""
    from safetensors.torch import save_file

    tensors = {
        name: value.to("cpu", target.dtype).contiguous()
        for name, value in network.tensors().items()
    }
    vocab, ids = target.config.vocab_size, target_ids
    if len(ids) < vocab:
        tensors["lm_head.weight"] = target.head_rows(ids).to("cpu", target.dtype).contiguous()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(config_json(network, target), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    _check(folder, network, target_ids, target)


def config_json(network: DFlashTraining, target: Target) -> dict[str, Any]:
    """The layers are Qwen3's, whatever the target's are. Captured layers are counted by their
    outputs, in speculators' layout by the stream that they enter."""
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
    }
    rest = {
        "torch_dtype": str(target.dtype).removeprefix("torch."),
        "num_target_layers": target.config.layers,
        "block_size": own.block_size,
    }
    heads = {
        "markov_rank": 0 if own.markov is None else own.markov.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": own.confidence,
        "confidence_head_with_markov": own.confidence_with_markov,
    }
    if own.layout == "speculators":
        return _speculators_json(network, target, shape, heads)
    shape |= rest
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
        **heads,
    }


def _speculators_json(
    network: DFlashTraining, target: Target, layer: dict[str, Any], heads: dict[str, Any]
) -> dict[str, Any]:
    own = network.config
    assert own.layer_ids is not None
    kind = "dspark" if own.anchor_predicts else "dflash"
    return {
        "architectures": ["DSparkDraftModel" if own.anchor_predicts else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": own.most_drafts}
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": [f"{target.config.architecture.capitalize()}ForCausalLM"],
            },
        },
        "transformer_layer_config": {
            **layer,
            "layer_types": ["full_attention"] * layer["num_hidden_layers"],
        },
        "draft_vocab_size": own.draft_vocab_size,
        "block_size": own.block_size,
        "mask_token_id": own.mask_token_id,
        "aux_hidden_state_layer_ids": list(own.layer_ids),
        "sample_from_anchor": own.anchor_predicts,
        "torch_dtype": str(target.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        **(heads if own.anchor_predicts else {}),
    }


def _check(folder: Path, network: DFlashTraining, target_ids: torch.Tensor, target: Target) -> None:
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
    if checkpoint.target_ids.tolist() != target_ids.tolist():
        raise SurefootError("out", f"{folder} loads with another draft vocabulary")
    if found.layer.rope_theta != wanted.layer.rope_theta:
        raise SurefootError("out", f"{folder} has another rope_theta than was trained")
