"""Who gets the GPU's memory: measured before the KV pool is sized, reported when all stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.kernels.backend import FlatBatch
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposer import Needs

OTHER = 256 << 20
"""Compiled kernels, what recorded rounds hold outside torch's pools, and what the allocator cannot
fill."""
SMALL = 64 << 20
"""Parts below are not worth a line."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, unless named otherwise."""

    total: int
    """What the device has."""
    weights: int
    slots: int
    """State of the requests that run."""
    drafters: int
    """``Needs.fixed_bytes`` of all proposers, or what they have taken if that is more."""
    rounds: int
    """Activations, logits and sampler scratch of the largest round."""
    recorded: int
    """Twice that for recorded rounds, which share one pool: before it is recorded, each runs once
    on a stream of its own, with memory of that stream. Some are recorded when first needed."""
    other: int
    kv: int
    """Up to here left for the KV pools (drafters' included), then what they take."""
    kv_tokens: int = 0
    full_contexts: int = 0
    """Tokens of ``max_num_seqs`` requests of ``max_model_len``."""
    recorded_rounds: int = 0
    """How many sizes of rounds were recorded at the start."""
    recorded_bytes: int = 0
    """What these made torch's allocator hold."""
    recording_seconds: float = 0.0

    def bytes_by_part(self) -> dict[str, int]:
        """JSON-ready, the total first."""
        parts = ("total", "weights", "slots", "drafters", "rounds", "recorded", "other", "kv")
        return {part: getattr(self, part) for part in parts}

    def lines(self) -> list[str]:
        """The plan as a table for people."""
        notes = {
            "rounds": "activations and sampling of the largest round",
            "recorded": f"reserved; {self.recorded_rounds} rounds recorded in "
            f"{self.recording_seconds:.1f} s hold {self.recorded_bytes / 2**20:.0f} MiB",
            "kv": f"{self.kv_tokens} tokens; max_num_seqs x max_model_len are {self.full_contexts}",
        }
        return [
            f"{part:<10}{size / 2**30:8.2f} GiB  {notes.get(part, '')}".rstrip()
            for part, size in self.bytes_by_part().items()
            if size >= SMALL or part == "kv"
        ]

    def summary(self) -> str:
        """The plan in one line."""
        parts = [
            f"{part} {size / 2**30:.1f}"
            for part, size in self.bytes_by_part().items()
            if part != "total" and size >= SMALL
        ]
        line = f"GiB of {self.total / 2**30:.1f}: {', '.join(parts)}"
        if self.recorded_rounds:
            line += f"; {self.recorded_rounds} rounds recorded in {self.recording_seconds:.0f} s"
        return line

    def with_kv(self, size: int, tokens: int, full_contexts: int) -> MemoryPlan:
        """With pools of ``size`` bytes for ``tokens`` positions. SurefootError if they exceed what
        is left."""
        if size > self.kv:
            raise SurefootError(
                "kv_cache_memory",
                f"{size >> 20} MiB are more than the {self.kv >> 20} MiB left for KV",
                "lower it, or raise gpu_memory_utilization",
            )
        return replace(self, kv=size, kv_tokens=tokens, full_contexts=full_contexts)


class Allocations:
    """Bytes that torch holds on a GPU, by who took them; none on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.parts: dict[str, int] = {}
        self._last = 0

    def enter(self, part: str) -> None:
        """What was allocated since the last call is ``part``'s."""
        if self.on_gpu:
            now = torch.cuda.memory_allocated(self.device)
            self.parts[part] = now - self._last
            self._last = now

    def reserved(self) -> int:
        """Held by torch's allocator, recorded rounds' pools included."""
        return torch.cuda.memory_reserved(self.device) if self.on_gpu else 0


def plan_memory(
    decoder: Decoder,
    config: EngineConfig,
    max_drafts: int,
    taken: Allocations,
    needs: Sequence[Needs],
) -> MemoryPlan:
    """Run the largest round on an idle GPU, of ``max_drafts`` drafts a request, and see what is
    left for KV. ``taken`` has ``weights``, ``slots`` and ``drafters``; ``needs`` are those of the
    proposers. SurefootError if nothing is left."""
    device = decoder.backend.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    layers = sorted({layer for need in needs for layer in need.captured_layers})
    _largest_round(decoder, config, max_drafts, layers)
    torch.cuda.synchronize(device)
    rounds = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What other processes hold is not ours to plan with.
    ours = free + torch.cuda.memory_reserved(device)
    return divide(total, ours, config, taken.parts, needs, rounds)


def divide(
    total: int,
    ours: int,
    config: EngineConfig,
    taken: dict[str, int],
    needs: Sequence[Needs],
    rounds: int,
) -> MemoryPlan:
    """The plan for a device of ``total`` bytes of which this process may have ``ours``."""
    # Weights of drafters are loaded by now, their scratch is not.
    drafters = max(taken["drafters"], sum(need.fixed_bytes for need in needs))
    recorded = 0 if config.enforce_eager else 2 * rounds
    usable = min(int(total * config.gpu_memory_utilization), ours)
    known = {
        "weights": taken["weights"],
        "slots": taken["slots"],
        "drafters": drafters,
        "rounds": rounds,
        "recorded": recorded,
        "other": OTHER,
    }
    kv = usable - sum(known.values())
    if kv <= 0:
        sizes = ", ".join(f"{part} {size >> 20}" for part, size in known.items())
        raise SurefootError(
            "gpu_memory_utilization",
            f"leaves no memory for KV: {usable >> 20} MiB usable, {sizes}",
            "raise it, or lower max_num_batched_tokens or max_num_seqs",
        )
    return MemoryPlan(total=total, kv=kv, **known)


def _largest_round(
    decoder: Decoder, config: EngineConfig, max_drafts: int, layers: Sequence[int]
) -> None:
    backend, device = decoder.backend, decoder.backend.device
    span = 1 + max_drafts
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
    forward = decoder.forward(batch, kv * decoder.config.layers, layers)
    logits = decoder.logits(forward.hidden[:sampled])
    # Penalties work on a copy and count tokens in a table of the same size.
    del forward
    _scratch = logits.clone(), torch.empty_like(logits)
