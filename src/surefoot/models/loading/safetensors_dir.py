"""Weights of a Hugging Face folder: ``model.safetensors``, or shards with an index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import expected_shapes
from surefoot.models.loading.json_reader import JsonReader
from surefoot.models.loading.lazy import LazyTensor, LazyWeights, finite

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DENSE_TYPES = ("F64", "F32", "F16", "BF16")
# Endings of the tensors that quantized checkpoints (GPTQ, AWQ, fp8, bitsandbytes, ...) add.
QUANTIZED_ENDINGS = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_zero_point",
    ".weight_packed",
    ".input_scale",
    ".weight.absmax",
    ".weight.quant_map",
    ".SCB",
    ".CB",
)


def open_safetensors(
    folder: Path, config: ModelConfig, dtype: torch.dtype
) -> tuple[ModelConfig, LazyWeights]:
    """Tensors of the folder by canonical name, mapped from disk and given in ``dtype``.

    Returns the config too: where a config ties the head to the embedding but the files hold a
    different ``lm_head.weight``, the head is not tied (as in transformers). Tensors that the
    config does not call for are left out. Raises SurefootError for broken or missing files and
    for quantized tensors.
    """
    files = _files(folder)
    handles = {path: _open(path) for path in files}
    stored = {path: list(handle.keys()) for path, handle in handles.items()}
    located = {_canonical(name): (path, name) for path in files for name in stored[path]}
    quantized = sorted(name for name in located if name.endswith(QUANTIZED_ENDINGS))
    if quantized:
        raise SurefootError(
            "model",
            f"{folder} holds quantized tensors ({quantized[0]} and {len(quantized) - 1} more)",
            "use the unquantized checkpoint or a GGUF file",
        )
    if config.tied_embeddings and "lm_head.weight" in located:
        pair = (located["lm_head.weight"], located.get("model.embed_tokens.weight"))
        head, table = (handles[at[0]].get_tensor(at[1]) if at else None for at in pair)
        if head is not None and table is not None and not torch.equal(head, table):
            config = replace(config, tied_embeddings=False)
    tensors = {}
    for name in expected_shapes(config):
        if name in located:
            path, inside = located[name]
            tensors[name] = _lazy(handles[path], path, inside, dtype)
    return config, LazyWeights(tensors)


def read_safetensors_header(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and stored type (``BF16`` ...) of every tensor in the folder, without reading data."""
    header = {}
    for path in _files(folder):
        handle = _open(path)
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            part = handle.get_slice(name)
            header[_canonical(name)] = (tuple(part.get_shape()), part.get_dtype())
    return header


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises SurefootError when any is missing."""
    return _files(folder)


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        others = [path.name for path in folder.glob("*") if path.suffix in (".bin", ".pth", ".pt")]
        held = f"; it holds {others[0]}, which can run code when read" if others else ""
        raise SurefootError(
            "model", f"{folder} has neither {SINGLE} nor {INDEX}{held}", "use safetensors weights"
        )
    weight_map = JsonReader.open(folder / INDEX).section("weight_map")
    if weight_map is None:
        raise SurefootError("model", f"{folder / INDEX} lacks weight_map")
    names = sorted({str(name) for name in weight_map.data.values()})
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise SurefootError(
            "model",
            f"{folder} lacks {', '.join(missing)}, which {INDEX} names",
            "download the missing shards",
        )
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise SurefootError(
            "model", f"{path} is corrupt or truncated: {error}", "download it again"
        ) from error


def _canonical(name: str) -> str:
    """A base model saved on its own has no ``model.`` in its names."""
    bare = name.startswith(("layers.", "embed_tokens.", "norm."))
    return "model." + name if bare else name


def _lazy(handle: Any, path: Path, stored: str, dtype: torch.dtype) -> LazyTensor:
    part = handle.get_slice(stored)
    if part.get_dtype() not in DENSE_TYPES:
        raise SurefootError(
            "model",
            f"{stored} in {path} has type {part.get_dtype()}, which is not supported",
            "supported: " + ", ".join(DENSE_TYPES),
        )
    load: Callable[[], Weight] = lambda: finite(  # noqa: E731
        handle.get_tensor(stored).to(dtype), stored, path
    )
    return LazyTensor(tuple(part.get_shape()), load)
