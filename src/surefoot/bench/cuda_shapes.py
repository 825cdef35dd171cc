"""Shapes of models, batches of them, and a clock, for measuring kernels on an NVIDIA GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from surefoot.kernels.backend import FlatBatch, SpanTable

QWEN3_4B: dict[str, Any] = dict(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=4096,
    norm_eps=1e-6,
    rope_theta=1e6,
    tied_embeddings=True,
    qk_norm=True,
)
SMOLLM2: dict[str, Any] = dict(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    max_positions=4096,
    norm_eps=1e-5,
    rope_theta=1e5,
    tied_embeddings=True,
)
BLOCK = 16


def make_batch(
    requests: int, rows: int, context: int, vocab: int, max_length: int = 4096
) -> FlatBatch:
    """``requests`` spans of ``rows`` rows each, behind ``context`` keys; blocks are scattered."""
    blocks = -(-(context + rows) // BLOCK)
    table = torch.zeros((requests, max_length // BLOCK), dtype=torch.int32, device="cuda")
    table[:, :blocks] = 1 + torch.randperm(requests * blocks, device="cuda").view(requests, -1)
    slot = torch.arange(requests, device="cuda").repeat_interleave(rows)
    positions = context + torch.arange(rows, device="cuda").repeat(requests)
    first = torch.arange(requests, device="cuda") * rows
    return FlatBatch(
        tokens=torch.randint(0, vocab, (requests * rows,), device="cuda"),
        positions=positions,
        key_index=positions,
        row_slot=slot,
        block_tables=table,
        span_start=torch.full((requests,), context, device="cuda"),
        max_keys=context + rows,
        spans=SpanTable(
            first, torch.full_like(first, rows), torch.arange(requests, device="cuda"), rows
        ),
    )


def seconds(run: Callable[[], Any], repeats: int = 20, graph: bool = True) -> float:
    """Median seconds of ``run``, as a graph replay unless told otherwise."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            run()
        run = captured.replay
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])
