"""An EAGLE-3 checkpoint in the layout of SafeAILab and SpecForge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.speculation.proposers.eagle3.checkpoint import LAYER, open_checkpoint
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter
from surefoot.train.eagle3.network import Eagle3Network
from surefoot.train.target import Target

_MIDDLE = "midlayer."
_IDS = "eagle_aux_hidden_state_layer_ids"


def write_checkpoint(
    folder: Path,
    network: Eagle3Network,
    target_ids: torch.Tensor,
    target: Target,
    own_head: bool,
) -> None:
    """``config.json`` and ``model.safetensors``; weights in the target's dtype. ``target_ids``
    int64 [draft vocabulary]. A head that is the target's own, whole, is left out unless
    ``own_head``. Raises SurefootError if what was written does not load as the same drafter."""
    from safetensors.torch import save_file

    vocab, ids = target.config.vocab_size, target_ids
    tensors = {}
    for name, value in network.tensors().items():
        if name == "lm_head.weight" and not own_head and len(ids) == vocab:
            continue
        stored = _MIDDLE + name.removeprefix(LAYER) if name.startswith(LAYER) else name
        tensors[stored] = value.to("cpu", target.dtype).contiguous()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(config_json(network, target), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    _check(folder, network, target_ids, target)


def config_json(network: Eagle3Network, target: Target) -> dict[str, Any]:
    """The flat config. Captured layers are told twice, as each engine counts them: at the top as
    layers entered (vLLM), in ``eagle_config`` as layer outputs (SGLang, SpecForge)."""
    own, layer = network.config, network.config.layer
    assert own.layer_ids is not None
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": layer.max_positions,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": own.draft_vocab_size,
        "target_hidden_size": own.target_hidden_size,
        "num_aux_hidden_states": own.captured,
        _IDS: list(own.layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            _IDS: [index - 1 for index in own.layer_ids],
        },
        "bos_token_id": layer.bos_token_id,
        "eos_token_id": list(layer.eos_token_ids),
        "torch_dtype": names[target.dtype],
    }


def _check(folder: Path, network: Eagle3Network, target_ids: torch.Tensor, target: Target) -> None:
    """Load what was written as an engine would."""
    checkpoint = open_checkpoint(str(folder))
    drafter = Eagle3Drafter(checkpoint, target.decoder)
    if drafter.captured_layers != network.config.layer_ids:
        raise SurefootError(
            "out",
            f"{folder} would capture layers {list(drafter.captured_layers)}, and was trained on "
            f"{list(network.config.layer_ids or ())}",
        )
    if not torch.equal(checkpoint.target_ids, target_ids):
        raise SurefootError("out", f"{folder} has another draft vocabulary than was trained")
    if checkpoint.config.layer.rope_theta != network.config.layer.rope_theta:
        raise SurefootError("out", f"{folder} has another rope_theta than was trained")
