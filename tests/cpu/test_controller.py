"""Law 2: only what pays is verified, request by request, and beliefs follow what happens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.speculation import estimator
from surefoot.speculation.controller import (
    MIN_GAIN,
    MIN_PACE,
    PROBE_EVERY,
    Controller,
    split_rows,
    split_rows_reference,
)
from surefoot.speculation.cost import CostModel
from surefoot.speculation.estimator import AcceptanceEstimator
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState

K = 3


def flat_table(base: float, per_row: float, rows: int = 64) -> torch.Tensor:
    return torch.tensor([base + per_row * max(row, 1) for row in range(rows)])


def test_free_rows_are_all_taken_and_dear_rows_none() -> None:
    chances = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.0, 0.0]])
    assert split_rows(chances, flat_table(1.0, 0.0)[2:]).tolist() == [3, 1]
    assert split_rows(chances, flat_table(0.0, 1.0)[2:]).tolist() == [0, 0]


def test_repetitive_text_keeps_drafts_beside_prose() -> None:
    chances = torch.tensor([[0.95, 0.9, 0.85], [0.03, 0.0, 0.0]])
    assert split_rows(chances, flat_table(1.0, 0.01)[2:]).tolist() == [3, 0]


def test_a_neighbour_without_drafts_is_slowed_by_a_twentieth_at_most() -> None:
    chances = torch.tensor([[0.99, 0.98, 0.97], [0.0, 0.0, 0.0]])
    table = flat_table(1.0, 0.03)
    assert split_rows(chances, table[2:]).tolist() == [1, 0]
    assert split_rows(chances, table[2:], min_pace=0.0).tolist() == [3, 0]


def test_drafts_are_never_taken_beyond_the_cost_table() -> None:
    chances = torch.full((2, K), 0.99)
    assert int(split_rows(chances, torch.ones(4)).sum()) == 3


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[float]], int, list[float]]:
    batch = draw(st.integers(1, 3))
    rows = []
    for _ in range(batch):
        size = draw(st.integers(0, K))
        chain = sorted(
            draw(st.lists(st.floats(0.01, 0.99), min_size=size, max_size=size)), reverse=True
        )
        rows.append(chain + [0.0] * (K - size))
    base = batch + draw(st.integers(0, 3))
    steps = draw(st.lists(st.floats(0, 0.3), min_size=20, max_size=20))
    return rows, base, list(itertools.accumulate(steps, initial=1.0))


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(splits())
def test_split_is_the_best_of_all_fair_prefixes(case: Any) -> None:
    rows, base, table = case
    chances, times = torch.tensor(rows), torch.tensor(table)
    counts = split_rows(chances, times[base:]).tolist()
    batch = len(rows)

    def pace(choice: Any) -> tuple[float, float]:
        gains = [sum(row[:count]) for row, count in zip(rows, choice, strict=True)]
        slowdown = float(times[base + sum(choice)] / times[base])
        fair = min(1 + gain for gain in gains) / slowdown
        return (batch + sum(gains)) / slowdown, fair

    rate, fair = pace(counts)
    assert all(c <= sum(p > 0 for p in row) for c, row in zip(counts, rows, strict=True))
    assert sum(counts) == 0 or (rate >= MIN_GAIN * batch - 1e-4 and fair >= MIN_PACE - 1e-4)
    # No set of the n best drafts, for any n, is better.
    ranked = sorted(
        ((p, -b, -j) for b, row in enumerate(rows) for j, p in enumerate(row) if p > 0),
        reverse=True,
    )
    for size in range(len(ranked) + 1):
        choice = [sum(-b == other for _, b, _ in ranked[:size]) for other in range(batch)]
        other_rate, other_fair = pace(choice)
        if other_fair >= MIN_PACE + 1e-4 and other_rate >= MIN_GAIN * batch + 1e-4:
            assert rate >= other_rate - 1e-3


@pytest.fixture(params=["best at hand", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the compiled book-keeping, where there is a compiler, and on torch."""
    if request.param == "reference":
        monkeypatch.setattr(estimator, "load_native", lambda: None)


def make_controller(slots: int = 2, policy: str = "auto", **limits: Any) -> Controller:
    state = SlotState(slots, 400, K, 4, 50, torch.device("cpu"))
    cost = CostModel([1, 64], [1.0, 1.1], 64)
    controller = Controller(state, ["a", "b"], cost, policy)
    for slot in range(slots):
        state.admit([make_request(slot)])
        controller.admit([slot], [SpeculationParams(**limits)])
    return controller


def make_request(slot: int, room: int = 300) -> Request:
    prompt = (1, 2, 3)
    return Request(
        "r", prompt, SamplingParams(), SpeculationParams(), 0, len(prompt) + room, slot=slot
    )


def drafts(*tokens: list[int], confidence: float = 0.5) -> Drafts:
    width = max(map(len, tokens))
    padded = [row + [0] * (width - len(row)) for row in tokens]
    return Drafts(
        torch.tensor(padded).view(len(tokens), width),
        torch.tensor([len(row) for row in tokens]),
        torch.full((len(tokens), width), confidence),
    )


def append(state: SlotState, slot: int, *tokens: int) -> None:
    for token in tokens:
        state.history[slot, state.length[slot]] = token
        state.length[slot] += 1


def chance(controller: Controller, slot: int, draft: int = 0) -> float:
    """Of an offer [7, 8, 9] to the slot: that drafts up to this one are accepted."""
    chances = controller.estimators[0].chances(torch.tensor([slot]), drafts([7, 8, 9]))
    return float(chances[0, draft])


def test_acceptance_is_learnt_without_verifying_anything() -> None:
    controller = make_controller()
    slots = torch.tensor([0, 1])
    offer = drafts([7, 8, 9], [7, 8, 9])
    before = chance(controller, 0)
    for _ in range(20):
        controller.offer(0, slots, offer)
        append(controller.state, 0, 7)
        append(controller.state, 1, 3)
        controller.learn(slots)
        append(controller.state, 0, 8, 9)
        controller.learn(slots)
    assert chance(controller, 0) > max(before, 0.75)
    assert chance(controller, 1) < min(before, 0.25)
    assert chance(controller, 0, draft=2) > 0.5


def test_conditional_rates_equal_counting_by_hand() -> None:
    """Draft 2 is judged only where draft 1 was right."""
    controller = make_controller(slots=1)
    slots = torch.tensor([0])
    learner = controller.estimators[0]
    for step in range(6):
        controller.offer(0, slots, drafts([7, 8]))
        append(controller.state, 0, 7 if step % 2 else 5, 8 if step == 1 else 4)
        controller.learn(slots)
    bin_ = 4
    trials, hits = learner.trials[0, bin_], learner.hits[0, bin_]
    decay = 0.92
    first = [0, 1, 0, 1, 0, 1]
    second = [1, 0, 0]

    def total(values: list[int]) -> float:
        return sum(value * decay ** (len(values) - 1 - at) for at, value in enumerate(values))

    assert float(hits[0]) == pytest.approx(total(first), abs=1e-4)
    assert float(trials[0]) == pytest.approx(total([1] * 6), abs=1e-4)
    assert float(hits[1]) == pytest.approx(total(second), abs=1e-4)
    assert float(trials[1]) == pytest.approx(total([1] * 3), abs=1e-4)
    assert float(trials[2]) == 0


def test_an_offer_stays_in_view_until_the_text_has_settled_it() -> None:
    controller = make_controller(slots=1)
    slots = torch.tensor([0])
    controller.offer(0, slots, drafts([7, 8, 9]))
    append(controller.state, 0, 7)
    controller.learn(slots)
    assert int(controller.estimators[0].watched_length[0]) == 3
    controller.offer(0, slots, drafts([1, 1, 1]))
    assert controller.estimators[0].watched[0].tolist() == [7, 8, 9]
    append(controller.state, 0, 6)
    controller.learn(slots)
    assert int(controller.estimators[0].watched_length[0]) == 0


def test_offers_are_cut_at_bad_ids_limits_and_the_requests_end() -> None:
    controller = make_controller(slots=3)
    state = controller.state
    controller.admit([1], [SpeculationParams("auto", 1)])
    state.limit[2] = state.length[2] + 2
    offer = drafts([7, 50, 9], [7, 8, 9], [7, 8, 9])
    controller.offer(0, torch.tensor([0, 1, 2]), offer)
    assert controller.lengths[0].tolist() == [1, 1, 1]
    controller.offer(0, torch.tensor([0]), drafts([-1, 3, 3]))
    assert controller.lengths[0, 0] == 0
    # More drafts than a span holds, and a length beyond the tokens given.
    long = Drafts(torch.full((1, 9), 5), torch.tensor([99]), torch.ones((1, 9)))
    controller.offer(0, torch.tensor([0]), long)
    assert controller.lengths[0, 0] == K


def test_a_tree_is_refused_not_taken_for_a_chain() -> None:
    controller = make_controller(slots=1)
    tree = replace(drafts([7, 8]), parents=torch.tensor([[-1, -1]]))
    with pytest.raises(SurefootError, match="'a' offers a tree"):
        controller.offer(0, torch.tensor([0]), tree)


def test_methods_pin_or_forbid_proposers() -> None:
    controller = make_controller(slots=3)
    slots = torch.tensor([0, 1, 2])
    for slot, method in enumerate(["auto", "b", "off"]):
        controller.admit([slot], [SpeculationParams(method)])
    controller.offer(0, slots, drafts([7], [7], [7], confidence=0.9))
    controller.offer(1, slots, drafts([8], [8], [8], confidence=0.2))
    choice = controller.choose(slots)
    assert choice.lengths.tolist() == [1, 1, 0]
    assert choice.tokens[:2, 0].tolist() == [7, 8]
    assert choice.proposer[:2].tolist() == [0, 1]


def test_a_new_request_inherits_nothing_from_the_slots_last() -> None:
    controller = make_controller(slots=1)
    slots = torch.tensor([0])
    for _ in range(9):
        controller.offer(0, slots, drafts([7, 8, 9]))
        append(controller.state, 0, 7, 8, 9)
        controller.learn(slots)
    controller.admit([0], [SpeculationParams()])
    assert not controller.estimators[0].trials[0].any()
    assert controller.lengths[:, 0].sum() == 0
    assert int(controller.estimators[0].watched_length[0]) == 0


def test_probing_is_bounded_and_counted() -> None:
    controller = make_controller(slots=1)
    # Verifying is believed to cost more than it gains, but not by much.
    controller.cost = CostModel([1, 4], [1.0, 2.8], 8)
    controller.offer(0, torch.tensor([0]), drafts([7], confidence=0.5))
    choice = controller.choose(torch.tensor([0]))
    assert not controller.split(choice, 1).any()
    found = [controller.probe(choice, 1) for _ in range(3 * PROBE_EVERY)]
    assert sum(counts is not None for counts in found) == controller.probes == 3
    assert all(int(counts.sum()) == 1 for counts in found if counts is not None)


def test_fixed_policy_takes_every_offer() -> None:
    controller = make_controller(slots=1, policy="fixed")
    controller.offer(0, torch.tensor([0]), drafts([7, 8], confidence=0.0))
    assert controller.split(controller.choose(torch.tensor([0])), 1).tolist() == [2]


def test_cost_follows_what_rounds_take() -> None:
    cost = CostModel([1, 4, 16], [1.0, 1.2, 2.0], 32)
    assert cost.predict(10) == pytest.approx(1.6)
    assert cost.predict(32) == pytest.approx(2.0 + 16 * 0.8 / 12)
    for _ in range(60):
        cost.observe(4, 3.0)
        cost.observe(1, 2.0)
    assert cost.predict(4) == pytest.approx(3.0, rel=0.05)
    assert cost.predict(1) == pytest.approx(2.0, rel=0.05)
    assert cost.predict(16) > 2.5, "the whole machine got slower"


def test_one_outlier_moves_the_cost_little() -> None:
    cost = CostModel([1, 4, 16], [1.0, 1.2, 2.0], 32)
    cost.observe(1, 50.0)
    assert cost.predict(1) < 1.2
    assert all(cost.table(1, 63).diff() >= 0)


def test_slow_rounds_of_one_size_do_not_make_larger_ones_look_free() -> None:
    cost = CostModel([1, 8, 16], [1.0, 1.2, 2.0], 32)
    for _ in range(4):
        cost.observe(8, 10.0)
    assert cost.predict(16) > 1.4 * cost.predict(8)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_compiled_book_keeping_equals_the_reference(data: Any) -> None:
    state = SlotState(3, 400, K, 4, 50, torch.device("cpu"))
    for slot in range(3):
        state.admit([make_request(slot)])
    compiled, reference = AcceptanceEstimator(state), AcceptanceEstimator(state)
    token = st.integers(0, 1)
    for _ in range(12):
        slots = torch.tensor(sorted(data.draw(st.sets(st.integers(0, 2), min_size=1))))
        shape = (len(slots), K)
        offers = Drafts(
            torch.tensor([[data.draw(token) for _ in range(K)] for _ in slots]).view(shape),
            torch.tensor([data.draw(st.integers(0, K)) for _ in slots]),
            torch.tensor([[data.draw(st.floats(0, 1)) for _ in range(K)] for _ in slots]),
        )
        compiled.watch(slots, offers)
        reference.watch_reference(slots, offers)
        for slot in slots.tolist():
            append(state, slot, *data.draw(st.lists(token, max_size=3)))
        compiled.learn(slots)
        reference.learn_reference(slots)
        for name in ("hits", "trials", "seen", "watched_length"):
            assert torch.allclose(getattr(compiled, name), getattr(reference, name), atol=1e-4)


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_the_compiled_split_of_many_offers_equals_the_reference(batch: int) -> None:
    """Ties included: chances are of few values, whose sums are exact."""
    torch.manual_seed(batch)
    taken = 0
    for _ in range(60):
        chances = 0.5 ** torch.randint(0, 3, (batch, 5)).float().cumsum(dim=1)
        chances[torch.rand(batch, 5).cumsum(dim=1) > 2] = 0
        entries = int(torch.randint(1, batch * 5 + 4, (1,)))
        table = 1 + 0.1 * (1 + torch.rand(entries) * 0.05).cumsum(0) / batch
        counts = split_rows(chances, table)
        assert torch.equal(counts, split_rows_reference(chances, table, MIN_GAIN, MIN_PACE))
        taken += int(counts.sum())
    assert taken > 60 * batch


def test_rows_within_a_time_are_those_predicted_to_fit() -> None:
    cost = CostModel([1, 4, 8, 16], [1.0, 1.0, 3.0, 2.0], 64)
    for seconds in (0.5, 1.0, 1.7, 3.0, 3.5, 99.0):
        rows = cost.rows_within(seconds)
        assert rows == max((r for r in range(1, 65) if cost.predict(r) <= seconds), default=1)
    slope = CostModel([1, 4, 8], [1.0, 1.5, 3.0], 40)
    for seconds in (0.5, 1.0, 1.2, 1.5, 2.0, 3.0, 8.0, 99.0):
        rows = slope.rows_within(seconds)
        assert rows == max((r for r in range(1, 41) if slope.predict(r) <= seconds), default=1)
