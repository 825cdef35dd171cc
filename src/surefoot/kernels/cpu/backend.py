"""The native CPU backend: one C call per decoder layer, GGUF blocks kept packed.

Results are row-invariant: a row's output bits depend on its token, its position and the keys that
it sees, never on the rest of the batch, the chunking of the prefill, the paging or the number of
threads. Verified spans therefore equal plain decoding bit for bit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import (
    AttentionShape,
    Backend,
    FlatBatch,
    LayerWeights,
    RopeTable,
    Weight,
)
from surefoot.kernels.cpu.build import load_native, native_unavailable
from surefoot.kernels.quant import BLOCK, QuantTensor

LANES = 16
ARGMAX_PART = 16384
KINDS = {"F32": 0, "BF16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 4}
DENSE_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}
WANTS_FLOAT, WANTS_INT8 = 1, 2
BAD_INDEX = 2
SERIAL_BELOW = 1 << 19


class _Segment(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("panels", ctypes.c_int32),
        ("panel_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [
        ("segments", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("formats", ctypes.c_int32),
        ("segment", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "inner", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "kv_kind")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("positions", "key_index", "row_slot")),
        *((name, ctypes.c_void_p) for name in ("span_start", "mask", "tables")),
    ]


class _KV(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("block_size", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
    ]


class _Context(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("capacity", ctypes.c_size_t),
        ("serial_below", ctypes.c_int64),
    ]


class NativeLinear:
    """A packed linear: segments of one or several storage kinds with a common input.

    ``shape`` is (outputs, inputs); ``nbytes`` counts the packed weights.
    """

    def __init__(self, packed: Sequence[tuple[_Segment, torch.Tensor]], bias: Any) -> None:
        segments = [segment for segment, _ in packed]
        inputs = segments[0].inputs
        outputs = sum(segment.outputs for segment in segments)
        self.shape = (outputs, inputs)
        self.nbytes = sum(data.nbytes for _, data in packed)
        self.segments = (_Segment * len(segments))(*segments)
        formats = 0
        for segment in segments:
            formats |= WANTS_FLOAT if segment.kind <= KINDS["BF16"] else WANTS_INT8
        self.struct = _Linear(
            len(segments),
            inputs,
            outputs,
            formats,
            ctypes.addressof(self.segments),
            None if bias is None else bias.data_ptr(),
        )
        self.address = ctypes.addressof(self.struct)
        self.prepared: _Prepared | None = None
        self._kept_alive = (packed, bias)


@dataclass
class _Prepared:
    """A layer's struct, and what it was made of (by identity)."""

    weights: LayerWeights
    rope: RopeTable
    struct: _Layer
    address: int


class NativeKV:
    """Keys and values of one layer (``native.h`` has the layout)."""

    def __init__(self, data: torch.Tensor, block_size: int, shape: AttentionShape) -> None:
        self.data = data
        self.shape = shape
        self.block_size = block_size
        self.struct = _KV(data.data_ptr(), block_size, -(-block_size // LANES))
        self.address = ctypes.addressof(self.struct)


class NativeBackend(Backend):
    """Runs on the CPU with the compiled kernels; activations are float32.

    ``dtype`` (float32 or bfloat16) stores dense weights and the KV cache; GGUF blocks stay packed
    and meet activations quantised to int8 per row and 32 columns. ``threads`` None follows torch's
    number. Not for concurrent calls: scratch memory is shared between them.

    Raises SurefootError when the kernels are not available or ``dtype`` is another one.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> None:
        self.threads = threads
        library = load_native()
        if library is None:
            raise SurefootError(
                "backend",
                f"the native CPU kernels are not available: {native_unavailable()}",
                "use the torch backend",
            )
        if dtype not in DENSE_KINDS:
            raise SurefootError(
                "dtype", f"{dtype} is not supported on this backend", "use float32 or bfloat16"
            )
        self.device = torch.device("cpu")
        self.dtype = dtype
        self._library = library
        self._context = _Context(None, 0, SERIAL_BELOW)
        self._context_address = ctypes.addressof(self._context)
        self._batch: tuple[FlatBatch, _Batch, int, list[torch.Tensor]] | None = None
        weakref.finalize(self, _release, library, self._context)

    def _threads(self) -> int:
        return self.threads or torch.get_num_threads()

    @property
    def serial_below(self) -> int:
        """Multiplications below which a call stays on one thread (0: never). Results are the
        same."""
        return self._context.serial_below

    @serial_below.setter
    def serial_below(self, multiplications: int) -> None:
        self._context.serial_below = multiplications

    @property
    def isa(self) -> str:
        """The instruction set that the kernels were compiled for."""
        return self._library.sf_isa().decode()

    def pack_linear(
        self, parts: Sequence[Weight], bias: torch.Tensor | None = None
    ) -> NativeLinear:
        """Parts ``[out_i, in]``, dense or GGUF, in any mixture; ``bias`` ``[sum(out_i)]``.
        ValueError when their inputs differ."""
        if len({part.shape[1] for part in parts}) != 1:
            raise ValueError(f"parts of one linear differ in inputs: {[p.shape for p in parts]}")
        kept = None if bias is None else bias.detach().float().contiguous()
        return NativeLinear([self._pack(part) for part in parts], kept)

    def _pack(self, part: Weight) -> tuple[_Segment, torch.Tensor]:
        outputs, inputs = part.shape
        if isinstance(part, QuantTensor):
            if inputs % BLOCK:
                raise ValueError(f"a {part.kind} matrix with {inputs} inputs, not a multiple of 32")
            kind, source = KINDS[part.kind], part.data.contiguous()
        else:
            kind = KINDS[DENSE_KINDS[self.dtype]]
            source = part.detach().to("cpu", self.dtype).contiguous()
        panels = -(-outputs // LANES)
        panel_bytes = self._library.sf_panel_bytes(kind, inputs)
        data = torch.empty(panels * panel_bytes, dtype=torch.uint8)
        self._library.sf_pack(
            kind, source.data_ptr(), outputs, inputs, data.data_ptr(), self._threads()
        )
        segment = _Segment(kind, outputs, inputs, panels, panel_bytes, data.data_ptr())
        return segment, data

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        """float32, contiguous."""
        return weight.detach().to("cpu", torch.float32).contiguous()

    def pack_embedding(self, weight: Weight) -> tuple[NativeLinear, NativeLinear]:
        """Table and tied head are the same packed matrix."""
        packed = self.pack_linear([weight])
        return packed, packed

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, shape: AttentionShape
    ) -> list[NativeKV]:
        """One ``NativeKV`` per layer. ValueError for a head_dim that is not a multiple of 16 up to
        256."""
        if shape.head_dim % LANES or not 0 < shape.head_dim <= 256:
            raise ValueError(f"head_dim {shape.head_dim} is not a multiple of 16 up to 256")
        size = blocks * self.kv_bytes_per_block(block_size, shape)
        return [
            NativeKV(torch.zeros(size, dtype=torch.uint8), block_size, shape) for _ in range(layers)
        ]

    def kv_bytes_per_block(self, block_size: int, shape: AttentionShape) -> int:
        """Blocks are stored in tiles of 16 keys, so other sizes are rounded up to that."""
        keys = -(-block_size // LANES) * LANES
        return 2 * keys * shape.kv_heads * shape.head_dim * self.dtype.itemsize

    def embed(self, table: NativeLinear, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [N] -> float32 [N, hidden]. IndexError for a token outside the table."""
        tokens = tokens.contiguous()
        out = torch.empty(tokens.shape[0], table.shape[1])
        code = self._library.sf_embed(
            ctypes.addressof(table.segments),
            tokens.data_ptr(),
            tokens.shape[0],
            out.data_ptr(),
            self._threads(),
        )
        if code == BAD_INDEX:
            raise IndexError(f"a token is outside the vocabulary of {table.shape[0]}")
        return out

    def layer(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        batch: FlatBatch,
        kv: NativeKV,
        rope: RopeTable,
    ) -> torch.Tensor:
        """x float32 [N, hidden], overwritten with the result (a copy when not contiguous).
        MemoryError when scratch memory cannot be had."""
        prepared = weights.qkv.prepared
        if prepared is None or prepared.weights is not weights or prepared.rope is not rope:
            prepared = self._prepare_layer(weights, rope)
        cached = self._batch
        if cached is None or cached[0] is not batch:
            cached = self._prepare_batch(batch)
        if x.dtype is not torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        if self._library.sf_layer(
            self._context_address,
            prepared.address,
            cached[2],
            kv.address,
            x.data_ptr(),
            self._threads(),
        ):
            raise MemoryError("no memory for a layer's intermediate results")
        return x

    def _prepare_layer(self, weights: LayerWeights, rope: RopeTable) -> _Prepared:
        shape = weights.shape
        hidden, inner = weights.qkv.shape[1], weights.down.shape[1]
        expected = {
            "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, hidden),
            "o": (hidden, shape.heads * shape.head_dim),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for name, size in expected.items():
            if getattr(weights, name).shape != size:
                raise ValueError(f"{name} is {getattr(weights, name).shape}, expected {size}")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} heads do not divide among {shape.kv_heads} kv heads")
        for factors in (rope.cos, rope.sin):
            if factors.dtype != torch.float32 or not factors.is_contiguous():
                raise ValueError("rotary tables must be contiguous float32")

        def norm(weight: torch.Tensor | None) -> int | None:
            return None if weight is None else weight.data_ptr()

        struct = _Layer(
            hidden,
            inner,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            KINDS[DENSE_KINDS[self.dtype]],
            weights.eps,
            shape.scale,
            norm(weights.input_norm),
            norm(weights.post_norm),
            norm(weights.q_norm),
            norm(weights.k_norm),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            weights.qkv.struct,
            weights.o.struct,
            weights.gate_up.struct,
            weights.down.struct,
        )
        prepared = _Prepared(weights, rope, struct, ctypes.addressof(struct))
        weights.qkv.prepared = prepared
        return prepared

    def _prepare_batch(self, batch: FlatBatch) -> tuple[FlatBatch, _Batch, int, list[torch.Tensor]]:
        """The struct holds addresses only: changed contents are seen by the next call."""
        if batch.block_tables.dtype != torch.int32:
            raise ValueError(f"block_tables is {batch.block_tables.dtype}, expected int32")
        if batch.block_tables.stride(1) != 1 and batch.block_tables.shape[1] > 1:
            raise ValueError("rows of block_tables must be contiguous")
        names = ["positions", "key_index", "row_slot", "span_start"]
        tensors = [getattr(batch, name) for name in names]
        if batch.mask is not None:
            tensors.append(batch.mask)
            names.append("mask")
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int64, is {tensor.dtype}")
        struct = _Batch(
            batch.tokens.shape[0],
            batch.block_tables.stride(0),
            *(tensor.data_ptr() for tensor in tensors[:4]),
            None if batch.mask is None else batch.mask.data_ptr(),
            batch.block_tables.data_ptr(),
        )
        self._batch = (batch, struct, ctypes.addressof(struct), tensors)
        return self._batch

    def head(
        self, norm: torch.Tensor, eps: float, linear: NativeLinear, x: torch.Tensor
    ) -> torch.Tensor:
        """x [M, hidden] -> float32 logits [M, vocab]."""
        x = x.float().contiguous()
        out = torch.empty(x.shape[0], linear.shape[0])
        self._linear(norm.data_ptr(), eps, linear, x, out)
        return out

    def linear(self, linear: NativeLinear, x: torch.Tensor) -> torch.Tensor:
        """The packed linear alone: [N, in] -> float32 [N, out]."""
        x = x.float().contiguous()
        out = torch.empty(x.shape[0], linear.shape[0])
        self._linear(None, 0.0, linear, x, out)
        return out

    def _linear(
        self,
        norm: int | None,
        eps: float,
        linear: NativeLinear,
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if x.shape[1] != linear.shape[1]:
            raise ValueError(f"an input of {x.shape[1]} columns for {linear.shape[1]}")
        if self._library.sf_head(
            self._context_address,
            norm,
            eps,
            linear.address,
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            self._threads(),
        ):
            raise MemoryError("no memory for the input of a linear")

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [M, V] without NaN -> int64 [M]; the lowest index among equals."""
        logits = logits.float().contiguous()
        rows, columns = logits.shape
        if columns == 0:
            raise ValueError("argmax over no columns")
        parts = rows * -(-columns // ARGMAX_PART)
        out = torch.empty(rows, dtype=torch.int64)
        values, indices = torch.empty(parts), torch.empty(parts, dtype=torch.int64)
        self._library.sf_argmax(
            logits.data_ptr(),
            rows,
            columns,
            out.data_ptr(),
            values.data_ptr(),
            indices.data_ptr(),
            self._threads(),
        )
        return out


def _release(library: ctypes.CDLL, context: _Context) -> None:
    library.sf_release(ctypes.addressof(context))
