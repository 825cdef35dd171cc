"""What is recorded when an engine starts on a GPU, and the same without one."""

from __future__ import annotations

from dataclasses import replace

import torch

from surefoot.config import EngineConfig
from surefoot.engine.cuda_graphs import CudaRoundGraphs
from surefoot.engine.forwards import PaddedForward, RecordedForward
from surefoot.engine.graphs import RoundGraphs
from surefoot.engine.memory import MemoryPlan
from surefoot.speculation.replay import ReplayRound
from surefoot.speculation.round import SpeculativeRound


def _at_the_start(config: EngineConfig) -> bool:
    """Whether rounds are recorded and timed now, or when they are first needed."""
    return config.draft_policy == "auto" or config.calibration_seconds > 0


def pad_forward(round_: SpeculativeRound, config: EngineConfig, most: int) -> PaddedForward:
    """The forward of rounds that the host plans, for up to ``most`` rows."""
    parts = round_.decoder, round_.kv, round_.capture, round_.state, most
    if round_.state.device.type != "cuda":
        return PaddedForward(*parts)
    forward = RecordedForward(*parts, pool=torch.cuda.graph_pool_handle())
    if _at_the_start(config):
        forward.record_all()
    return forward


def record_rounds(round_: SpeculativeRound, config: EngineConfig, kv_blocks: int) -> RoundGraphs:
    """The rounds that need no host, timed."""
    spans = config.max_num_seqs
    replay = ReplayRound(round_, spans)
    on_gpu = round_.state.device.type == "cuda"
    graphs = (CudaRoundGraphs if on_gpu else RoundGraphs)(replay, spans)
    if _at_the_start(config):
        graphs.measure(kv_blocks)
    return graphs


def count_recorded(
    plan: MemoryPlan, graphs: RoundGraphs, round_: SpeculativeRound, held: int
) -> MemoryPlan:
    """``plan`` with what was recorded, which made torch's allocator hold so many bytes."""
    forward = round_.padded_forward
    assert isinstance(graphs, CudaRoundGraphs) and isinstance(forward, RecordedForward)
    return replace(
        plan,
        recorded_rounds=len(graphs.graphs) + len(forward.graphs),
        recorded_bytes=held,
        recording_seconds=graphs.capture_seconds + forward.capture_seconds,
    )
