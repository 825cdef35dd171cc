"""Beliefs about what rounds cost follow what happens, whatever they were."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from surefoot.engine import recording
from surefoot.engine.recording import MOST_ROWS_PER_KEY, _rows_per_key
from surefoot.speculation.beliefs import Beliefs, in_line
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.measured_times import RecordedSize, at_context
from surefoot.speculation.recorded_costs import PromptRounds, RecordedCosts

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
LOOK = ((0,), 0)


def true_seconds(rows: int) -> float:
    return 5e-3 * (1 + 0.06 * (rows - 1))


def exact(factor: float = 1.0) -> ExactCosts:
    proposing = {0: Proposing(1e-4), 1: Proposing(5e-4, 0.0, longest=3)}
    return ExactCosts(ROWS, [factor * true_seconds(rows) for rows in ROWS], proposing)


def ratio(costs: ExactCosts, drafts: int) -> float:
    _, seconds = costs.table(1, 0, NOTHING, drafts, 100.0)
    return float(seconds[-1] / seconds[0])


def test_a_drafter_pays_for_the_call_and_for_its_steps() -> None:
    parts = {0: Proposing(5e-4, 1e-5, longest=3, call_seconds=1e-3)}
    costs = ExactCosts([1], [5e-3], parts)

    def seconds(requests: int, steps: int) -> float:
        action = ((0,), steps) if steps else NOTHING
        return float(costs.table(requests, 0, action, 0, 100.0)[1][0])

    for requests, steps in ((1, 1), (1, 3), (4, 2)):
        added = seconds(requests, steps) - seconds(requests, 0)
        assert math.isclose(added, 1e-3 + steps * (5e-4 + 1e-5 * requests), rel_tol=1e-6)


# --- beliefs --------------------------------------------------------------------------------------


def one(noise: float = 0.05) -> Beliefs:
    return Beliefs(np.zeros(1), np.eye(1), np.full(1, 1e-4), noise)


def observe(beliefs: Beliefs, value: float, times: int) -> None:
    for _ in range(times):
        beliefs.observe(np.ones(1), value - float(beliefs.mean[0]))


def test_a_single_outlier_moves_a_firm_belief_little() -> None:
    beliefs = one()
    observe(beliefs, 1.0, 100)
    observe(beliefs, 8.0, 1)
    assert abs(beliefs.mean[0] - 1.0) < 0.1


def test_a_belief_that_is_contradicted_again_and_again_moves_fast() -> None:
    beliefs = one()
    observe(beliefs, 1.0, 100)
    observe(beliefs, 4.0, 40)
    assert abs(beliefs.mean[0] - 4.0) < 0.1


def test_noise_is_learnt() -> None:
    rng, beliefs = np.random.default_rng(0), one(0.2)
    for _ in range(2000):
        beliefs.observe(np.ones(1), rng.normal(1.0, 0.02) - float(beliefs.mean[0]))
    assert 0.01 < beliefs.noise < 0.04


def test_variances_stay_above_zero_whatever_is_measured() -> None:
    rng = np.random.default_rng(1)
    beliefs = Beliefs(np.zeros(3), np.eye(3), np.full(3, 1e-5), 0.01)
    for at in range(3000):
        weights = rng.random(3) * (rng.random(3) < 0.5)
        beliefs.observe(weights, float(rng.normal(0, 10.0 if at % 500 < 60 else 0.01)))
        assert np.linalg.eigvalsh(beliefs.covariance)[0] > -1e-12
        assert np.isfinite(beliefs.mean).all()


@pytest.mark.parametrize(("at", "factor"), [(0, 1e-3), (0, 1e3), (3, 1e3), (3, 1e-3), (9, 1e3)])
def test_one_wrong_measurement_is_put_in_line(at: int, factor: float) -> None:
    right = [true_seconds(rows) for rows in ROWS]
    wrong = list(right)
    wrong[at] *= factor
    found = in_line(ROWS, wrong)
    assert np.all(np.abs(np.log(found / np.array(right))) < 1.0)
    assert np.allclose(np.delete(found, at), np.delete(right, at))


# --- rows as they are needed ----------------------------------------------------------------------


def test_measured_times_are_believed_between_and_beyond() -> None:
    costs = exact()
    drafts, seconds = costs.table(1, 0, NOTHING, 90, 100.0)
    want = [true_seconds(1 + int(count)) for count in drafts]
    assert np.allclose(seconds, want, rtol=1e-3)
    _, prompts = costs.table(1, 15, NOTHING, 0, 100.0)
    assert prompts[0] == pytest.approx(true_seconds(16))


@pytest.mark.parametrize("factor", [3.0, 10.0, 0.1])
def test_quiet_rounds_of_one_row_set_all_rows_right(factor: float) -> None:
    costs = exact(factor)
    for _ in range(300):
        costs.observe(1, 0, NOTHING, 0, 100.0, true_seconds(1))
    for count in (0, 1, 7, 31):
        _, seconds = costs.table(1, 0, NOTHING, count, 100.0)
        assert seconds[-1] == pytest.approx(true_seconds(1 + count), rel=0.1)


def test_one_number_of_rows_tells_of_its_neighbours() -> None:
    wrong = [true_seconds(rows) * (1.4 if rows > 1 else 1.0) for rows in ROWS]
    costs, right = ExactCosts(ROWS, wrong), true_seconds(6) / true_seconds(1)
    assert ratio(costs, 5) == pytest.approx(1.4 * right, rel=0.01)
    for _ in range(20):
        costs.observe(1, 0, NOTHING, 0, 100.0, true_seconds(1))
        costs.observe(1, 0, NOTHING, 3, 100.0, true_seconds(4))
    assert ratio(costs, 3) == pytest.approx(true_seconds(4) / true_seconds(1), rel=0.1)
    assert ratio(costs, 5) == pytest.approx(right, rel=0.1)


def test_a_proposer_is_charged_what_it_takes() -> None:
    costs = exact()
    for _ in range(400):
        costs.observe(1, 0, NOTHING, 0, 100.0, true_seconds(1))
        costs.observe(1, 0, LOOK, 0, 100.0, true_seconds(1) + 1e-3)
        costs.observe(1, 0, ((1,), 2), 0, 100.0, true_seconds(1) + 4e-3)
    plain = costs.table(1, 0, NOTHING, 0, 100.0)[1][0]
    assert costs.table(1, 0, LOOK, 0, 100.0)[1][0] - plain == pytest.approx(1e-3, rel=0.2)
    three = costs.table(1, 0, ((1,), 3), 0, 100.0)[1][0] - plain
    assert three == pytest.approx(6e-3, rel=0.2)


@pytest.mark.parametrize("requests", [1, 8])
def test_what_proposers_take_comes_on_top_of_verified_rows(requests: int) -> None:
    proposing = {0: Proposing(1e-4, 2e-6), 1: Proposing(5e-4, 1e-5, longest=3)}
    costs = ExactCosts(ROWS, [true_seconds(rows) for rows in ROWS], proposing)
    _, plain = costs.table(requests, 0, NOTHING, 12, 100.0)
    _, both = costs.table(requests, 0, ((0, 1), 2), 12, 100.0)
    added = 1e-4 + 2e-6 * requests + 2 * (5e-4 + 1e-5 * requests)
    assert both - plain == pytest.approx(np.full(13, added))


@pytest.mark.parametrize("seed", range(3))
def test_what_a_proposer_takes_stays_known_while_the_machine_is_busy_now_and_then(
    seed: int,
) -> None:
    """No measurement tells what all numbers of rows have in common from the machine as such."""
    chance = np.random.default_rng(seed)
    rows = [1, 2, 4, 8, 16, 32]
    costs = ExactCosts(rows, [5e-3 * (1 + 0.06 * r) for r in rows], {0: Proposing(3e-5)})

    def proposing() -> float:
        seconds = [float(costs.table(8, 0, a, 0, 100.0)[1][0]) for a in (((0,), 0), ((), 0))]
        return seconds[0] / seconds[1] - 1.0

    for turn in range(25):
        busy = 4.0 if turn % 2 else 1.0
        for number in range(300):
            action = ((0,), 0) if number % 40 == 0 else ((), 0)
            seconds = 5e-3 * (1 + 0.06 * 8) + 3e-5 * bool(action[0])
            noise = chance.normal(0, 0.5 if busy > 1 else 0.02)
            costs.observe(8, 0, action, 0, 100.0, seconds * busy * math.exp(noise))
        assert abs(proposing()) < 0.12
    assert abs(float(costs.beliefs.mean[0])) < 1.0


def test_actions_are_all_sets_of_proposers_at_all_depths() -> None:
    found = exact().actions(4)
    assert found[0] == NOTHING and len(found) == len(set(found)) == 8
    assert ((0, 1), 3) in found and ((0,), 0) in found and ((1,), 0) not in found


def test_rows_that_seemed_dear_and_are_never_run_are_tried_again() -> None:
    costs = exact()
    for rows, times in ((64, 3.0), (1, 1.0)):
        for _ in range(40):
            costs.observe(1, 0, NOTHING, rows - 1, 100.0, times * true_seconds(rows))
    right = true_seconds(64) / true_seconds(1)
    assert ratio(costs, 63) > 1.8 * right
    for _ in range(1000):
        costs.observe(1, 0, NOTHING, 0, 100.0, true_seconds(1))
    assert ratio(costs, 63) < 1.3 * right


# --- recorded sizes -------------------------------------------------------------------------------

DRAFT = ((0,), 2)


def size_seconds(size: RecordedSize, context: int = 128) -> float:
    return 2e-3 + 2e-5 * size.rows + 1e-9 * context * size.rows + 2e-4 * size.action[1]


def sizes() -> list[RecordedSize]:
    found = []
    for spans in (1, 2, 4, 8, 16):
        found.append(RecordedSize(spans, spans, spans, NOTHING))
        found += [RecordedSize(spans, k * spans, k * spans, DRAFT) for k in (1, 2, 3, 5)]
    return found


def recorded(
    wrong: dict[RecordedSize, float] | None = None, prompts: dict[int, PromptRounds] | None = None
) -> RecordedCosts:
    factor = wrong or {}
    return RecordedCosts(
        {
            size: [(c, size_seconds(size, c) * factor.get(size, 1.0)) for c in (128, 1024)]
            for size in sizes()
        },
        prompts,
    )


def test_stairs_are_those_of_the_real_number_of_requests() -> None:
    drafts, seconds = recorded().table(5, 0, DRAFT, 40, 128.0)
    assert drafts.tolist() == [0, 11, 19, 35]
    assert seconds == pytest.approx([size_seconds(s) for s in sizes() if s.spans == 8][1:])
    assert recorded().table(5, 0, DRAFT, 12, 128.0)[0].tolist() == [0, 11, 12]
    assert recorded().table(5, 0, NOTHING, 12, 128.0)[0].tolist() == [0]


def test_beside_prompts_there_are_drafts_where_somebody_proposes() -> None:
    exactly = ExactCosts([1, 64], [1e-3, 2e-3], {0: Proposing(1e-4), 1: Proposing(1e-4)})
    costs = recorded(prompts={8: PromptRounds(exactly, samples=8)})
    assert costs.table(5, 30, LOOK, 2, 128.0)[0].tolist() == [0, 1, 2]
    assert costs.table(5, 30, NOTHING, 2, 128.0)[0].tolist() == [0]
    assert costs.table(5, 30, LOOK, 9, 128.0)[0].tolist() == [0, 1, 2, 3], "rows that are sampled"
    assert costs.table(9, 30, LOOK, 9, 128.0)[0].tolist() == [0]


def test_the_size_that_is_launched_holds_what_was_decided() -> None:
    costs = recorded()
    assert costs.size_for(5, DRAFT, 12, 128.0) == RecordedSize(8, 24, 24, DRAFT)
    assert costs.size_for(5, DRAFT, 0, 128.0) == RecordedSize(8, 8, 8, DRAFT)
    assert costs.size_for(5, DRAFT, 99, 128.0) == RecordedSize(8, 40, 40, DRAFT), "all it has"
    assert costs.size_for(5, NOTHING, 1, 128.0) is None
    assert costs.size_for(17, NOTHING, 0, 128.0) is None


def test_prompts_take_rows_of_their_own() -> None:
    size = RecordedSize(4, 100, 100, DRAFT)
    depths = {4: 3, 9: 2}
    prompts = {n: PromptRounds(exact(), (((0, 1), depths[n]), NOTHING)) for n in depths}
    costs = RecordedCosts({size: [(128, 5e-3)]}, prompts)
    _, seconds = costs.table(3, 61, NOTHING, 0, 128.0)
    assert seconds[0] == pytest.approx(true_seconds(64), rel=0.01)
    costs.observe(3, 61, NOTHING, 0, 128.0, 1.0)
    assert costs.table(3, 0, DRAFT, 97, 128.0)[1][-1] == pytest.approx(5e-3)
    assert costs.with_prompts(3, NOTHING) == NOTHING
    assert costs.with_prompts(3, ((1,), 2)) == ((0, 1), 3)
    assert costs.with_prompts(5, ((1,), 3)) == costs.with_prompts(12, ((1,), 3)) == ((0, 1), 2)


def test_rounds_with_prompts_leave_the_times_of_others_alone() -> None:
    """Even where a recorded size would hold all their rows."""
    times = {size: [(128, size_seconds(size))] for size in sizes()}
    costs, prompts = RecordedCosts(times, {16: PromptRounds(exact())}), exact()
    _, before = costs.table(4, 0, DRAFT, 16, 128.0)
    for _ in range(50):
        costs.observe(4, 8, DRAFT, 4, 128.0, 1.0)
        prompts.observe(4, 8, DRAFT, 4, 128.0, 1.0)
    assert costs.table(4, 0, DRAFT, 16, 128.0)[1].tolist() == before.tolist()
    want = prompts.table(4, 8, DRAFT, 4, 128.0)[1].tolist()
    assert costs.table(4, 8, DRAFT, 4, 128.0)[1].tolist() == want


def test_rounds_in_which_drafters_step_are_told_apart() -> None:
    """What makes these dearer holds for numbers of rows that were never run, and for no others."""
    look, deep = ((0,), 0), ((1,), 2)
    every = [RecordedSize(8, rows, rows, action) for action in (look, deep) for rows in (8, 16, 40)]
    every.append(RecordedSize(8, 8, 8, NOTHING))
    costs = RecordedCosts({size: [(128, size_seconds(size))] for size in every})

    def dearer(action: Action) -> float:
        size = RecordedSize(8, 40, 40, action)
        return float(costs.table(8, 0, action, 32, 128.0)[1][-1]) / size_seconds(size)

    for _ in range(200):
        costs.observe(8, 0, NOTHING, 0, 128.0, size_seconds(every[-1]))
        for action, times in ((look, 1.0), (deep, 1.15)):
            size = RecordedSize(8, 16, 16, action)
            costs.observe(8, 0, action, 8, 128.0, times * size_seconds(size))
    assert dearer(deep) > 1.1 and dearer(look) < 1.04


def test_costs_follow_the_length_of_texts() -> None:
    costs, size = recorded(), RecordedSize(8, 40, 40, DRAFT)
    for context in (128, 512, 1024):
        seconds = costs.table(8, 0, DRAFT, 32, context)[1][-1]
        assert seconds == pytest.approx(size_seconds(size, context), rel=0.01)
    assert at_context(np.array([128, 1024]), np.array([[2.0, 1.0]]), 4096.0) == [1.0]
    assert at_context(np.array([128, 1024]), np.array([[1.0, 8.0]]), 64.0) == [0.5]


@pytest.mark.parametrize("factor", [1000.0, 0.001])
@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_one_poisoned_size_is_put_in_line(place: int, factor: float) -> None:
    size = [size for size in sizes() if size.spans == 8][place]
    costs = recorded({size: factor})
    drafts = size.samples - 8
    believed = costs.table(8, 0, size.action, drafts, 128.0)[1][-1]
    assert 0.5 < believed / size_seconds(size) < 2.0


def test_a_table_that_is_put_right_takes_with_it_what_was_learnt_against_it() -> None:
    costs, spoilt = recorded(), RecordedSize(8, 24, 24, DRAFT)
    place, shape = costs.sizes.index(spoilt), slice(1, -2)
    for factor, kept in ((1.0, True), (1000.0, False), (1.0, True)):
        costs.measured.seconds[place] *= factor
        costs.beliefs.mean[:], costs._own[:] = 0.1, 0.2
        costs.beliefs.mean[shape] = 0.0
        costs._review(place)
        assert costs.measured.seconds[place, 0] == pytest.approx(size_seconds(spoilt), rel=0.1)
        assert (costs.beliefs.mean[0] == 0.1) == kept == bool(costs._own.all())


def test_events_set_all_sizes_right() -> None:
    costs = recorded(dict.fromkeys(sizes(), 10.0))
    for _ in range(200):
        costs.observe(8, 0, NOTHING, 0, 128.0, size_seconds(RecordedSize(8, 8, 8, NOTHING)))
    for size in sizes():
        believed = costs.table(size.spans, 0, size.action, size.samples - size.spans, 128.0)[1][-1]
        assert believed == pytest.approx(size_seconds(size), rel=0.15)


def test_sizes_that_differ_each_in_its_own_way_are_learnt() -> None:
    rng = np.random.default_rng(2)
    costs, odd = recorded(), {size: float(rng.uniform(0.93, 1.07)) for size in sizes()}
    for _ in range(80):
        for size in sizes():
            wanted = size.spans, 0, size.action, size.samples - size.spans, 128.0
            ran = costs.size_for(size.spans, *wanted[2:])
            assert ran is not None
            costs.observe(*wanted, size_seconds(ran) * odd[ran])
    for size in sizes():
        wanted = size.spans, 0, size.action, size.samples - size.spans, 128.0
        ran = costs.size_for(size.spans, *wanted[2:])
        assert ran is not None
        _, seconds = costs.table(*wanted)
        assert seconds[-1] == pytest.approx(size_seconds(ran) * odd[ran], rel=0.015)


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_that_wanders_is_not_put_down_to_sizes(seed: int) -> None:
    """Behind prompts a chip is slower for some rounds, and a little slower or faster always. Sizes
    that are seldom run, or were not for long, keep what they take against the others."""
    rng, costs = np.random.default_rng(seed), recorded()
    odd = {size: float(rng.uniform(0.95, 1.05)) for size in sizes()}
    worst = 0.0
    for turn in range(40):
        spans = 2 if turn % 8 > 4 else 16
        wander = 0.0
        for round_ in range(60):
            wander = 0.95 * wander + rng.normal(0.0, 0.01)
            clock = math.exp(wander + 0.12 * math.exp(-round_ / 6) + rng.normal(0.0, 0.003))
            drafts = 0 if turn % 2 else spans
            # A crowd that leaves, and seldom a trial.
            requests = max(1, spans - max(0, round_ - 52) * spans // 8)
            drafts = 4 * spans if round_ == 30 and turn % 3 == 0 else min(drafts, requests)
            action = DRAFT if drafts else NOTHING
            ran = costs.size_for(requests, action, drafts, 128.0)
            assert ran is not None
            costs.observe(requests, 0, action, drafts, 128.0, clock * odd[ran] * size_seconds(ran))
        for requests in (2, 16):
            believed = [
                costs.table(requests, 0, action, drafts * requests, 128.0)[1][-1]
                / size_seconds(
                    RecordedSize(requests, rows := (1 + drafts) * requests, rows, action)
                )
                for action, drafts in ((NOTHING, 0), (DRAFT, 0), (DRAFT, 1), (DRAFT, 4))
            ]
            worst = max(worst, float(np.ptp(np.log(believed))))
    assert worst < 0.2


def test_a_percent_is_no_surprise_however_even_rounds_were() -> None:
    costs, plain = recorded(), RecordedSize(8, 8, 8, NOTHING)
    for _ in range(500):
        costs.observe(8, 0, NOTHING, 0, 128.0, size_seconds(plain))
    assert 0.009 < costs.noise < 0.02


@pytest.mark.parametrize("wrong", [-1.0, 1.0])
def test_sizes_that_seem_cheap_or_dear_and_are_not_run_go_back_to_what_was_measured(
    wrong: float,
) -> None:
    costs, plain = recorded(), RecordedSize(2, 2, 2, NOTHING)
    costs.beliefs.mean[1 + 4 : 1 + 8] += wrong
    for _ in range(600):
        costs.observe(2, 0, NOTHING, 0, 128.0, size_seconds(plain))
    for size in sizes():
        if size.rows >= 32:
            drafts = size.rows - size.spans
            believed = costs.table(size.spans, 0, size.action, drafts, 128.0)[1][-1]
            assert believed == pytest.approx(size_seconds(size), rel=0.15)


@pytest.mark.parametrize("still", [False, True])
def test_a_size_that_seemed_dear_is_tried_again_and_believed(still: bool) -> None:
    costs, plain = recorded(), RecordedSize(8, 8, 8, NOTHING)
    stairs = {drafts: RecordedSize(8, 8 + drafts, 8 + drafts, DRAFT) for drafts in (8, 16, 32)}

    def run(drafts: int, times: float) -> None:
        costs.observe(8, 0, DRAFT, drafts, 128.0, times * size_seconds(stairs[drafts]))

    def believed() -> float:
        return float(costs.table(8, 0, DRAFT, 32, 128.0)[1][-1] / size_seconds(stairs[32]))

    for _ in range(100):
        costs.observe(8, 0, NOTHING, 0, 128.0, size_seconds(plain))
        for drafts in stairs:
            run(drafts, 2.0 if drafts == 32 else 1.0)
    dear = believed()
    assert dear > 1.7
    for _ in range(1000):
        costs.observe(8, 0, NOTHING, 0, 128.0, size_seconds(plain))
    forgotten = believed()
    assert forgotten < 1.0 + 0.6 * (dear - 1.0)
    found = dear if still else forgotten
    run(32, found)
    assert believed() == pytest.approx(found, rel=0.05)


def test_what_the_least_part_cannot_explain_the_others_do() -> None:
    """The first cannot be smaller, and was believed to be larger where the second is smaller. Seen
    on a GPU: what drafts took the host was at its least, and the sum of all parts stayed at twice
    what rounds took."""
    covariance = np.array([[1.0, -0.99], [-0.99, 1.0]])
    beliefs = Beliefs(np.array([-0.98, 1.0]), covariance, np.zeros(2), 0.1, parts=slice(None))
    off = -0.5
    for _ in range(3):
        before = beliefs.mean.mean()
        beliefs.observe(np.array([0.5, 0.5]), off)
        off += before - beliefs.mean.mean()
    assert off == pytest.approx(0.0, abs=0.05)
    # What is known of it is as uncertain as before: it may be more again.
    assert np.linalg.eigvalsh(beliefs.covariance).min() >= 0.0 and beliefs.covariance[0, 0] >= 1.0


# --- the host -------------------------------------------------------------------------------------


def host_seconds(requests: int, drafting: int, ends: int) -> float:
    return 3e-4 + 2e-6 * requests + 6e-6 * drafting + 2e-5 * ends


def samples() -> list[HostSample]:
    return [
        HostSample(b, d, e, host_seconds(b, d, e), d > 0)
        for b in (1, 64, 512)
        for d in (0, b)
        for e in (0, 1)
    ]


def test_samples_tell_the_parts_of_the_host_apart() -> None:
    costs = HostCosts(samples())
    for requests, drafting in ((1, 0), (512, 0), (512, 256), (64, 64)):
        want = host_seconds(requests, drafting, 0)
        assert costs.seconds(requests, drafting, drafting > 0) == pytest.approx(want, rel=0.15)


def test_the_average_counts_where_some_rounds_take_the_host_much_longer() -> None:
    """Rounds wait for all of them. In one of eight, those that propose decide, too."""
    believed, took = np.zeros(2), np.zeros(2)
    for seed in range(4):
        costs, chance = HostCosts(samples()), np.random.default_rng(seed)
        for number in range(2400):
            proposing = number // 16 % 2
            seconds = host_seconds(64, 64 * proposing, 0) * math.exp(chance.normal(0, 0.4))
            seconds += 1e-3 * (proposing and number % 8 == 0)
            if number >= 400:
                believed[proposing] += costs.seconds(64, 64 * proposing, bool(proposing))
                took[proposing] += seconds
            costs.observe(HostSample(64, 64 * proposing, 0, seconds, bool(proposing)))
    assert believed == pytest.approx(took, rel=0.05)


def test_what_deciding_takes_is_not_expected_of_rounds_whose_decision_holds() -> None:
    """Where drafting is only tried, all of its rounds are decided anew; else one of eight is."""
    costs, chance = HostCosts(samples()), np.random.default_rng(0)
    for number in range(2000):
        decided = number % 40 < 2
        seconds = host_seconds(128, 128 * decided, 0) + 1e-3 * decided
        seconds *= math.exp(chance.normal(0, 0.2))
        costs.observe(HostSample(128, 128 * decided, 0, seconds, decided, decided=decided))
    want = host_seconds(128, 128, 0)
    assert costs.seconds(128, 128, True, decided=1.0) == pytest.approx(want + 1e-3, rel=0.2)
    assert costs.seconds(128, 128, True, decided=1 / 8) == pytest.approx(want + 1.25e-4, rel=0.25)


@pytest.mark.parametrize("seed", range(4))
def test_crowds_that_come_and_go_are_believed_to_take_what_they_take(seed: int) -> None:
    """Seen on a GPU: after some crowds, all of which drafted, the host was believed to need twice
    its time, so that more drafts than pay seemed to cost nothing."""
    costs, chance = HostCosts(), np.random.default_rng(seed)

    def run(requests: int, decided: bool) -> float:
        seconds = (2.2e-4 + 4.4e-6 * requests + 1e-3 * decided) * math.exp(chance.normal(0, 0.2))
        costs.observe(HostSample(requests, requests, 0, seconds, True, decided=decided))
        return seconds

    for _ in range(8):
        took = [run(128, number < 8 or number % 8 == 0) for number in range(120)]
        believed = costs.seconds(128, 128, True, decided=1 / 8)
        assert believed == pytest.approx(np.mean(took[8:]), rel=0.15)
        left = 128
        while left > 1:
            left = left * 9 // 10
            run(left, True)


def test_rounds_of_one_request_do_not_tell_what_many_that_draft_cost() -> None:
    costs, noise = HostCosts(), np.random.default_rng(0)
    for drafting, rounds in ((1, 100), (0, 250), (1, 100)):
        for _ in range(rounds):
            seconds = (4e-4 + 3e-4 * drafting) * float(np.exp(noise.normal(0, 0.3)))
            costs.observe(HostSample(1, drafting, 0, seconds, drafting > 0))
    assert costs.seconds(1, 1, True) == pytest.approx(7e-4, rel=0.2)
    assert costs.seconds(64, 64, True) < 2e-3


def test_texts_that_end_together_do_not_make_the_next_ones_rounds_look_dear() -> None:
    """Of 256 rounds each, of 32 requests: in the last thirty they end, at 0.2 ms each."""

    def seconds(requests: int, ends: int) -> float:
        return 3e-4 + 1e-5 * requests + 2e-4 * ends

    many = [HostSample(b, 0, e, seconds(b, e), False) for b in (1, 8, 32) for e in (0, 1, 4)]
    costs = HostCosts(many)
    for _ in range(8):
        assert costs.seconds(32, 0, False) == pytest.approx(seconds(32, 0), rel=0.12)
        for _ in range(226):
            costs.observe(HostSample(32, 0, 0, seconds(32, 0), False))
        for left in range(31, 0, -1):
            costs.observe(HostSample(left, 0, 1, seconds(left, 1), False))


@pytest.mark.parametrize("seed", range(10))
def test_plain_rounds_that_turn_out_quick_do_not_make_others_look_dear(seed: int) -> None:
    """Seen on a GPU: everybody drafts, the crowd ends, and others come who do not. Drafting rounds
    were then believed to take fifty times as long, and nobody drafted any more."""
    costs, chance = HostCosts(), np.random.default_rng(seed)
    for requests, drafting, ends, seconds, rounds in (
        (32, 32, 0.0, 1.2e-3, 10), (32, 32, 0.0, 8e-4, 75), (24, 24, 1.5, 1.2e-3, 20),
        (32, 0, 0.0, 2.7e-4, 512),
    ):  # fmt: skip
        for _ in range(rounds):
            ended = int(chance.poisson(ends))
            took = (seconds + 8e-5 * ended) * math.exp(chance.normal(0, 0.2))
            costs.observe(HostSample(requests, drafting, ended, took, drafting > 0))
            assert costs.seconds(32, 32, True) < 3e-3
    assert costs.seconds(32, 0, False) == pytest.approx(2.7e-4, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_rounds_without_proposers_that_turn_out_quick_do_not_make_others_look_dear(
    seed: int,
) -> None:
    costs = ExactCosts([1, 8, 64], [1e-3, 1.2e-3, 2e-3], {0: Proposing(1e-4)})
    chance = np.random.default_rng(seed)
    for action, seconds, rounds in ((LOOK, 1.3e-3, 300), (NOTHING, 0.5e-3, 500)):
        for _ in range(rounds):
            costs.observe(8, 0, action, 0, 128.0, seconds * math.exp(chance.normal(0, 0.3)))
            assert costs.table(8, 0, LOOK, 0, 128.0)[1][0] < 3.5e-3
    assert costs.table(8, 0, NOTHING, 0, 128.0)[1][0] == pytest.approx(0.5e-3, rel=0.2)


def test_no_part_of_a_round_takes_less_than_nothing() -> None:
    """Rounds that seem to be quicker with proposers than without, and with more requests."""
    host, costs = HostCosts(), ExactCosts([1, 8, 64], [1e-3, 1.2e-3, 2e-3], {0: Proposing(1e-4)})
    for _ in range(300):
        for requests, seconds in ((1, 8e-4), (32, 2e-4)):
            host.observe(HostSample(requests, 0, 0, seconds, False))
            host.observe(HostSample(requests, requests, 0, seconds / 2, True))
        costs.observe(8, 0, NOTHING, 0, 128.0, 1.2e-3)
        costs.observe(8, 0, LOOK, 0, 128.0, 0.8e-3)
    assert 0.0 < host.seconds(1, 0, False) < host.seconds(256, 0, False)
    assert host.seconds(256, 0, False) < host.seconds(256, 256, True)
    plain, looking = (costs.table(8, 0, action, 0, 128.0)[1][0] for action in (NOTHING, LOOK))
    assert 0.0 < plain < looking


def test_a_few_late_rounds_are_not_another_machine() -> None:
    """A crowd of texts ends: what was learnt of rounds that did not run meanwhile stays."""
    costs = HostCosts(samples())

    def drafting() -> float:
        return costs.seconds(64, 64, True) - costs.seconds(64, 0, False)

    before = drafting()
    for _ in range(20):
        costs.observe(HostSample(64, 0, 0, 3.5 * host_seconds(64, 0, 0), False))
    assert drafting() == pytest.approx(before, rel=0.1)


def test_what_prompts_cost_the_host_is_told_apart() -> None:
    costs, chance = HostCosts(samples()), np.random.default_rng(0)
    for _ in range(400):
        prompts = int(chance.poisson(0.7))
        seconds = (host_seconds(64, 64, 0) + 8e-4 * prompts) * math.exp(chance.normal(0, 0.1))
        costs.observe(HostSample(64, 64, 0, seconds, True, prompts))
    alone = costs.seconds(64, 64, True)
    assert alone == pytest.approx(host_seconds(64, 64, 0), rel=0.1)
    assert costs.seconds(64, 64, True, 2) - alone == pytest.approx(16e-4, rel=0.15)


def test_prompts_that_come_together_cost_the_host_little_more_than_one() -> None:
    """Most of what is seen beside single prompts is for that there are any."""
    costs, chance = HostCosts(samples()), np.random.default_rng(0)
    for number in range(600):
        count = number % 3
        seconds = (3e-4 + 5e-5 + (2.5e-3 + 6e-5 * count) * bool(count)) * chance.normal(1, 0.1)
        costs.observe(HostSample(32, 0, 0, seconds, False, count))
    some, plain = costs.seconds(32, 0, False, 2), costs.seconds(32, 0, False)
    assert 2e-3 < some - plain < 3.2e-3
    assert costs.seconds(32, 0, False, 120) < 3 * some


def test_a_crowd_of_prompts_is_not_another_machine() -> None:
    """Round after round lets somebody in, and takes the host ten times as long."""
    costs = HostCosts(samples())
    drafting = costs.seconds(64, 64, True) - costs.seconds(64, 0, False)
    for _ in range(200):
        costs.observe(HostSample(64, 0, 0, 10 * host_seconds(64, 0, 0), False, 4))
    assert costs.seconds(64, 0, False) < 1.5 * host_seconds(64, 0, 0)
    now = costs.seconds(64, 64, True) - costs.seconds(64, 0, False)
    assert now == pytest.approx(drafting, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_what_proposing_was_once_believed_to_cost_does_not_last(seed: int) -> None:
    """A proposer took the host 2 ms for a while; now it takes none of that, and is tried seldom."""
    costs, chance = HostCosts(samples()), np.random.default_rng(seed)

    def run(rounds: int, proposing: bool, more: float = 0.0) -> None:
        for _ in range(rounds):
            seconds = (host_seconds(1, proposing, 0) + more) * math.exp(chance.normal(0, 0.2))
            costs.observe(HostSample(1, proposing, 0, seconds, proposing))

    for _ in range(400):
        run(1, True, 2e-3)
        run(1, False)
    assert costs.seconds(1, 1, True) > 1.4e-3
    run(300, False)
    assert costs.seconds(1, 1, True) > 1.4e-3
    run(2, True)
    assert costs.seconds(1, 1, True) < 1.5 * host_seconds(1, 1, 0)
    assert costs.seconds(1, 0, False) == pytest.approx(host_seconds(1, 0, 0), rel=0.2)


@pytest.mark.parametrize("seed", range(4))
def test_a_single_quick_round_does_not_tell_what_proposing_costs(seed: int) -> None:
    costs, chance = HostCosts(samples()), np.random.default_rng(seed)
    believed = costs.seconds(64, 64, True)
    for _ in range(20):
        for _ in range(20):
            seconds = believed * math.exp(chance.normal(0, 0.1))
            costs.observe(HostSample(64, 64, 0, seconds, True))
        costs.observe(HostSample(64, 64, 0, 0.3 * believed, True))
        assert costs.seconds(64, 64, True) > 0.7 * believed


@pytest.mark.parametrize("seed", range(4))
def test_nor_does_one_where_it_is_tried_seldom(seed: int) -> None:
    costs, chance = HostCosts(samples()), np.random.default_rng(seed)

    def run(rounds: int, drafting: int, times: float = 1.0) -> None:
        for _ in range(rounds):
            seconds = host_seconds(64, drafting, 0) * math.exp(chance.normal(0, 0.1)) * times
            costs.observe(HostSample(64, drafting, 0, seconds, drafting > 0))

    run(100, 64)
    run(200, 0)
    before = costs.seconds(64, 64, True)
    run(1, 64, 0.3)
    assert costs.seconds(64, 64, True) > 0.7 * before
    run(1, 64, 0.3)
    assert costs.seconds(64, 64, True) < 0.7 * before


@pytest.mark.parametrize("seed", range(4))
def test_what_proposing_costs_is_followed_however_long_it_was_something_else(seed: int) -> None:
    costs, chance = HostCosts(), np.random.default_rng(seed)

    def run(rounds: int, every: int, more: float) -> float:
        for at in range(rounds):
            proposing = at % every == 0
            seconds = (4e-4 + more * proposing) * math.exp(chance.normal(0, 0.25))
            costs.observe(HostSample(32, 8 * proposing, 0, seconds, proposing))
        return costs.seconds(32, 8, True) - costs.seconds(32, 0, False)

    assert run(1600, 40, 3e-5) < 1.2e-4
    assert 2.6e-4 < run(800, 8, 4e-4) < 4.8e-4


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_the_host_is_believed_as_it_is_now(factor: float) -> None:
    costs = HostCosts(samples())
    for at in range(200):
        drafting = 256 if at % 4 == 0 else 0
        seconds = factor * host_seconds(512, drafting, 0)
        costs.observe(HostSample(512, drafting, 0, seconds, drafting > 0))
    for drafting in (0, 256):
        want = factor * host_seconds(512, drafting, 0)
        assert costs.seconds(512, drafting, drafting > 0) == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize("slope", [0.0, -1e-5])
def test_a_busy_start_does_not_make_later_rows_of_prompts_endless(
    slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows took as long as 16, or less: what a key costs in rows cannot be told."""
    monkeypatch.setattr(recording, "time_keys", lambda *_: 1e-6)
    costs = cast(Any, SimpleNamespace(table=lambda _, rows, *__: (None, [0.014 + slope * rows])))
    found = _rows_per_key(cast(Any, None), costs, 0, 0.0)
    assert 0 < found <= MOST_ROWS_PER_KEY
