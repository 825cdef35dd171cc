"""Weights that stay in the block format of a GGUF file (llama.cpp's ``ggml-quants``).

A row of ``in_features`` weights is cut into blocks of 32. Layouts, little endian:

=====  =====  ==========================================================  ====================
kind   bytes  fields                                                      weight
=====  =====  ==========================================================  ====================
Q4_0   18     fp16 d, 16 bytes: nibble j = lo of byte j, j+16 = hi        d * (q - 8)
Q4_1   20     fp16 d, fp16 m, 16 bytes as above                           d * q + m
Q8_0   34     fp16 d, 32 int8                                             d * q
=====  =====  ==========================================================  ====================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32
BYTES_PER_BLOCK = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True)
class QuantTensor:
    """A matrix ``[out_features, in_features]`` of GGUF blocks.

    ``data`` is uint8 ``[out_features, in_features / 32 * bytes per block]``, contiguous.
    """

    kind: str
    data: torch.Tensor
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.in_features

    @property
    def scales(self) -> torch.Tensor:
        """d, and m of Q4_1, of every block: float16 ``[out_features, blocks, 1 or 2]``."""
        fields = 2 if self.kind == "Q4_1" else 1
        return self._blocks[..., : 2 * fields].contiguous().view(torch.float16)

    @property
    def _blocks(self) -> torch.Tensor:
        return self.data.view(
            self.data.shape[0], self.in_features // BLOCK, BYTES_PER_BLOCK[self.kind]
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The same weights as a dense tensor, computed in fp32 and rounded once to ``dtype``."""
        blocks, scales = self._blocks, self.scales.float()
        scale = scales[..., :1]
        if self.kind == "Q8_0":
            values = blocks[..., 2:].contiguous().view(torch.int8).float() * scale
        else:
            packed = blocks[..., -16:]
            q = torch.cat((packed & 15, packed >> 4), dim=-1).float()
            values = q * scale + scales[..., 1:] if self.kind == "Q4_1" else (q - 8) * scale
        return values.reshape(self.shape).to(dtype)

    @staticmethod
    def of(matrix: torch.Tensor, kind: str = "Q8_0") -> QuantTensor:
        """``matrix`` [out_features, in_features] rounded to blocks of ``kind``, Q8_0 or Q4_1, as
        llama.cpp rounds them. What came from Q8_0 blocks becomes the same Q8_0 blocks again.
        ValueError for rows that blocks do not fit, and for other kinds."""
        outputs, inputs = matrix.shape
        if inputs % BLOCK:
            raise ValueError(f"rows of {inputs} weights, not a multiple of {BLOCK}")
        values = matrix.detach().float().view(outputs, inputs // BLOCK, BLOCK)
        if kind == "Q8_0":
            fields = _rounded_to_8_bits(values)
        elif kind == "Q4_1":
            fields = _rounded_to_4_bits(values)
        else:
            raise ValueError(f"nothing is rounded to {kind}")
        data = torch.cat([field.view(torch.uint8) for field in fields], dim=-1)
        return QuantTensor(kind, data.view(outputs, -1).contiguous(), inputs)


def _rounded_to_8_bits(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The fields of Q8_0 blocks: float32 [..., 32]."""
    scale = values.abs().amax(-1, keepdim=True) / 127
    # Halves away from zero, as C's roundf.
    scaled = values * _inverse(scale)
    q = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
    return scale.half(), q


def _rounded_to_4_bits(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The fields of Q4_1 blocks, which reach from the smallest weight to the largest."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    scale = (high - low) / 15
    q = ((values - low) * _inverse(scale) + 0.5).clamp(0, 15).to(torch.uint8)
    half = BLOCK // 2
    return scale.half(), low.half(), q[..., :half] | q[..., half:] << 4


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def dense(weight: torch.Tensor | QuantTensor) -> torch.Tensor:
    """As a tensor: blocks in float32, others as they are."""
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight
