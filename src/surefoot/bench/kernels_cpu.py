"""Milliseconds of the native CPU kernels by rows: ``python -m surefoot.bench.kernels_cpu``.

``--requests 8 --context 400 --rows 8 72`` are plain rounds and rounds of nine rows each.
``--sampling`` times the draw of tokens from logits instead, by sampling parameters.

All layers and the head of a model with SmolLM2-135M's sizes and random weights, beside the read
bandwidth that the threads reach on a large buffer: packed bytes divided by it bound one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from surefoot.kernels.backend import AttentionShape, FlatBatch, LayerWeights, RopeTable, Weight
from surefoot.kernels.cpu.backend import NativeBackend, NativeLinear
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.quant import BYTES_PER_BLOCK, QuantTensor
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, sample_rows

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

    def __init__(self, dtype: torch.dtype, linear: str, embedding: str, keys: int) -> None:
        self.backend = backend = NativeBackend(dtype)
        self.layers = [self._layer(linear) for _ in range(LAYERS)]
        self.head = backend.pack_embedding(random_weight(embedding, VOCAB, HIDDEN))[1]
        self.norm = backend.pack_norm(torch.ones(HIDDEN))
        angles = torch.randn(keys, HEAD_DIM // 2)
        self.rope = RopeTable(angles.cos(), angles.sin())
        self.kv = backend.allocate_kv(LAYERS, keys // BLOCK_SIZE + 1, BLOCK_SIZE, SHAPE)

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

    def forward(self, rows: int, context: int, requests: int = 1) -> Callable[[], None]:
        """All layers over the rows, shared evenly by the requests, and the head for all of them
        (for the last in a prefill)."""
        span = rows // requests
        keys = torch.arange(context, context + span).repeat(requests)
        blocks = -(-(context + span) // BLOCK_SIZE)
        tables = torch.randperm(requests * blocks).view(requests, blocks) + 1
        batch = FlatBatch(
            tokens=torch.zeros(rows, dtype=torch.int64),
            positions=keys,
            key_index=keys,
            row_slot=torch.arange(requests).repeat_interleave(span),
            block_tables=tables.int(),
            span_start=torch.full((requests,), context),
            max_keys=context + span,
        )
        start = torch.randn(rows, HIDDEN)

        def run() -> None:
            x = start.clone()
            for weights, kv in zip(self.layers, self.kv, strict=True):
                x = self.backend.layer(weights, x, batch, kv, self.rope)
            self.backend.head(self.norm, 1e-5, self.head, x if rows <= 32 * requests else x[-1:])

        return run


def milliseconds(functions: list[Callable[[], Any]], repeats: int) -> list[tuple[float, float]]:
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


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


def time_sampling(rows: int, repeats: int) -> None:
    """Print the time of native and torch sampling, with 300 tokens of history."""
    logits = torch.randn(rows, VOCAB) * 2
    logits[:, :40] += torch.rand(rows, 40) * 20  # a few likely tokens, as models have them
    history = torch.randint(0, VOCAB, (rows, 300))
    who = SampleRows(torch.arange(rows), torch.full((rows,), 300), history, 300)
    backend = NativeBackend()
    print(f"sampling, {rows} rows   native (ms: median, best)   torch")
    for name, values in SAMPLING.items():
        params = SlotParams(rows, VOCAB, torch.device("cpu"))
        wanted = SamplingParams(**values)
        params.write(
            [
                Request("r", (1,), wanted, SpeculationParams(), slot, 999, slot=slot)
                for slot in range(rows)
            ]
        )
        features = SamplingStages.of([wanted])
        (native, reference) = milliseconds(
            [
                lambda: sample_rows(logits, who, params, features, backend),  # noqa: B023
                lambda: sample_rows(logits, who, params, features),  # noqa: B023
            ],
            repeats,
        )
        print(f"{name:>18}" + "".join(f"{m:14.2f}{b:8.2f}" for m, b in (native, reference)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=64, help="keys before the rows")
    parser.add_argument("--requests", type=int, default=1, help="that share the rows evenly")
    parser.add_argument("--sampling", action="store_true", help="time sampling instead")
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
    if any(rows % options.requests for rows in options.rows):
        parser.error(f"--rows must be multiples of --requests {options.requests}")
    if options.sampling:
        for rows in options.rows:
            time_sampling(rows, options.repeats)
        return
    bandwidth = read_bandwidth()
    variants = {
        "Q4_1/Q8_0": (torch.bfloat16, "Q4_1", "Q8_0"),
        "bf16": (torch.bfloat16, "dense", "dense"),
        "fp32": (torch.float32, "dense", "dense"),
    }
    span = max(options.rows) // options.requests + BLOCK_SIZE
    keys = options.requests * (options.context + span)
    models = {kind: Model(*variants[kind], keys) for kind in options.kinds}
    print(f"{options.threads} threads, {next(iter(models.values())).backend.isa}, ", end="")
    print(f"read bandwidth {bandwidth:.1f} GB/s, context {options.context}, ", end="")
    print(f"requests {options.requests}")
    for kind, model in models.items():
        size = model.nbytes()
        print(f"{kind}: {size / 1e6:.0f} MB packed, {size / bandwidth / 1e6:.1f} ms to read")
    print("rows  " + "".join(f"{kind:>18}" for kind in models) + "   (ms: median, best)")
    for rows in options.rows:
        runs = [model.forward(rows, options.context, options.requests) for model in models.values()]
        times = milliseconds(runs, options.repeats if rows <= 32 else max(options.repeats // 4, 2))
        print(f"{rows:>4}  " + "".join(f"{m:10.2f}{b:8.2f}" for m, b in times), flush=True)


if __name__ == "__main__":
    main()
