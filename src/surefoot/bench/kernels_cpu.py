"""Milliseconds of the native CPU kernels by rows: ``python -m surefoot.bench.kernels_cpu``.

All layers and the head of a model with SmolLM2-135M's sizes and random weights, beside the read
bandwidth that the threads reach on a large buffer: packed bytes divided by it bound one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from surefoot.kernels.backend import AttentionShape, FlatBatch, LayerWeights, RopeTable, Weight
from surefoot.kernels.cpu.backend import NativeBackend, NativeLinear
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.quant import BYTES_PER_BLOCK, QuantTensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
BLOCK_SIZE = 16
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)


def random_weight(kind: str, outputs: int, inputs: int) -> Weight:
    """``kind`` is a GGUF kind or ``dense``."""
    if kind == "dense":
        return torch.randn(outputs, inputs) * 0.02
    blocks = torch.randint(0, 256, (outputs, inputs // 32, BYTES_PER_BLOCK[kind])).to(torch.uint8)
    scale = torch.full((outputs, inputs // 32, 1), 0.004, dtype=torch.float16)
    blocks[..., 0:2] = scale.view(torch.uint8)
    if kind == "Q4_1":
        blocks[..., 2:4] = (scale * -7.5).view(torch.uint8)
    return QuantTensor(kind, blocks.flatten(1), inputs)


class Model:
    """Random weights on a backend, and a batch of ``rows`` after ``context`` keys."""

    def __init__(self, dtype: torch.dtype, linear: str, embedding: str) -> None:
        self.backend = backend = NativeBackend(dtype)
        self.layers = [self._layer(linear) for _ in range(LAYERS)]
        self.head = backend.pack_embedding(random_weight(embedding, VOCAB, HIDDEN))[1]
        self.norm = backend.pack_norm(torch.ones(HIDDEN))
        angles = torch.randn(2048, HEAD_DIM // 2)
        self.rope = RopeTable(angles.cos(), angles.sin())
        self.kv = backend.allocate_kv(LAYERS, 2048 // BLOCK_SIZE + 1, BLOCK_SIZE, SHAPE)

    def _layer(self, kind: str) -> LayerWeights:
        def linear(*outputs: int, inputs: int = HIDDEN) -> NativeLinear:
            return self.backend.pack_linear([random_weight(kind, n, inputs) for n in outputs])

        width = KV_HEADS * HEAD_DIM
        return LayerWeights(
            input_norm=torch.ones(HIDDEN),
            qkv=linear(HIDDEN, width, width),
            o=linear(HIDDEN),
            post_norm=torch.ones(HIDDEN),
            gate_up=linear(INNER, INNER),
            down=linear(HIDDEN, inputs=INNER),
            q_norm=None,
            k_norm=None,
            eps=1e-5,
            shape=SHAPE,
        )

    def nbytes(self) -> int:
        linears = [w for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up)]
        linears += [layer.down for layer in self.layers]
        return sum(linear.nbytes for linear in [*linears, self.head])

    def forward(self, rows: int, context: int) -> Callable[[], None]:
        """All layers over the rows, and the head for all of them (for the last in a prefill)."""
        keys = torch.arange(context, context + rows)
        batch = FlatBatch(
            tokens=torch.zeros(rows, dtype=torch.int64),
            positions=keys,
            key_index=keys,
            row_slot=torch.zeros(rows, dtype=torch.int64),
            block_tables=torch.arange(1, 2048 // BLOCK_SIZE + 1, dtype=torch.int32)[None],
            span_start=torch.tensor([context]),
            max_keys=context + rows,
        )
        start = torch.randn(rows, HIDDEN)

        def run() -> None:
            x = start.clone()
            for weights, kv in zip(self.layers, self.kv, strict=True):
                x = self.backend.layer(weights, x, batch, kv, self.rope)
            self.backend.head(self.norm, 1e-5, self.head, x if rows <= 32 else x[-1:])

        return run


def milliseconds(functions: list[Callable[[], None]], repeats: int) -> list[tuple[float, float]]:
    """(median, best) of alternating runs, so that all see the same neighbours."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, samples in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            samples.append((time.perf_counter() - start) * 1e3)
    return [(statistics.median(samples[1:]), min(samples[1:])) for samples in times]


def read_bandwidth() -> float:
    """GB/s of summing a buffer that no cache holds, the best of a few."""
    buffer = torch.ones(256 << 20, dtype=torch.uint8).view(torch.int64)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=64, help="keys before the rows")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument(
        "--kinds", nargs="*", default=["Q4_1/Q8_0", "bf16", "fp32"], help="which storage to time"
    )
    options = parser.parse_args()
    reason = native_unavailable()
    if reason:
        parser.exit(1, f"native kernels are not available: {reason}\n")
    torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth()
    variants = {
        "Q4_1/Q8_0": (torch.bfloat16, "Q4_1", "Q8_0"),
        "bf16": (torch.bfloat16, "dense", "dense"),
        "fp32": (torch.float32, "dense", "dense"),
    }
    models = {kind: Model(*variants[kind]) for kind in options.kinds}
    print(f"{options.threads} threads, {next(iter(models.values())).backend.isa}, ", end="")
    print(f"read bandwidth {bandwidth:.1f} GB/s, context {options.context}")
    for kind, model in models.items():
        size = model.nbytes()
        print(f"{kind}: {size / 1e6:.0f} MB packed, {size / bandwidth / 1e6:.1f} ms to read")
    print("rows  " + "".join(f"{kind:>18}" for kind in models) + "   (ms: median, best)")
    for rows in options.rows:
        runs = [model.forward(rows, options.context) for model in models.values()]
        times = milliseconds(runs, options.repeats if rows <= 32 else max(options.repeats // 4, 2))
        print(f"{rows:>4}  " + "".join(f"{m:10.2f}{b:8.2f}" for m, b in times), flush=True)


if __name__ == "__main__":
    main()
