"""Measures a round's cost by its number of rows on a fresh engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from surefoot.speculation.cost import CostModel
from surefoot.speculation.layout import RoundPlan
from surefoot.speculation.proposer import Outlook
from surefoot.speculation.round import Wanted

if TYPE_CHECKING:
    from surefoot.engine.engine import Engine

_KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
_REPEATS = 3


def measure_cost(engine: Engine, max_rows: int, seconds: float) -> CostModel:
    """Run spans of rising length and take each one's fastest time, within ``seconds`` in all.

    The engine must be idle. Larger row counts are left to the slope when time runs out; rounds
    correct the curve later.
    """
    state, kv = engine.state, engine.kv
    room = min(kv.pool.capacity * kv.block_size, engine.max_model_len)
    sizes = [rows for rows in _KNOTS if rows <= min(max_rows, room)]
    if state.device.type == "cuda":
        compile_prompts(engine, sizes)
    started = time.perf_counter()
    knots: list[int] = []
    times: list[float] = []
    for rows in sizes:
        spent = time.perf_counter() - started
        if len(times) >= 2 and spent + (_REPEATS + 1) * times[-1] > seconds:
            break
        knots.append(rows)
        # The very first round is the slowest.
        times.append(min(_time(engine, rows) for _ in range(_REPEATS + (not times))))
    state.length.zero_()
    state.computed.zero_()
    state.block_tables.zero_()
    return CostModel(knots, times, max_rows)


def compile_prompts(engine: Engine, sizes: Sequence[int]) -> None:
    """Run prompts of so many tokens, and drafts after them: kernels are compiled at their first
    launch, the first time on a machine. That is not to be timed, and not to happen while a server
    answers."""
    one = torch.zeros(1, dtype=torch.int64, device=engine.state.device)
    for rows in sizes:
        _time(engine, rows)
        for proposer in engine.proposers:
            proposer.expect(Outlook(max_keys=rows + 1))
            proposer.propose(one)


def _time(engine: Engine, rows: int) -> float:
    """Seconds of a round of one span."""
    state = engine.state
    blocks = engine.kv.blocks_for(rows)
    state.block_tables[0, :blocks] = torch.arange(1, blocks + 1, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int64, device=state.device)
    drafts = min(rows - 1, state.max_drafts)
    plan = RoundPlan(
        slots=one * 0,
        known=one * (rows - drafts),
        drafts=one * drafts,
        rows=rows,
        sampled_rows=rows,
        first_sampling=0,
        first_decoding=0,
        max_keys=rows,
    )
    state.length[0] = rows - drafts
    state.computed[0] = 0
    state.limit[0] = state.history.shape[1] - state.max_drafts - 1
    begun = time.perf_counter()
    everybody = dict.fromkeys(range(len(engine.proposers)))
    engine.round(plan, None, Wanted(catching_up=everybody))
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
    return time.perf_counter() - begun
