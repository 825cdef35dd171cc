"""Who gets the GPU's memory: measured before the KV pool is sized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.kernels.backend import FlatBatch
from surefoot.models.decoder import Decoder

OTHER = 256 << 20
"""Slots, tables, compiled kernels and what the allocator cannot fill."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. ``rounds``: activations, logits and sampler scratch of the largest round, twice: once
    for rounds that the host plans, once for recorded ones, which share one pool."""

    total: int
    weights: int
    rounds: int
    other: int
    kv: int

    def lines(self) -> list[str]:
        """The plan as a table, largest unit GiB."""
        parts = ("total", "weights", "rounds", "other", "kv")
        return [f"{part:<8}{getattr(self, part) / 2**30:9.2f} GiB" for part in parts]


def plan_memory(decoder: Decoder, config: EngineConfig) -> MemoryPlan:
    """Run the largest round on an idle GPU and give the KV pool what is left of
    ``gpu_memory_utilization``. SurefootError if nothing is."""
    device = decoder.backend.device
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _largest_round(decoder, config)
    torch.cuda.synchronize(device)
    rounds = 2 * (torch.cuda.max_memory_allocated(device) - weights)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What other processes hold is not ours to plan with.
    others = total - free - torch.cuda.memory_reserved(device)
    usable = min(int(total * config.gpu_memory_utilization), total - others)
    kv = usable - weights - rounds - OTHER
    if kv <= 0:
        raise SurefootError(
            "gpu_memory_utilization",
            f"leaves no memory for KV: {usable >> 20} MiB usable, weights {weights >> 20}, "
            f"rounds {rounds >> 20}, other {OTHER >> 20}",
            "raise it, or lower max_num_batched_tokens or max_num_seqs",
        )
    return MemoryPlan(total, weights, rounds, OTHER, kv)


def _largest_round(decoder: Decoder, config: EngineConfig) -> None:
    backend, device = decoder.backend, decoder.backend.device
    span = 1 + config.max_draft_tokens
    sampled = config.max_num_seqs * span
    rows = max(config.max_num_batched_tokens + config.max_num_seqs * (span - 1), sampled)
    kv = backend.allocate_kv(1, 2, config.block_size, decoder.shape)
    index = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = FlatBatch(
        tokens=index,
        positions=index,
        key_index=index,
        row_slot=torch.full_like(index, -1),
        block_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
        span_start=index[:1],
        max_keys=1,
    )
    hidden = decoder.forward(batch, kv * decoder.config.layers).hidden
    logits = decoder.logits(hidden[:sampled])
    # Penalties work on a copy and count tokens in a table of the same size.
    del hidden
    _scratch = logits.clone(), torch.empty_like(logits)
