"""Offers are cut to what can be verified, and their chances follow what happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.speculation import estimator
from surefoot.speculation.controller import Controller
from surefoot.speculation.estimator import AcceptanceEstimator
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState

K = 3


@pytest.fixture(params=["best at hand", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the compiled book-keeping, where there is a compiler, and on torch."""
    if request.param == "reference":
        monkeypatch.setattr(estimator, "load_native", lambda: None)


def make_controller(slots: int = 2, **limits: Any) -> Controller:
    state = SlotState(slots, 400, K, 4, 50, torch.device("cpu"))
    controller = Controller(state, ["a", "b"])
    for slot in range(slots):
        state.admit([make_request(slot)])
        admit(controller, slot, SpeculationParams(**limits))
    return controller


def admit(controller: Controller, slot: int, choice: SpeculationParams) -> None:
    controller.admit(torch.tensor([slot]), [choice])


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
    admit(controller, 1, SpeculationParams("auto", 1))
    state.limit[2] = state.length[2] + 2
    offer = drafts([7, 50, 9], [7, 8, 9], [7, 8, 9])
    controller.offer(0, torch.tensor([0, 1, 2]), offer)
    assert controller.lengths[0, :3].tolist() == [1, 1, 1]
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
        admit(controller, slot, SpeculationParams(method))
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
    admit(controller, 0, SpeculationParams())
    assert not controller.estimators[0].trials[0].any()
    assert controller.lengths[:, 0].sum() == 0
    assert int(controller.estimators[0].watched_length[0]) == 0


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
