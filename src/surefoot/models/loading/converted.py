"""The dense weights of quantized GGUF files, kept in Surefoot's cache folder.

Dequantizing takes seconds; the result is written once as safetensors and mapped from then on. An
entry is named after the identity of the GGUF file, the dtype and ``FORMAT``; one that is broken
is written again. Entries appear by renaming a finished file, so processes may race. The header's
``__metadata__`` says what an entry was made from, so that one of no more use can be told, and the
SHA-256 of its data, which is computed on demand only: it takes longer than a start may.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from surefoot.cache import USE_ANOTHER, Progress, cache_root, replacing, size_in_words
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.lazy import LazyTensor, LazyWeights

FORMAT = 3
SAFETENSORS_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
LONGEST_HEADER = 100 << 20
CHUNK = 1 << 20
UNKNOWN_DIGEST = "0" * 64

logger = logging.getLogger(__name__)


def cached_dense(
    file: GgufFile, weights: LazyWeights, dtype: torch.dtype, progress: Progress | None = None
) -> LazyWeights:
    """``weights``, the dense tensors of ``file`` in ``dtype``, read from the cache; converted and
    stored first where they are not there, which is logged. Where the cache cannot be written, that
    is a warning and each look-up converts."""
    path = cache_root() / "converted" / f"{file.path.stem}-{_identity(file, dtype)}.safetensors"
    stored = _open_entry(path, weights, dtype)
    if stored is not None:
        return stored
    try:
        _convert(path, file, weights, dtype, progress)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        stored = _open_entry(path, weights, dtype)
        reason = "what was written cannot be read"
    if stored is None:
        logger.warning(
            "the weights of %s as %s cannot be kept in %s (%s), so every start converts them "
            "anew; %s",
            *(file.path.name, _dtype_name(dtype), path.parent, reason, USE_ANOTHER),
        )
    return stored or weights


@dataclass(frozen=True)
class Origin:
    """What an entry was made from, and in which format."""

    source: Path
    size: int
    mtime_ns: int
    dtype: str
    format: int

    def obsolete(self) -> str | None:
        """Why no start will read the entry any more; None when one may."""
        if self.format != FORMAT:
            return "of another version of Surefoot"
        try:
            status = self.source.stat()
        except OSError:
            return f"{self.source} is gone"
        unchanged = (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)
        return None if unchanged else f"{self.source} has changed"


def read_origin(path: Path) -> Origin | None:
    """The origin of the entry at ``path``; None when it has none that can be read."""
    try:
        with path.open("rb") as file:
            noted = _read_metadata(file)
        return Origin(
            # A source in the cache is noted from there, so that the cache can be moved.
            source=cache_root() / noted["source"],
            size=int(noted["size"]),
            mtime_ns=int(noted["mtime_ns"]),
            dtype=noted["dtype"],
            format=int(noted["format"]),
        )
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None


def converted_from(source: Path) -> list[Path]:
    """The entries that were made from the GGUF file ``source`` as it is now."""
    found = []
    for path in sorted((cache_root() / "converted").glob("*.safetensors")):
        origin = read_origin(path)
        if origin and not origin.obsolete() and origin.source.resolve() == source.resolve():
            found.append(path)
    return found


def entry_is_whole(path: Path) -> bool:
    """Whether the data of the entry at ``path`` have the SHA-256 that its header notes. Reads all
    of it. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        try:
            noted = _read_metadata(file)["sha256"]
        except (struct.error, ValueError, KeyError, TypeError):
            return False
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == noted


def _read_metadata(file: BinaryIO) -> dict[str, str]:
    """``__metadata__`` of a safetensors file, which is then at its data."""
    (length,) = struct.unpack("<Q", file.read(8))
    return json.loads(file.read(min(length, LONGEST_HEADER)))["__metadata__"]


def _origin(file: GgufFile, dtype: torch.dtype) -> dict[str, str]:
    """What ``read_origin`` reads. Safetensors allows texts only."""
    source, status = Path(os.path.abspath(file.path)), file.path.stat()
    if source.is_relative_to(cache_root()):
        source = source.relative_to(cache_root())
    noted = {
        "source": source,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "dtype": _dtype_name(dtype),
        "format": FORMAT,
    }
    return {name: str(value) for name, value in noted.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _convert(
    path: Path, file: GgufFile, weights: LazyWeights, dtype: torch.dtype, progress: Progress | None
) -> None:
    header = _header(weights, dtype, {**_origin(file, dtype), "sha256": UNKNOWN_DIGEST})
    counts = [torch.Size(weights.shape_of(name)).numel() for name in weights]
    size = len(header) + sum(counts) * dtype.itemsize
    with replacing(path, size) as target:
        logger.info(
            "Converting %s to %s, once: %s in %s (SUREFOOT_CACHE moves the cache, `surefoot models "
            "prune converted` removes such copies; a CPU's native weights need none)",
            *(file.path.name, _dtype_name(dtype), size_in_words(size), path.parent),
        )
        target.write(header)
        digest = _write_tensors(target, weights, dtype, progress)
        target.seek(header.index(UNKNOWN_DIGEST.encode()))
        target.write(digest.encode())


def _header(weights: LazyWeights, dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    """Of the safetensors format: uint64 length, JSON padded to 8 bytes; the data follow."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
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
    return struct.pack("<Q", len(text)) + text


def _write_tensors(
    target: BinaryIO, weights: LazyWeights, dtype: torch.dtype, progress: Progress | None
) -> str:
    """One at a time, so that no more than one is in memory. Returns the SHA-256 of them all."""
    digest = hashlib.sha256()
    for done, name in enumerate(weights):
        if progress:
            progress("Converting weights", done, len(weights))
        tensor = weights[name]
        assert isinstance(tensor, torch.Tensor)
        data = tensor.to(dtype).contiguous().flatten().view(torch.uint8).numpy().data
        target.write(data)
        digest.update(data)
    if progress:
        progress("Converting weights", len(weights), len(weights))
    return digest.hexdigest()
