"""The NVIDIA backend: Triton kernels, and cuBLAS (through torch) where it is faster and gives the
same bits. A row's results depend on the row and its request alone, not on the others of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch.nn.functional import embedding

from surefoot.kernels.backend import (
    AcceptedPaths,
    AttentionShape,
    Backend,
    FlatBatch,
    LayerWeights,
    OutputRows,
    RopeTable,
    Weight,
    feature_places,
)
from surefoot.kernels.draws import Maxima
from surefoot.kernels.quant import QuantTensor
from surefoot.kernels.triton.argmax import argmax
from surefoot.kernels.triton.attend import Work, attend_inputs, work_of
from surefoot.kernels.triton.cublas import CublasChoices
from surefoot.kernels.triton.drafting import TritonDrafting
from surefoot.kernels.triton.launch import check_device, hopper
from surefoot.kernels.triton.logprobs import mask_tokens, row_logprobs
from surefoot.kernels.triton.matmul_plan import MAX_ROWS
from surefoot.kernels.triton.moves import move_paths
from surefoot.kernels.triton.norm import rms_norm
from surefoot.kernels.triton.penalties import Adjuster
from surefoot.kernels.triton.products import TritonLinear
from surefoot.kernels.triton.prompt_attention import SMALLEST_BLOCK, takes_heads
from surefoot.kernels.triton.qkv import fused
from surefoot.kernels.triton.sampling import draw
from surefoot.kernels.triton.spans import span_table


class TritonBackend(Backend):
    """Activations, dense weights and KV in ``dtype`` (bfloat16 or float32), sums in float32; GGUF
    blocks are dequantised when packed.

    Raises SurefootError for another dtype, or a ``device`` that is no NVIDIA GPU (unless kernels
    are interpreted).
    """

    name = "triton"
    book_keeping = "triton"

    def __init__(
        self, device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        check_device(self.device, dtype)
        # Elsewhere nobody has measured it yet.
        self.row_invariant = hopper(self.device)
        self.draw, self.adjust = draw, Adjuster(self.device)
        self.mask_tokens, self.row_logprobs = mask_tokens, row_logprobs
        self.choices = CublasChoices()
        self.runs_beside = self.device.type == "cuda"
        self._streams: list[torch.cuda.Stream] = []

    @contextmanager
    def beside(self, works: Sequence[Callable[[], None]]) -> Iterator[None]:
        while len(self._streams) < len(works):
            self._streams.append(torch.cuda.Stream(self.device))
        streams = self._streams[: len(works)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            for stream, work in zip(streams, works, strict=True):
                with torch.cuda.stream(stream):
                    work()
            yield
        finally:
            # Also where something was raised: what is being recorded must end on one stream.
            for stream in streams:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    @property
    def drafting(self) -> TritonDrafting:
        return TritonDrafting(self)

    def _dense(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, QuantTensor):
            weight = weight.dequantize()
        return weight.to(self.device, self.dtype).contiguous()

    def pack_linear(
        self, parts: Sequence[Weight], bias: torch.Tensor | None = None
    ) -> TritonLinear:
        dense = [self._dense(part) for part in parts]
        weight = dense[0] if len(dense) == 1 else torch.cat(dense)
        return TritonLinear(weight, None if bias is None else self._dense(bias), self.choices)

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        return self._dense(weight)

    def pack_embedding(self, weight: Weight) -> tuple[torch.Tensor, TritonLinear]:
        dense = self._dense(weight)
        return dense, TritonLinear(dense, None, self.choices)

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, shape: AttentionShape
    ) -> list[torch.Tensor]:
        """[2, blocks, kv_heads, block_size, head_dim] per layer (``rope_kv`` says why), one behind
        the other. ValueError for an odd head_dim or one above 256."""
        if shape.head_dim % 2 or shape.head_dim > 256:
            raise ValueError(f"head_dim {shape.head_dim} is not an even number up to 256")
        size = (layers, 2, blocks, shape.kv_heads, block_size, shape.head_dim)
        return list(torch.zeros(size, dtype=self.dtype, device=self.device))

    def smallest_block(self, shape: AttentionShape) -> int:
        return SMALLEST_BLOCK if hopper(self.device) and takes_heads(shape, self.dtype) else 1

    def kv_bytes_per_block(self, block_size: int, shape: AttentionShape) -> int:
        return 2 * block_size * shape.kv_heads * shape.head_dim * self.dtype.itemsize

    def prepare(self, layers: Sequence[LayerWeights], rows: Sequence[int]) -> None:
        if self.device.type != "cuda" or self.dtype is not torch.bfloat16 or not layers:
            return
        counts = [count for count in rows if count > MAX_ROWS]
        ordered = fused(layers[0].shape, self.dtype, layers[0].q_norm is not None)
        for name in ("qkv", "o", "gate_up", "down"):
            linears = [getattr(layer, name) for layer in layers[:4]]
            split_k, gated = 1 if name == "qkv" and ordered else 0, name == "gate_up"
            # Memory is planned for our kernels: what cuBLAS leaves to be gated must fit there, too.
            fitting = [count for count in counts if not gated or 2 * count <= counts[-1]]
            self.choices.find(linears, fitting, gated, split_k)

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
        x = x.to(self.dtype).contiguous()
        if inputs is None:
            normed = rms_norm(x, weights.input_norm, weights.eps)
        else:
            normed = inputs.to(self.dtype).contiguous()
        return self.finish(weights, x, normed, batch, kv, rope, outputs)

    def layers(
        self,
        weights: Sequence[LayerWeights],
        x: torch.Tensor,
        batch: FlatBatch,
        kv: Sequence[torch.Tensor],
        rope: RopeTable,
        capture: Sequence[int],
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base class, but the end of a layer is one kernel with the norm of the next."""
        x = x.to(self.dtype).contiguous()
        if not weights:
            return super().layers(weights, x, batch, kv, rope, capture, outputs)
        if batch.spans is None:
            # Once, and well before attention, which reads it before it waits.
            batch = replace(batch, spans=span_table(batch))
        features, kept = feature_places(x, capture)
        if 0 in kept:
            kept[0].copy_(x)
        normed = rms_norm(x, weights[0].input_norm, weights[0].eps)
        # Layers are alike.
        work = work_of(batch, weights[0].shape, kv[0])
        for index, (layer, following) in enumerate(pairwise(weights)):
            x, hidden = self.up_to_down(layer, x, normed, batch, kv[index], rope, work)
            norm = following.input_norm, following.eps
            x, normed = layer.down.added_normed(hidden, x, norm, kept.get(index + 1))
        last = len(weights) - 1
        output = kept.get(last + 1)
        early = outputs if output is None else None
        x = self.finish(weights[last], x, normed, batch, kv[last], rope, early, work)
        if output is not None:
            output.copy_(x)
            x = x if outputs is None else x[outputs.index]
        return x, features

    def finish(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        normed: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
        outputs: OutputRows | None,
        work: Work = None,
    ) -> torch.Tensor:
        """A layer behind which no other follows at once. ``work``: of all its rows, if known."""
        if outputs is not None:
            work = work_of(outputs.batch, weights.shape, kv) if len(outputs.index) else None
        elif work is None:
            work = work_of(batch, weights.shape, kv)
        x, hidden = self.up_to_down(weights, x, normed, batch, kv, rope, work, outputs)
        return weights.down.added(hidden, x) if len(x) else x

    @staticmethod
    def up_to_down(
        weights: LayerWeights,
        x: torch.Tensor,
        normed: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
        work: Work,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer short of its last product: (residual stream, what ``down`` multiplies), of all
        rows or of those wanted."""
        attended = attend_inputs(weights, normed, batch, kv, rope, work, outputs)
        if outputs is not None:
            x = x[outputs.index]
        if not len(x):
            return x, x
        x, normed = weights.o.added_normed(attended, x, (weights.post_norm, weights.eps))
        return x, weights.gate_up.gated(normed)

    def move_paths(self, layers: Sequence[torch.Tensor], paths: AcceptedPaths) -> None:
        move_paths(layers, paths)

    def linear(self, linear: TritonLinear, x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(self.dtype).contiguous())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x.contiguous(), weight, eps)

    def head(
        self, norm: torch.Tensor, eps: float, linear: TritonLinear, x: torch.Tensor
    ) -> torch.Tensor:
        return linear.wide(rms_norm(x.contiguous(), norm, eps))

    def head_where_used(
        self,
        norm: torch.Tensor,
        eps: float,
        linear: TritonLinear,
        x: torch.Tensor,
        slots: torch.Tensor,
        use: torch.Tensor,
    ) -> tuple[torch.Tensor, Maxima | None]:
        return linear.wide_where_used(rms_norm(x.contiguous(), norm, eps), slots, use)

    def greedy(
        self, norm: torch.Tensor, eps: float, linear: TritonLinear, x: torch.Tensor
    ) -> torch.Tensor:
        return linear.largest(rms_norm(x.contiguous(), norm, eps))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[M, vocab] float32 or bf16 without NaN -> int64 [M]; ties go to the lowest index."""
        return argmax(logits)
