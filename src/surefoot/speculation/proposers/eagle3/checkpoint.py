"""An EAGLE-3 checkpoint's files: tensors under one set of names, checked against its config.

Canonical names are those of ``expected_shapes``; files may prefix them with ``model.`` and call
the layer ``midlayer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from surefoot.errors import SurefootError
from surefoot.models.loading.hub import hub_cache_for
from surefoot.models.loading.safetensors_dir import INDEX, SINGLE, weight_files
from surefoot.speculation.proposers.eagle3.config import Eagle3Config, read_config

PICKLED = "pytorch_model.bin"
LAYER = "layers.0."
OPTION = "eagle3.path"
_HUB_PATTERNS = ["config.json", "*.safetensors", INDEX, PICKLED]
# Tables that engines compute, and copies of the target's own tensors.
_UNREAD = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Eagle3Checkpoint:
    """``tensors`` by canonical name, as stored."""

    folder: Path
    config: Eagle3Config
    tensors: Mapping[str, torch.Tensor]
    target_ids: torch.Tensor
    """int64 [draft_vocab_size]: the target's id of each draft id."""


def open_checkpoint(path: str) -> Eagle3Checkpoint:
    """Read the folder, or the repository ``org/name`` of the Hugging Face hub. Raises
    SurefootError about ``eagle3.path``."""
    try:
        folder = find_folder(path)
        config = read_config(folder)
        stored = {canonical(name): tensor for name, tensor in _read_tensors(folder).items()}
        stored = {name: stored[name] for name in stored if not name.endswith(_UNREAD)}
        qk_norm = f"{LAYER}self_attn.q_norm.weight" in stored
        config = replace(config, layer=replace(config.layer, qk_norm=qk_norm))
        _check_tensors(folder, config, stored)
        return Eagle3Checkpoint(folder, config, stored, _target_ids(folder, config, stored))
    except SurefootError as error:
        raise SurefootError(OPTION, error.problem, error.fix) from error


def find_folder(path: str) -> Path:
    """A local folder, or one fetched from the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise SurefootError(OPTION, f"there is no folder {path!r}", "give a folder or org/name")
    from huggingface_hub import snapshot_download

    cache = hub_cache_for(path)
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_PATTERNS, cache_dir=cache))
    except Exception as error:  # the hub's client lets through its HTTP library's exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SurefootError(
            OPTION, f"there is no folder {path!r}, and the hub does not give it ({reason})"
        ) from error


def canonical(name: str) -> str:
    """One name for what the layouts call differently."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        from safetensors.torch import load_file

        tensors = {}
        for file in weight_files(folder):
            try:
                tensors.update(load_file(file))
            except Exception as error:  # safetensors' own type is not exported everywhere
                raise SurefootError("model", f"{file} cannot be read: {error}") from error
        return tensors
    file = folder / PICKLED
    if not file.is_file():
        raise SurefootError("model", f"{folder} has neither {SINGLE} nor {PICKLED}")
    try:
        # weights_only: nothing in the file is executed.
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise SurefootError("model", f"{file} cannot be read: {error}") from error
    if not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise SurefootError("model", f"{file} holds something else than tensors")
    return loaded


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """The tensors that a drafter of this config must hold."""
    layer = config.layer
    hidden, inner = layer.hidden_size, layer.intermediate_size
    q_size, kv_size = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    linears = {
        "self_attn.q_proj": (q_size, 2 * hidden, layer.attention_bias),
        "self_attn.k_proj": (kv_size, 2 * hidden, layer.attention_bias),
        "self_attn.v_proj": (kv_size, 2 * hidden, layer.attention_bias),
        "self_attn.o_proj": (hidden, q_size, layer.output_bias),
        "mlp.gate_proj": (inner, hidden, layer.mlp_bias),
        "mlp.up_proj": (inner, hidden, layer.mlp_bias),
        "mlp.down_proj": (hidden, inner, layer.mlp_bias),
    }
    fused = config.captured * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fused), "norm.weight": (hidden,)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{LAYER}{name}.weight"] = (hidden,)
    for name, (outputs, inputs, bias) in linears.items():
        shapes[f"{LAYER}{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{LAYER}{name}.bias"] = (outputs,)
    if layer.qk_norm:
        shapes[f"{LAYER}self_attn.q_norm.weight"] = (layer.head_dim,)
        shapes[f"{LAYER}self_attn.k_norm.weight"] = (layer.head_dim,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if config.fc_norm:
        for index in range(config.captured):
            shapes[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    return shapes


def optional_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Tensors that stand in for the target's, or say nothing beyond the config."""
    layer = config.layer
    return {
        "embed_tokens.weight": (layer.vocab_size, layer.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, layer.hidden_size),
        "d2t": (config.draft_vocab_size,),
        "t2d": (layer.vocab_size,),
    }


def _check_tensors(folder: Path, config: Eagle3Config, stored: Mapping[str, torch.Tensor]) -> None:
    """Name everything that is missing, misshapen, or that nobody would read."""
    expected, optional = expected_shapes(config), optional_shapes(config)
    problems = [f"{name} is missing" for name in expected if name not in stored]
    for name, tensor in stored.items():
        shape = expected.get(name) or optional.get(name)
        if shape is None:
            problems.append(f"{name} is not known")
        elif tuple(tensor.shape) != shape:
            problems.append(f"{name} is {tuple(tensor.shape)}, expected {shape}")
    if problems:
        raise SurefootError("model", f"{folder} does not fit its config: " + "; ".join(problems))


def _target_ids(
    folder: Path, config: Eagle3Config, stored: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The target's ids: ``d2t`` holds offsets, ``t2d`` marks the members, and both must agree."""
    index = torch.arange(config.draft_vocab_size)
    offsets, members = stored.get("d2t"), stored.get("t2d")
    ids = index if offsets is None else index + offsets.long()
    if offsets is None and members is not None:
        ids = members.bool().nonzero().flatten()
    elif members is not None and not torch.equal(members.bool().nonzero().flatten(), ids):
        raise SurefootError("model", f"d2t and t2d of {folder} disagree about the draft vocabulary")
    if offsets is None and members is None and config.draft_vocab_size < config.layer.vocab_size:
        raise SurefootError(
            "model", f"{folder} has a draft vocabulary and neither d2t nor t2d says which"
        )
    inside = len(ids) == config.draft_vocab_size and bool(
        (ids >= 0).all() and (ids < config.layer.vocab_size).all()
    )
    if not inside or len(ids.unique()) != len(ids):
        raise SurefootError("model", f"d2t of {folder} does not map into the target's vocabulary")
    return ids
