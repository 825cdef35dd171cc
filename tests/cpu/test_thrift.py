"""Drafting that does not pay ends; drafting that pays goes on, as far as it pays."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_engines import folder, target
from harness import Job, make_engine, on_torch_alone, run_jobs
from surefoot.request import SamplingParams
from surefoot.speculation.cost import CostModel
from surefoot.speculation.thrift import FIRST_SLEEP, LONGEST_SLEEP, WINDOW, Thrift

PLAIN = 10e-3


def simulate(rounds: int, seconds: float, accepted: int, longest: int = 4) -> tuple[Thrift, int]:
    """One request; every draft verified. Returns the record and how many rounds drafted."""
    thrift, awake = Thrift(longest), 0
    for _ in range(rounds):
        if not thrift.awake:
            thrift.rest()
            continue
        awake += 1
        steps = thrift.steps(PLAIN, 0.1e-3)
        thrift.drafted(seconds * steps, steps)
        thrift.verified([(steps, min(accepted, steps))], PLAIN, 0.1e-3 * steps)
    return thrift, awake


def test_a_drafter_that_pays_never_sleeps() -> None:
    thrift, awake = simulate(2000, 1e-3, accepted=2)
    assert awake == 2000 and thrift.naps == 0


def test_a_drafter_that_does_not_pay_sleeps_longer_and_longer() -> None:
    thrift, awake = simulate(10_000, 1e-3, accepted=0)
    assert awake < 0.02 * 10_000 and thrift.naps == awake // WINDOW
    assert FIRST_SLEEP < LONGEST_SLEEP


def test_one_that_gets_better_is_back_for_good() -> None:
    thrift, _ = simulate(500, 1e-3, accepted=0)
    for _ in range(4 * FIRST_SLEEP):
        thrift.rest()
    assert thrift.awake
    for _ in range(5 * WINDOW):
        thrift.drafted(2e-3, 2)
        thrift.verified([(2, 2)], PLAIN, 0)
    assert thrift.awake and thrift._next_sleep == FIRST_SLEEP


@pytest.mark.parametrize(
    ("accepted", "seconds", "most"), [(4, 0.1e-3, 4), (1, 0.1e-3, 2), (4, 30e-3, 1), (0, 1e-3, 1)]
)
def test_it_drafts_as_far_as_a_step_pays(accepted: int, seconds: float, most: int) -> None:
    thrift, seen = Thrift(4), []
    for _ in range(200):
        steps = thrift.steps(PLAIN, 0.1e-3)
        seen.append(steps)
        thrift.drafted(seconds * steps, steps)
        thrift.verified([(steps, min(accepted, steps))], PLAIN, 0)
    late = seen[100:]
    assert max(set(late), key=late.count) == most
    # Seldom, the longest is tried again.
    assert most == 4 or 1 <= late.count(4) <= 5


def engine_of(kind: str) -> Any:
    options = {"eagle3": {"path": folder(kind), "draft_tokens": 3}}
    engine = on_torch_alone(
        make_engine(target(), proposers=("eagle3",), proposer_options=options, max_num_seqs=4)
    )
    engine.controller.cost = CostModel([1, 64], [PLAIN, 1.1 * PLAIN], 64)
    # Times of a made-up machine: a step takes a tenth of a round.
    engine.controller.cost.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    account = engine.runner._account
    engine.runner._account = lambda outcome, steps, seconds: account(
        outcome, steps, {index: 1e-3 * steps[index] for index in seconds}
    )
    return engine


@pytest.mark.parametrize("kind", ["random", "skilled"])
def test_an_engine_lets_a_useless_drafter_sleep(kind: str) -> None:
    engine = engine_of(kind)
    calls, propose = 0, engine.proposers[0].propose

    def counted(slots: Any) -> Any:
        nonlocal calls
        calls += 1
        return propose(slots)

    engine.proposers[0].propose = counted
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    requests = run_jobs(engine, [Job((3, 5, 7), params), Job((9, 8, 4, 2), params, arrival=3)])
    rounds = engine.stats.rounds
    assert calls < rounds / 2 if kind == "random" else calls > 0.8 * rounds
    assert all(len(request.output) == 120 for request in requests)
    if kind == "random":
        assert engine.runner.thrift[0].naps >= 1
