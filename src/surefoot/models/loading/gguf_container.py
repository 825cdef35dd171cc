"""The GGUF container, versions 2 and 3, little endian: metadata and where each tensor lies.

The format: ``GGUF``, uint32 version, uint64 tensor count, uint64 key count; then the keys (string
name, uint32 type, value), then the tensors (string name, uint32 dimensions, uint64 each,
innermost first, uint32 type, uint64 offset), padding to ``general.alignment``, and the data. A
string is a uint64 length and UTF-8 bytes; an array a uint32 type, a uint64 count and the items.

Read here rather than by ``gguf.GGUFReader``, which takes seconds over a vocabulary and does not
notice truncation; type numbers and block sizes come from the ``gguf`` library.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    import torch

# GGUF value type -> (struct letter, numpy type)
SCALARS = {
    0: ("B", "u1"),
    1: ("b", "i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "?"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """``shape`` is outermost first; ``kind`` a name such as ``Q4_1``; the data is ``size`` bytes
    at ``offset`` of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """An open GGUF file: ``metadata`` (str, int, float, bool or lists) and ``tensors`` by name.

    Raises SurefootError when the file is not GGUF, is of another version or byte order, or ends
    before its contents do. ``data_start`` is where the header ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy on write: torch wants writable memory, the file is never changed.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise SurefootError("model", f"cannot read {path}: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, IndexError) as error:
            raise self.broken("its header is cut short or corrupt") from error

    def broken(self, problem: str) -> SurefootError:
        """An error about this file."""
        return SurefootError("model", f"{self.path} is no usable GGUF file: {problem}")

    def items(self, key: str, kind: type = object) -> list[Any]:
        """A list of the metadata, [] when absent. Raises SurefootError when it is none, or holds
        something else than ``kind``."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            expected = "" if kind is object else f" of {kind.__name__}"
            raise self.broken(f"{key} is {repr(value)[:80]}, expected a list{expected}")
        return value

    def raw(self, tensor: GgufTensor) -> torch.Tensor:
        """The tensor's bytes, uint8 ``[rows, bytes per row]``, mapped, not copied."""
        # Here, as processes that only read the tokenizer do without torch.
        import torch

        flat = torch.frombuffer(
            self._map, dtype=torch.uint8, count=tensor.size, offset=tensor.offset
        )
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return flat.view(rows, tensor.size // rows)

    def _read_header(self) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._map[:4] != b"GGUF":
            raise self.broken("it does not start with GGUF")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise self.broken(f"its version is {version}; 2 and 3 (little endian) can be read")
        tensor_count, key_count = self._unpack("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(*self._unpack("I"))
        infos = []
        for _ in range(tensor_count):
            name = self._string()
            (dimensions,) = self._unpack("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self.broken(f"tensor {name} has {dimensions} dimensions")
            shape = tuple(reversed(self._unpack("Q" * dimensions)))
            infos.append((name, shape, *self._unpack("IQ")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self.broken(f"general.alignment is {alignment}")
        self.data_start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in infos:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise self.broken(f"tensor {name} has unknown type number {number}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                raise self.broken(f"{name} of shape {shape} does not fit blocks of {block}")
            size = int(np.prod(shape, dtype=object)) // block * block_bytes
            start = self.data_start + offset
            if start + size > len(self._map):
                raise self.broken(
                    f"it ends at byte {len(self._map)}, before the end of {name}; "
                    "the download may be incomplete"
                )
            self.tensors[name] = GgufTensor(name, kind.name, shape, start, size)

    def _unpack(self, letters: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + letters, self._map, self._at)
        self._at += struct.calcsize("<" + letters)
        return values

    def _take(self, size: int) -> bytes:
        data = self._map[self._at : self._at + size]
        if len(data) != size:
            raise IndexError("past the end")
        self._at += size
        return data

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._take(length).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._unpack("IQ")
            if item == STRING:
                return self._strings(count)
            if item not in SCALARS:
                raise self.broken(f"it has an array of unknown type {item}")
            number = np.dtype(SCALARS[item][1])
            return np.frombuffer(self._take(count * number.itemsize), dtype=number).tolist()
        if kind not in SCALARS:
            raise self.broken(f"it has a value of unknown type {kind}")
        (value,) = self._unpack(SCALARS[kind][0])
        # The shortest decimal that gives the same float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if SCALARS[kind][0] == "f" else value

    def _strings(self, count: int) -> list[str]:
        if count * 8 > len(self._map):
            raise IndexError("past the end")
        # Vocabularies and merge lists hold 10^5 strings, so this loop is kept bare.
        data, at, length_of = self._map, self._at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_of(data, at)
            at += 8 + length
            if at > len(data):
                raise IndexError("past the end")
            strings.append(data[at - length : at].decode("utf-8"))
        self._at = at
        return strings
