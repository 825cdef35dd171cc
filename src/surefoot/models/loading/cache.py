"""The dense weights of quantized GGUF files, kept in Surefoot's cache folder.

Dequantizing takes seconds; the result is written once as safetensors and mapped from then on. An
entry is named after the identity of the GGUF file, the dtype and ``FORMAT``; one that is broken
is written again. Entries appear by renaming a finished file, so processes may race.
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from surefoot.models.loading.cache_folder import Progress, cache_root, replacing
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.lazy import LazyTensor, LazyWeights

FORMAT = 1
SAFETENSORS_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
SAMPLES, SAMPLE_BYTES = 16, 1 << 16


def cached_dense(
    file: GgufFile, weights: LazyWeights, dtype: torch.dtype, progress: Progress | None = None
) -> LazyWeights:
    """``weights``, the dense tensors of ``file`` in ``dtype``, read from the cache; converted and
    stored first where they are not there. Where the cache cannot be written, the converted
    tensors stay in memory."""
    path = cache_root() / "converted" / f"{file.path.stem}-{_identity(file, dtype)}.safetensors"
    stored = _open_entry(path, weights, dtype)
    if stored is not None:
        return stored
    try:
        with replacing(path) as target:
            _write_safetensors(target, weights, dtype, progress)
    except OSError:
        kept = {name: weights[name] for name in weights}
        shapes = {name: weights.shape_of(name) for name in weights}
        return LazyWeights(
            {name: LazyTensor(shapes[name], partial(kept.__getitem__, name)) for name in kept}
        )
    return _open_entry(path, weights, dtype) or weights


def _identity(file: GgufFile, dtype: torch.dtype) -> str:
    """A digest of size, time, header, samples of the content, dtype and format."""
    status = file.path.stat()
    digest = hashlib.sha256(f"{FORMAT} {dtype} {status.st_size} {status.st_mtime_ns}".encode())
    with file.path.open("rb") as source:
        digest.update(source.read(file.data_start))
        step = max((status.st_size - file.data_start) // SAMPLES, 1)
        for start in range(file.data_start, status.st_size, step):
            source.seek(start)
            digest.update(source.read(SAMPLE_BYTES))
    return digest.hexdigest()[:24]


def _open_entry(path: Path, weights: LazyWeights, dtype: torch.dtype) -> LazyWeights | None:
    """The entry at ``path``, if it is whole and holds just what ``weights`` does."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError):
        return None
    if set(handle.keys()) != set(weights):
        return None
    tensors = {}
    for name in weights:
        part = handle.get_slice(name)
        shape = tuple(part.get_shape())
        if part.get_dtype() != SAFETENSORS_TYPES[dtype] or shape != weights.shape_of(name):
            return None
        tensors[name] = LazyTensor(shape, lambda name=name: handle.get_tensor(name))
    return LazyWeights(tensors)


def _write_safetensors(
    target: BinaryIO, weights: LazyWeights, dtype: torch.dtype, progress: Progress | None
) -> None:
    """The safetensors format, one tensor at a time: uint64 header length, JSON header, data."""
    header, end = {}, 0
    for name in weights:
        shape = weights.shape_of(name)
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.write(struct.pack("<Q", len(text)) + text)
    for done, name in enumerate(weights):
        if progress:
            progress("Converting weights", done, len(weights))
        tensor = weights[name]
        assert isinstance(tensor, torch.Tensor)
        tensor.to(dtype).contiguous().view(torch.uint8).numpy().tofile(target)
    if progress:
        progress("Converting weights", len(weights), len(weights))
