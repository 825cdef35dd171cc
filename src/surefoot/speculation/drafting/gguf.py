"""Drafters as GGUF files: what llama.cpp's architectures for them have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import BYTES_PER_BLOCK
from surefoot.models.loading.gguf_config import Metadata
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_file import BLOCK_NAMES, KINDS, read_tensor

IDS = "d2t"
"""Ids of the target, where safetensors hold offsets."""
TAPS = "target_layers"
"""Indices of the layers whose entering residual stream is captured."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
Names = Mapping[str, str]
"""Canonical names by those of the file."""


def is_gguf(path: str) -> bool:
    """Whether a path is meant to be that of a GGUF file."""
    return path.lower().endswith(".gguf")


def holds(path: Path, architecture: str) -> bool:
    """Whether a file holds a drafter of this architecture."""
    return path.is_file() and _architecture(GgufFile(path)) == architecture


def open_gguf(path: Path, architecture: str) -> GgufFile:
    """SurefootError for a file of another architecture."""
    file = GgufFile(path)
    if _architecture(file) != architecture:
        raise SurefootError(
            "path", f"{path} holds a {_architecture(file)!r} model, and no {architecture} drafter"
        )
    return file


def _architecture(file: GgufFile) -> object:
    return file.metadata.get("general.architecture")


def open_metadata(file: GgufFile, known: set[str]) -> Metadata:
    """SurefootError for keys of the architecture that are not ``known``, and for a stretched
    RoPE."""
    reader = Metadata(file)
    for key, value in file.metadata.items():
        own = key.removeprefix(reader.prefix)
        if own != key and own not in known:
            raise reader.refuse(own, f"is {str(value)[:60]}, and not known")
    if (
        reader.find("rope.scaling.type") not in (None, "none")
        or "rope_freqs.weight" in file.tensors
    ):
        raise reader.refuse("rope.scaling.type", "is set, which is not supported for drafters")
    return reader


def read_head_dim(reader: Metadata, hidden: int, heads: int) -> int:
    """SurefootError where values or RoPE have another size than keys."""
    head_dim = reader.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.integer(key, head_dim) != head_dim:
            raise reader.refuse(key, f"differs from the head size of {head_dim}")
    return head_dim


def read_vocabulary(file: GgufFile, reader: Metadata) -> int:
    """The size of the target's, whose tokenizer the file may carry."""
    tokens = file.items("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    known = len(tokens) or (embedding.shape[0] if embedding is not None else None)
    return reader.integer("vocab_size", known)


def read_taps(reader: Metadata) -> tuple[int, ...]:
    ids = reader.file.items(f"{reader.prefix}{TAPS}", int)
    if not ids or sorted(set(ids)) != ids or ids[0] < 0:
        raise reader.refuse(TAPS, f"is {ids}, expected ascending layer indices")
    return tuple(ids)


def read_flag(reader: Metadata, key: str, default: bool) -> bool:
    value = reader.find(key)
    if value is not None and not isinstance(value, bool):
        raise reader.refuse(key, f"is {str(value)[:60]}, expected true or false")
    return default if value is None else value


def read_gguf_tensors(
    file: GgufFile, names: Names, block_names: Names, heads_of: Callable[[str], int] | None = None
) -> dict[str, Weight]:
    """All tensors under canonical names (``names``; ``block_names``: within a layer, beside those
    of targets), matrices in their blocks where a backend multiplies those, others in float32.
    ``heads_of``: of a tensor by its canonical name, the heads whose rows the format reorders."""
    tensors: dict[str, Weight] = {}
    for name, tensor in file.tensors.items():
        if name == IDS:
            ids = file.raw(tensor).flatten().view(torch.int64)
            tensors[IDS] = ids - torch.arange(len(ids))
            continue
        if tensor.kind not in KINDS:
            raise SurefootError("path", f"{name} of {file.path} is {tensor.kind}, not supported")
        own = canonical(name, names, block_names)
        keep = tensor.kind in BYTES_PER_BLOCK and len(tensor.shape) == 2
        heads = 0 if heads_of is None else heads_of(own)
        if heads and tensor.shape[0] % (2 * heads):
            raise file.broken(f"{name} has {tensor.shape[0]} rows for {heads} heads")
        weight = read_tensor(file, tensor, heads, None if keep else torch.float32)
        # Read on demand, these would be mapped memory at any address.
        tensors[own] = weight.clone() if isinstance(weight, torch.Tensor) else weight
    return tensors


def canonical(name: str, names: Names, block_names: Names) -> str:
    """The canonical name of a tensor; unknown ones keep theirs."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return names.get(name, name)
    index, own = match.groups()
    if own in block_names:
        return f"layers.{index}.{block_names[own]}"
    part, _, kind = own.partition(".")
    return f"layers.{index}.{BLOCK_NAMES[part]}.{kind}" if part in BLOCK_NAMES else name
