"""Rounds that do not look for drafts where none would be verified."""

from __future__ import annotations

from typing import Any

import pytest

from harness import Job, run_alone, run_jobs
from surefoot.engine.engine import Engine
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.replay import Size
from surefoot.speculation.rest import LOOKS, PATIENCE, RESTED, Rest
from test_triton_control import build


def test_rests_begin_late_and_end_soon() -> None:
    rest, looked = Rest(), []

    def rounds(count: int, drafts: int = 0) -> list[bool]:
        found = []
        for _ in range(count):
            found.append(not rest.resting)
            rest.launched(drafts if found[-1] else 0)
        return found

    assert all(rounds(PATIENCE - 1)) and all(rounds(1, drafts=3)), "a draft in time"
    looked = rounds(PATIENCE + 3 * (RESTED + LOOKS))
    assert looked == [True] * PATIENCE + 3 * ([False] * RESTED + [True] * LOOKS)
    # Others join: a few looks, and no full patience again; a draft brings that back.
    assert rounds(3) == [False] * 3
    rest.meet()
    assert rounds(LOOKS + 2) == [True] * LOOKS + [False] * 2
    rest.meet()
    assert all(rounds(1, drafts=1)) and all(rounds(PATIENCE)) and not any(rounds(RESTED))


def price(engine: Engine, row: float) -> None:
    """Every row costs ``row`` plain rounds more."""
    assert engine.pipeline is not None
    graphs = engine.pipeline.graphs
    for spans, rows, steps in graphs.costs:
        graphs.costs[spans, rows, steps] = 1.0 + row * (rows - spans)
    graphs._tables_by.clear()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_engine_rests_where_rows_are_dear_and_wakes_where_they_are_not(compiled: bool) -> None:
    engine = build(compiled, proposers=("ngram",), draft_policy="auto", max_num_seqs=2)
    assert engine.pipeline is not None
    pipeline, sizes = engine.pipeline, []
    launch, replay = pipeline.graphs.launch, pipeline.replay
    cheap_from = PATIENCE + RESTED + LOOKS + 4

    def record(size: Size) -> Any:
        sizes.append(size)
        price(engine, 5.0 if len(sizes) < cheap_from else 0.0)
        report = launch(size)
        if not size.proposers:
            seated = replay.slots[:2]
            assert not replay.lengths[seated].any() and not replay.chances[seated].any()
            assert not engine.controller.lengths[:, seated].any()
        return report

    price(engine, 5.0)
    pipeline.graphs.launch = record  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=148, ignore_eos=True)
    jobs = [Job((5, 9, 5, 9 + i), params, SpeculationParams("auto")) for i in range(2)]
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(engine.decoder, job).output
    pair = [size for size in sizes if size.spans == 2]
    resting = [index for index, size in enumerate(pair) if not size.proposers]
    first = list(range(PATIENCE, PATIENCE + RESTED))
    assert resting[:RESTED] == first
    assert resting[RESTED] == first[-1] + LOOKS + 1, "a second rest"
    assert len(resting) <= 2 * RESTED
    drafting = [index for index, size in enumerate(pair) if size.rows > size.spans]
    assert drafting and drafting[0] > resting[-1]


def test_a_fixed_policy_never_rests() -> None:
    engine = build(False, proposers=("ngram",), draft_policy="fixed", max_num_seqs=2)
    price(engine, 50.0)
    params = SamplingParams(temperature=0, max_tokens=148, ignore_eos=True)
    run_jobs(engine, [Job((5, 9, 2), params)])
    assert engine.pipeline is not None and not engine.pipeline.rest.left
    assert engine.stats.draft_rows > 0
