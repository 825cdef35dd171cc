"""Packed weights: the storage kinds, and linears made of one or several of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from surefoot.kernels.backend import Weight
from surefoot.kernels.cpu.huge_pages import WeightMemory
from surefoot.kernels.cpu.structs import LinearStruct, SegmentStruct
from surefoot.kernels.quant import BLOCK, QuantTensor

LANES = 16
KINDS = {"F32": 0, "BF16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 4}
DENSE_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}
WANTS_FLOAT, WANTS_INT8 = 1, 2


class NativeLinear:
    """A packed linear: segments of one or several storage kinds with a common input.

    ``shape`` is (outputs, inputs); ``nbytes`` counts the packed weights.
    """

    def __init__(self, packed: Sequence[tuple[SegmentStruct, torch.Tensor]], bias: Any) -> None:
        segments = [segment for segment, _ in packed]
        inputs = segments[0].inputs
        outputs = sum(segment.outputs for segment in segments)
        self.shape = (outputs, inputs)
        self.nbytes = sum(data.nbytes for _, data in packed)
        self.segments = (SegmentStruct * len(segments))(*segments)
        formats = 0
        for segment in segments:
            formats |= WANTS_FLOAT if segment.kind <= KINDS["BF16"] else WANTS_INT8
        self.struct = LinearStruct(
            len(segments),
            inputs,
            outputs,
            formats,
            ctypes.addressof(self.segments),
            None if bias is None else bias.data_ptr(),
        )
        self.address = ctypes.addressof(self.struct)
        self.prepared: Any = None
        """Whatever its layer was last prepared as."""
        self._kept_alive = (packed, bias)


def pack_part(
    library: ctypes.CDLL, part: Weight, dtype: torch.dtype, memory: WeightMemory, threads: int
) -> tuple[SegmentStruct, torch.Tensor]:
    """One matrix ``[out, in]`` as panels (``native.h`` has the layouts) and the tensor that holds
    them, from ``memory``; a dense one is stored as ``dtype``. ValueError for blocks that do not fit
    its rows."""
    outputs, inputs = part.shape
    if isinstance(part, QuantTensor):
        if inputs % BLOCK:
            raise ValueError(f"a {part.kind} matrix with {inputs} inputs, not a multiple of 32")
        kind, source = KINDS[part.kind], part.data.contiguous()
    else:
        kind = KINDS[DENSE_KINDS[dtype]]
        source = part.detach().to("cpu", dtype).contiguous()
    panels = -(-outputs // LANES)
    panel_bytes = library.sf_panel_bytes(kind, inputs)
    data = memory.take(panels * panel_bytes)
    library.sf_pack(kind, source.data_ptr(), outputs, inputs, data.data_ptr(), threads)
    return SegmentStruct(kind, outputs, inputs, panels, panel_bytes, data.data_ptr()), data


def input_of(x: torch.Tensor, linear: NativeLinear) -> torch.Tensor:
    """The input of a linear as the C code reads it."""
    if x.shape[1] != linear.shape[1]:
        raise ValueError(f"an input of {x.shape[1]} columns for {linear.shape[1]}")
    return floats(x)


def floats(x: torch.Tensor) -> torch.Tensor:
    """float32, contiguous: ``x`` itself where it is."""
    if x.dtype is torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()
