"""What a round has to read at least, and how fast this machine's memory is: the ceiling beside a
measured round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from surefoot.bench.hardware import usable_cores
from surefoot.engine.engine import Engine
from surefoot.models.decoder import Decoder

LARGEST = 4 << 30
CPU_BYTES = 256 << 20
"""Far beyond any cache."""


def memory_bandwidth(device: torch.device, threads: int | None = None) -> dict[str, float]:
    """TB/s: ``copy_tb_s`` of a copy (read plus written), ``read_tb_s`` of reading alone, on a CPU
    with ``threads`` threads (None: one a core). On a GPU it takes up to 8 GiB: call it before the
    KV pool does."""
    if device.type == "cuda":
        from surefoot.bench.kernels_cuda import bandwidth

        result = bandwidth(min(LARGEST, torch.cuda.mem_get_info(device)[0] // 4))
        torch.cuda.empty_cache()
        return result
    data = torch.ones(CPU_BYTES // 4)
    other = torch.zeros_like(data)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or usable_cores())
    try:
        return {
            "copy_tb_s": 2 * data.nbytes / _seconds(lambda: other.copy_(data)) / 1e12,
            "read_tb_s": data.nbytes / _seconds(data.sum) / 1e12,
        }
    finally:
        torch.set_num_threads(before)


def _seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that every round reads: all layers and the head. Of an embedding table
    that is not the head, a round reads a few rows only."""
    parts: list[Any] = [decoder.head_linear, decoder.norm]
    for layer in decoder.layers:
        parts += [layer.qkv, layer.o, layer.gate_up, layer.down]
        parts += [layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm]
    return sum(_bytes(part) for part in parts)


def _bytes(part: Any) -> int:
    if part is None:
        return 0
    if hasattr(part, "nbytes"):  # a tensor, or a linear whose weights stay packed
        return int(part.nbytes)
    return sum(value.nbytes for value in vars(part).values() if isinstance(value, torch.Tensor))


def kv_bytes_per_token(engine: Engine) -> float:
    """The target's, all layers."""
    decoder, size = engine.decoder, engine.config.block_size
    per_block = decoder.backend.kv_bytes_per_block(size, decoder.shape)
    return per_block * decoder.config.layers / size


def round_bytes(engine: Engine, context: float) -> float:
    """Bytes that a round cannot do without: the weights once, and the keys and values of
    ``context`` tokens (of all its requests together)."""
    return weight_bytes(engine.decoder) + context * kv_bytes_per_token(engine)
