"""The reference backend: plain torch, any device, any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear

from surefoot.kernels import reference as ops
from surefoot.kernels.attention.torch_paged import span_attention, write_kv
from surefoot.kernels.backend import (
    AcceptedPaths,
    AttentionShape,
    Backend,
    FlatBatch,
    LayerWeights,
    OutputRows,
    RopeTable,
    Weight,
)
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.quant import QuantTensor


@dataclass(frozen=True)
class DenseLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class TorchBackend(Backend):
    """Dense weights in ``dtype``; GGUF blocks are dequantised when packed."""

    name = "torch"

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device = torch.device(device)
        self.dtype = dtype

    @property
    def drafting(self) -> TorchDrafting:
        return TorchDrafting(self)

    def _dense(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, QuantTensor):
            weight = weight.dequantize()
        return weight.to(self.device, self.dtype)

    def pack_linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> DenseLinear:
        dense = [self._dense(part) for part in parts]
        weight = dense[0] if len(dense) == 1 else torch.cat(dense)
        return DenseLinear(weight, None if bias is None else self._dense(bias))

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        return self._dense(weight)

    def pack_embedding(self, weight: Weight) -> tuple[torch.Tensor, DenseLinear]:
        dense = self._dense(weight)
        return dense, DenseLinear(dense, None)

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, shape: AttentionShape
    ) -> list[torch.Tensor]:
        size = (2, blocks, block_size, shape.kv_heads, shape.head_dim)
        return [torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(layers)]

    def kv_bytes_per_block(self, block_size: int, shape: AttentionShape) -> int:
        return 2 * block_size * shape.kv_heads * shape.head_dim * self.dtype.itemsize

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return embedding(tokens, table)

    def layer(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
        inputs: torch.Tensor | None = None,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        if inputs is None:
            assert weights.input_norm is not None
            inputs = ops.rms_norm(x, weights.input_norm, weights.eps)
        x = x + self.attention(weights, inputs, batch, kv, rope)
        if outputs is not None:
            x = x[outputs.index]
        hidden = ops.rms_norm(x, weights.post_norm, weights.eps)
        return x + weights.down(ops.silu_mul(weights.gate_up(hidden)))

    @staticmethod
    def attention(
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
    ) -> torch.Tensor:
        """As ``Drafting.attention``."""
        shape = weights.shape
        qkv = weights.qkv(inputs)
        qkv = qkv.unflatten(-1, (shape.heads + 2 * shape.kv_heads, shape.head_dim))
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = ops.rms_norm(q, weights.q_norm, weights.eps)
            k = ops.rms_norm(k, weights.k_norm, weights.eps)
        q = ops.apply_rope(q, batch.positions, rope)
        k = ops.apply_rope(k, batch.positions, rope)
        write_kv(kv, k, v, batch)
        return weights.o(span_attention(q, kv, batch, shape).flatten(1))

    def move_paths(self, layers: Sequence[torch.Tensor], paths: AcceptedPaths) -> None:
        source, target = ops.key_moves(paths)
        tables = paths.tables[paths.slots]
        for kv in layers:
            from_block, from_place = ops.key_places(tables, source, kv.shape[2])
            to_block, to_place = ops.key_places(tables, target, kv.shape[2])
            kv[:, to_block, to_place] = kv[:, from_block, from_place]

    def linear(self, linear: DenseLinear, x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    def head(
        self, norm: torch.Tensor, eps: float, linear: DenseLinear, x: torch.Tensor
    ) -> torch.Tensor:
        return linear(ops.rms_norm(x, norm, eps)).float()


class TorchDrafting(Drafting):
    """The operations as they stand, on this backend's KV."""

    def store_keys(
        self,
        projected: torch.Tensor,
        shape: AttentionShape,
        k_norm: torch.Tensor | None,
        eps: float,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
    ) -> None:
        k, v = projected.unflatten(-1, (2, shape.kv_heads, shape.head_dim)).unbind(1)
        if k_norm is not None:
            k = ops.rms_norm(k, k_norm, eps)
        write_kv(kv, ops.apply_rope(k, batch.positions, rope), v, batch)

    def attention(
        self,
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
    ) -> torch.Tensor:
        return TorchBackend.attention(weights, inputs, batch, kv, rope)
