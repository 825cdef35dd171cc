"""How far drafters draft in rounds launched ahead, on a device whose times are made up."""

from __future__ import annotations

import random

import pytest
import torch

from harness import tiny_decoder
from surefoot.bench import synthetic
from surefoot.bench.sweep import Mode
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.pace import TRIAL_ROUNDS, Pace
from surefoot.speculation.thrift import FIRST_SLEEP

WIDTH = 3
STEP = {1: 0.155, 8: 0.17}
ROWS = {1: 3.4, 4: 3.4, 8: 3.45, 16: 3.55, 32: 4.2}


def seconds(spans: int, rows: int, steps: int | None) -> float:
    """A Qwen3-4B on an H100, roughly, in milliseconds: another row costs little up to 64."""
    known = sorted(ROWS)
    low = max(r for r in known if r <= rows)
    high = min((r for r in known if r >= rows), default=low)
    share = 0 if high == low else (rows - low) / (high - low)
    return ROWS[low] + share * (ROWS[high] - ROWS[low]) + (steps or 0) * STEP[spans] + spans / 100


def engine_with(rates: list[float], spans: int) -> Engine:
    config = EngineConfig(
        proposers=("eagle3=dummy",), max_draft_tokens=WIDTH, max_num_seqs=spans, block_size=4,
        kv_blocks=50 * spans, calibration_seconds=0.02,
    )  # fmt: skip
    engine = Engine(tiny_decoder(), config, True, synthetic.accept_at(rates))
    assert engine.pipeline is not None
    graphs = engine.pipeline.graphs
    graphs.costs = {
        (spans, rows, steps): seconds(spans, rows, steps) for rows, steps in graphs.variants(spans)
    }
    return engine


def simulate(engine: Engine, count: int, mode: Mode, tokens: int = 90) -> tuple[float, list[int]]:
    """Tokens a made-up second, and the steps of all rounds."""
    assert engine.pipeline is not None
    graphs, sizes = engine.pipeline.graphs, []
    launch = type(graphs).launch
    graphs.launch = lambda size: sizes.append(size) or launch(graphs, size)
    wish = SpeculationParams("auto")
    engine.controller.policy = "auto" if mode == "auto" else "fixed"
    if mode != "auto":
        wish = SpeculationParams("auto", int(mode)) if mode else SpeculationParams("off")
    chooser = random.Random(5)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    requests = [
        engine.make_request(f"{mode}-{i}", [chooser.randrange(2, 48)] * 9, params, wish)
        for i in range(count)
    ]
    for index, request in enumerate(requests):
        request.seed = index
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert all(len(request.output) == tokens for request in requests)
    time = sum(seconds(size.spans, size.rows, size.steps) for size in sizes if size.spans == count)
    return count * tokens / time, [size.steps or 0 for size in sizes]


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    ("rates", "floor"),
    [([0.75, 0.55, 0.4], 0.95), ([0.6, 0.1, 0.0], 0.9), ([0.02, 0.0, 0.0], 0.85)],
)
def test_auto_is_near_the_best_fixed_depth(count: int, rates: list[float], floor: float) -> None:
    """A short run, trials included."""
    engine = engine_with(rates, count)
    fixed = (3,) if rates[0] > 0.7 else (1,) if rates[0] > 0.5 else (0,)
    found = {mode: simulate(engine, count, mode) for mode in (*fixed, "auto")}
    best = found[fixed[0]][0]
    assert found["auto"][0] >= floor * best, {m: round(r, 2) for m, (r, _) in found.items()}


def offers(*chances: float, count: int = 8) -> torch.Tensor:
    return torch.tensor(chances).repeat(count, 1)


def run(pace: Pace, chances: torch.Tensor, rounds: int, step: float = 0.15) -> list[int]:
    """Steps of so many rounds that cost 3.4, each step ``step`` more."""
    steps, before = [], pace.longest
    for _ in range(rounds):
        now = pace.next(
            chances,
            3.4,
            lambda s: torch.full((8 * s + 1,), 3.4 + step * s),
            range(1, pace.longest + 1),
        )
        pace.saw(chances * (torch.arange(chances.shape[1]) < before), before)
        steps.append(now)
        before = now
    return steps


def test_it_finds_the_depth_that_pays() -> None:
    pace = Pace(4)
    steps = run(pace, offers(0.8, 0.3, 0.02, 0.001), 60)
    assert steps[: TRIAL_ROUNDS.start] == [4] * TRIAL_ROUNDS.start
    assert pace.steps == 2 and steps.count(2) > 40
    # It looks at the longest now and then.
    assert 4 in steps[12:]
    assert run(pace, offers(0.9, 0.85, 0.8, 0.75), 60)[-1] == 4


def test_a_drafter_that_does_not_pay_sleeps_longer_and_longer() -> None:
    pace = Pace(3)
    steps = run(pace, offers(0.05, 0.001, 1e-5), 4 * FIRST_SLEEP)
    assert pace.naps >= 2
    awake = [index for index, drafts in enumerate(steps) if drafts]
    assert len(awake) < 3 * 10
    assert awake[-1] - awake[0] > FIRST_SLEEP
    pace.meet()
    assert pace.sleeping <= FIRST_SLEEP


def test_one_request_that_falls_behind_does_not_put_a_drafter_to_sleep_at_once() -> None:
    pace = Pace(2)
    chances = offers(0.8, 0.6)
    chances[3] = torch.tensor([0.01, 0.001])
    assert run(pace, chances, 12, step=0.5) == [2] * 12 and not pace.sleeping
    assert run(pace, chances, 40, step=0.5)[-1] == 0


def test_depths_that_were_not_drafted_are_guessed_from_what_was_seen() -> None:
    pace = Pace(3)
    for _ in range(30):
        pace.saw(offers(0.8, 0.4, 0.1), 3)
    known = pace.expected(offers(0.5, 0.0, 0.0), 3)
    torch.testing.assert_close(known, offers(0.5, 0.25, 0.0625))
    assert torch.equal(pace.expected(offers(0.5, 0.2, 0.1), 1), offers(0.5))
