"""Measuring rounds on an idle engine: they are full, and leave no trace."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from harness import Job, make_engine, random_weights, run_jobs, tiny_config, tiny_decoder
from surefoot.engine import recording, sampling_times, timing
from surefoot.engine.engine import Engine
from surefoot.engine.sampling_times import time_sampling_called
from surefoot.engine.timing import made_up_requests, time_keys
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams
from surefoot.speculation.costs import ExactCosts
from surefoot.speculation.decisions import LIKELIEST, NOTHING, SamplingCost
from surefoot.speculation.planner import Planner
from surefoot.speculation.round import Round
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size
from test_drafter_state import engine_of as drafter_engine


def ahead_engine(**options: object) -> Engine:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=3, **options)
    return engine


def long_decoder() -> Decoder:
    config = tiny_config(max_positions=4096)
    return Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32), 4096)


def contents(engine: Engine) -> dict[str, torch.Tensor]:
    estimators = dict(enumerate(engine.controller.estimators))
    parts = {
        "state": engine.state,
        "round": engine.round,
        "books": engine.round.books,
        "offers": engine.round.books.offers,
        "controller": engine.controller,
        **{f"estimator {index}": part for index, part in estimators.items()},
    }
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("rows", [4, 2048])
def test_what_keeping_up_takes_in_rounds_that_are_called(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose rounds are not recorded; texts may be shorter than what is timed."""
    options = {"max_num_seqs": 2, "kv_blocks": 20, "proposers": ("eagle3",)}
    engine = drafter_engine("native" if native_unavailable() is None else "torch", **options)
    round_, before = engine.round, {k: v.clone() for k, v in contents(engine).items()}
    chunks = []

    def timed(own: Round, size: Size, keys: int) -> float:
        own(size, keys)
        chunks.append(int(own.quota.max()))
        return 1.0 + 3e-6 * chunks[-1] * size.catches_up

    monkeypatch.setattr(recording, "time_round", timed)
    monkeypatch.setattr(round_.keeping_up, "_observes", False)
    size = Size(1, rows, 1, GREEDY, *NOTHING)
    timing.time_keeping_up(round_, engine.kv_blocks, size, partial(recording._time_called, round_))
    assert round_.keeping_up.row_seconds.mean == pytest.approx(3e-6)
    assert set(chunks) == {min(rows, timing._farthest(round_))} and len(chunks) >= 4
    for name, value in contents(engine).items():
        assert torch.equal(value, before[name]), name


def test_made_up_rounds_leave_no_trace() -> None:
    engine = ahead_engine()
    round_ = engine.round
    engine.controller.allowed.fill_(True)
    engine.controller.draft_limit.fill_(3)
    tensors = contents(engine)
    before = {name: value.clone() for name, value in tensors.items()}
    with made_up_requests(round_, engine.kv_blocks, 40) as set_batch:
        set_batch(4, 0)
        for _ in range(6):
            round_(Size(4, 16, 16, GREEDY, (0,), verifies=True))
        assert not torch.equal(tensors["estimator 0.all_trials"], before["estimator 0.all_trials"])
    after = contents(engine)
    for name, value in tensors.items():
        assert after[name] is value, f"{name} is another tensor now"
        assert torch.equal(value, before[name]), f"{name} changed"


def test_made_up_rounds_verify_every_draft_of_everybody() -> None:
    engine = ahead_engine()
    round_ = engine.round
    with made_up_requests(round_, engine.kv_blocks, 40) as set_batch:
        for rows, drafts in ((4, [0, 0, 0, 0]), (8, [1, 1, 1, 1]), (16, [3, 3, 3, 3])):
            set_batch(4, 0)
            round_(Size(4, rows, rows, GREEDY, (0,), verifies=rows > 4))
            assert round_.books.report[:4, 3].tolist() == drafts
            assert (round_.books.report[:4, 0] >= 1).all()
        set_batch(2, 0)
        round_(Size(4, 8, 8, GREEDY, (0,), verifies=True))
        assert (round_.books.report[:4, 0] >= 1).tolist() == [True, True, False, False]


def test_made_up_requests_read_blocks_of_their_own() -> None:
    engine = ahead_engine(kv_blocks=44)
    with made_up_requests(engine.round, engine.kv_blocks, 40):
        used = engine.state.block_tables[:4, :11].flatten().tolist()
        assert sorted(used) == list(range(1, 45))
    # Too small a pool is shared, and block 0 never used.
    with made_up_requests(engine.round, 8, 40):
        used = engine.state.block_tables[:4, :11].flatten().tolist()
        assert set(used) == set(range(1, 8))


def test_requests_after_made_up_ones_get_the_text_that_they_got_before() -> None:
    job = Job((5, 9, 5, 9, 5), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine = ahead_engine(draft_policy="fixed")
    [expected] = run_jobs(engine, [job])
    with made_up_requests(engine.round, engine.kv_blocks, 40) as set_batch:
        set_batch(3, 0)
        engine.round(Size(4, 16, 16, GREEDY, (0,), verifies=True))
    assert run_jobs(engine, [job])[0].output == expected.output


def test_made_up_requests_stay_within_the_longest_text() -> None:
    """There are rotations for so many positions only."""
    decoder = tiny_decoder()
    for longest in (3, 12, 40):
        engine = make_engine(
            decoder, True, max_num_seqs=2, max_draft_tokens=8, max_model_len=longest
        )
        round_, state = engine.round, engine.state
        with made_up_requests(round_, engine.kv_blocks, 1024) as set_batch:
            set_batch(2, 0)
            context = int(state.length[0])
            round_(Size(2, 18, 18, GREEDY, (0,), verifies=True))
            drafts = round_.books.report[:2, 3]
            assert 1 <= context <= max(1, longest * 3 // 4)
            assert (context + drafts <= longest).all()


def test_a_made_up_prompt_runs_to_its_end_beside_those_that_decode() -> None:
    engine = ahead_engine()
    round_ = engine.round
    with made_up_requests(round_, engine.kv_blocks, 40) as set_batch:
        set_batch(3, 20)
        round_(Size(4, 24, 4, GREEDY, (0,)))
        assert round_.books.report[:4, 0].tolist() == [0, 1, 1, 0]
        assert engine.state.computed[0] == 20


def test_a_made_up_chunk_has_a_prompt_before_it() -> None:
    engine = ahead_engine()
    round_ = engine.round
    with made_up_requests(round_, engine.kv_blocks, 40) as set_batch:
        set_batch(1, 8, 24)
        round_(Size(1, 8, 1, GREEDY, ()), 33)
        assert round_.books.report[:2, 0].tolist() == [0, 0]
        assert engine.state.computed[0] == 32


@pytest.mark.parametrize("longest, blocks", [(120, 64), (4096, 30)])
def test_what_keys_cost_is_not_measured_on_short_texts(longest: int, blocks: int) -> None:
    engine = make_engine(long_decoder(), max_model_len=longest, max_num_seqs=1)
    assert time_keys(engine.round, blocks, 1.0) == 0.0


def test_what_keys_cost_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that take 1 ms, and 2 us for each key that each row reads."""
    engine = make_engine(long_decoder(), max_num_seqs=1)
    seen, clock = [], itertools.count()

    def seconds(round_: Round, size: Size, keys: int) -> float:
        before = int(round_.state.computed[0])
        assert keys == before + size.rows + 1
        seen.append(before)
        disturbed = next(clock) % 4 == 3
        return 1e-3 + 2e-6 * before * size.rows + 1e-2 * disturbed

    monkeypatch.setattr(timing, "time_round", seconds)
    assert time_keys(engine.round, 2048, 10.0) == pytest.approx(2e-6)
    assert set(seen) == {0, 1024 - 16}


def test_what_drawing_tokens_adds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2 ms a round and 0.05 a row; nothing is left of it in the slots."""
    engine = make_engine(tiny_decoder(), max_num_seqs=2, max_draft_tokens=8)
    params = engine.state.params
    tables = params.temperature, params.top_k, params.top_p
    before = [table.clone() for table in tables]

    def seconds(round_: Round, size: Size, keys: int) -> float:
        drawn = size.kind != GREEDY
        assert bool((params.temperature > 0).all()), "requests that draw nothing cost nothing"
        assert bool((params.top_k == 20).all()) and bool((params.top_p < 1).all()), "as is usual"
        return 1e-3 * (1 + 0.1 * size.rows + drawn * (0.2 + 0.05 * size.samples))

    monkeypatch.setattr(sampling_times, "time_round", seconds)
    found = time_sampling_called(engine.round, 64, 10.0)
    assert set(found) == {DRAWN, ADJUSTED}
    for cost in found.values():
        assert cost == pytest.approx((2e-4, 5e-5))
        assert cost.of(9) == pytest.approx(6.5e-4)
    assert all(map(torch.equal, tables, before)), "as they were"
    assert set(time_sampling_called(engine.round, 64, 0.0).values()) == {LIKELIEST}


@pytest.mark.parametrize("prompt_rows", [0, 32])
def test_drawing_costs_what_it_costs_for_each_row_that_samples(prompt_rows: int) -> None:
    plain = ExactCosts([1, 64], [1e-3, 64e-3])
    drawn = ExactCosts([1, 64], [1e-3, 64e-3], None, SamplingCost(2e-4, 5e-5))
    for most in (0, 4):
        drafts, seconds = plain.table(2, prompt_rows, NOTHING, most, 10.0)
        more = drawn.table(2, prompt_rows, NOTHING, most, 10.0)[1] - seconds
        assert more == pytest.approx(2e-4 + 5e-5 * (2 + drafts))
    [believed] = drawn.table(2, prompt_rows, NOTHING, 0, 10.0)[1]
    for _ in range(50):
        drawn.observe(2, prompt_rows, NOTHING, 0, 10.0, believed)
    assert drawn.table(2, prompt_rows, NOTHING, 0, 10.0)[1] == pytest.approx([believed])


def test_costs_are_measured_within_the_longest_text() -> None:
    config = tiny_config()
    decoder = Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32), 20)
    engine = make_engine(decoder, max_model_len=20, max_draft_tokens=8, calibration_seconds=5)
    assert isinstance(engine.planner, Planner)
    drafts, seconds = engine.planner.costs.table(1, 0, ((), 0), 8, 10.0)
    assert len(drafts) and (seconds > 0).all()
