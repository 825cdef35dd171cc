"""What an engine measures and records when it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from surefoot.config import EngineConfig
from surefoot.engine.chunks import ChunkLimits, TimedLimits
from surefoot.engine.memory import MemoryPlan
from surefoot.engine.rounds import PaddedRounds, Rounds
from surefoot.engine.sampling_times import time_sampling_called
from surefoot.engine.timing import (
    TIMED_ROWS,
    ProposingTimes,
    time_called,
    time_keeping_up,
    time_keys,
    time_proposing,
    time_round,
)
from surefoot.kv.transaction import KVManager
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, RoundCosts
from surefoot.speculation.fixed import FixedPlanner
from surefoot.speculation.host_costs import HostCosts
from surefoot.speculation.planner import Planner
from surefoot.speculation.round import Round
from surefoot.speculation.size import GREEDY, Size

MOST_ROWS_PER_KEY = 1 / 128
"""Several times what a small model needs (SmolLM2: 1/1000): what a busy machine makes of it at the
start stays believed, and must not leave prompts at a row a round."""
OtherCosts = Mapping[SamplingStages, RoundCosts]
"""By kind of sampling, where that is not to take the likeliest tokens."""


def prepare_rounds(
    round_: Round, config: EngineConfig, kv: KVManager, ahead: bool
) -> tuple[Rounds, Planner | FixedPlanner, ChunkLimits]:
    """How an engine launches its rounds, who sizes them, and how long prompts' chunks are.
    ``ahead``: in few sizes, recorded on a GPU."""
    width = round_.state.max_drafts
    blocks, most = kv.pool.num_blocks, config.max_num_batched_tokens
    fixed = config.draft_policy == "fixed"
    rounds = _padded(round_, most, not fixed) if ahead else Rounds(round_)
    if fixed:
        return rounds, FixedPlanner(width, exact=not ahead), ChunkLimits()
    rows_per_key = 0.0
    if isinstance(rounds, PaddedRounds):
        costs, others = _measure_padded(rounds, blocks)
    else:
        exact, others = _measure_called(round_, config, blocks, most)
        rows_per_key = _rows_per_key(round_, exact, blocks, config.calibration_seconds / 4)
        costs = exact
    planner = Planner(
        costs,
        HostCosts(),
        width,
        round_.drafters,
        overlap=ahead,
        others=others,
        trees=round_.trees,
    )
    return rounds, planner, TimedLimits(lambda: planner.costs, rounds.recorded, most, rows_per_key)


def _padded(round_: Round, most: int, weighed: bool) -> PaddedRounds:
    if round_.state.device.type != "cuda":
        return PaddedRounds(round_, most, weighed)
    from surefoot.engine.cuda_graphs import RecordedRounds

    rounds = RecordedRounds(round_, most, weighed)
    decoder = round_.decoder
    decoder.backend.prepare(decoder.layers, rounds.prompt_rows)
    return rounds


def _measure_called(
    round_: Round, config: EngineConfig, blocks: int, most: int
) -> tuple[ExactCosts, OtherCosts]:
    rows, seconds = time_called(round_, blocks, most, config.calibration_seconds)
    times = time_proposing(round_, blocks, config.calibration_seconds / 4)
    sampling = time_sampling_called(round_, blocks, config.calibration_seconds / 4)
    proposing = _proposing(round_, times)
    if round_.state.device.type == "cuda":
        # Elsewhere it is observed as it happens.
        chunk = Size(1, min(most, TIMED_ROWS), 1, GREEDY, *NOTHING)
        time_keeping_up(round_, blocks, chunk, partial(_time_called, round_))
    return ExactCosts(rows, seconds, proposing), {
        kind: ExactCosts(rows, seconds, proposing, cost) for kind, cost in sampling.items()
    }


def _time_called(round_: Round, size: Size, prepare: Callable[[], None]) -> float:
    prepare()
    return time_round(round_, size, min(size.rows + 1, round_.state.history.shape[1]))


def _rows_per_key(round_: Round, costs: ExactCosts, blocks: int, seconds: float) -> float:
    """What a token before it makes a row of a prompt take longer, in rows."""
    few, many = (float(costs.table(0, rows, NOTHING, 0, 0.0)[1][0]) for rows in (16, 64))
    keys = time_keys(round_, blocks, seconds) * (64 - 16)
    return min(MOST_ROWS_PER_KEY, keys / max(many - few, 1e-9))


def _measure_padded(rounds: PaddedRounds, blocks: int) -> tuple[RoundCosts, OtherCosts]:
    round_ = rounds.round
    if round_.state.device.type != "cuda":
        # A made-up device on which rows are nearly free: here such rounds are for tests only.
        rows = [1, 8, 64, 512, 4096]
        proposing = {
            index: Proposing(0.01, 0.0, round_.drafters.get(index, 0))
            for index in range(len(round_.proposers))
        }
        return ExactCosts(rows, [1 + 0.001 * count for count in rows], proposing), {}
    from surefoot.engine.cuda_graphs import RecordedRounds
    from surefoot.engine.measuring import measure_recorded

    assert isinstance(rounds, RecordedRounds)
    costs = measure_recorded(rounds, blocks)
    return costs[GREEDY], {kind: each for kind, each in costs.items() if kind != GREEDY}


def _proposing(round_: Round, measured: dict[int, ProposingTimes]) -> dict[int, Proposing]:
    found = {}
    for index, times in measured.items():
        longest = round_.drafters.get(index, 0)
        steps = max(1, longest)
        further = max(0.0, times.one - times.shortest) / max(1, steps - 1)
        call = max(0.0, times.shortest - further) if steps > 1 else 0.0
        more = max(0.0, times.few - times.one) / max(1, times.requests - 1)
        found[index] = Proposing(
            max(times.one - call - more, 1e-7) / steps,
            more / steps,
            longest,
            call,
        )
    return found


def count_recorded(plan: MemoryPlan, rounds: Rounds, held: int) -> MemoryPlan:
    """``plan`` with what was recorded, which made torch's allocator hold so many bytes."""
    graphs = getattr(rounds, "graphs", {})
    seconds = getattr(rounds, "capture_seconds", 0.0)
    return replace(
        plan, recorded_rounds=len(graphs), recorded_bytes=held, recording_seconds=seconds
    )
