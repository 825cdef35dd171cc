"""Offers are cut to what can be verified, and their chances follow what happens."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from harness import admit_alone, needs_native, tiny_decoder
from surefoot.kernels.rounds import RoundVerdict
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.speculation.books import BookKeeping, book_keeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState

K = 3
BACKEND = "torch"


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the book-keeping in C and on that in torch."""
    monkeypatch.setattr("test_controller.BACKEND", request.param)


def make_books(slots: int = 2, **limits: Any) -> BookKeeping:
    state = SlotState(slots, 400, K, 4, 50, torch.device("cpu"))
    controller = Controller(state, ["a", "b"])
    for slot in range(slots):
        admit(controller, slot, SpeculationParams(**limits))
    return book_keeping(tiny_decoder(BACKEND).backend, state, controller, slots)


def admit(controller: Controller, slot: int, choice: SpeculationParams) -> None:
    admit_alone(controller, replace(make_request(slot), speculation=choice))


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


def chance(books: BookKeeping, slot: int, draft: int = 0) -> float:
    """Of an offer [7, 8, 9] to the slot: that drafts up to this one are accepted."""
    estimator = books.controller.estimators[0]
    return float(estimator.chances(torch.tensor([slot]), drafts([7, 8, 9]))[0, draft])


def judge(books: BookKeeping, slots: torch.Tensor) -> None:
    """By the texts as they are; nobody offers anything."""
    for index in range(2):
        books.learn(index, slots, None)


def test_acceptance_is_learnt_without_verifying_anything() -> None:
    books = make_books()
    slots = torch.tensor([0, 1])
    offer = drafts([7, 8, 9], [7, 8, 9])
    before = chance(books, 0)
    for _ in range(20):
        books.learn(0, slots, offer)
        append(books.state, 0, 7)
        append(books.state, 1, 3)
        judge(books, slots)
        append(books.state, 0, 8, 9)
        judge(books, slots)
    assert chance(books, 0) > max(before, 0.75)
    assert chance(books, 1) < min(before, 0.25)
    assert chance(books, 0, draft=2) > 0.5


def test_conditional_rates_equal_counting_by_hand() -> None:
    """Draft 2 is judged only where draft 1 was right."""
    books = make_books(slots=1)
    slots = torch.tensor([0])
    learner = books.controller.estimators[0]
    for step in range(6):
        books.learn(0, slots, drafts([7, 8]))
        append(books.state, 0, 7 if step % 2 else 5, 8 if step == 1 else 4)
        judge(books, slots)
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
    books = make_books(slots=1)
    slots, learner = torch.tensor([0]), books.controller.estimators[0]
    books.learn(0, slots, drafts([7, 8, 9]))
    append(books.state, 0, 7)
    judge(books, slots)
    assert int(learner.watched_length[0]) == 3
    books.learn(0, slots, drafts([1, 1, 1]))
    assert learner.watched[0].tolist() == [7, 8, 9]
    append(books.state, 0, 6)
    judge(books, slots)
    assert int(learner.watched_length[0]) == 0


def test_offers_are_cut_at_bad_ids_limits_and_the_requests_end() -> None:
    books = make_books(slots=3)
    state, controller = books.state, books.controller
    admit(controller, 1, SpeculationParams("auto", 1))
    state.limit[2] = state.length[2] + 2
    offer = drafts([7, 50, 9], [7, 8, 9], [7, 8, 9])
    books.learn(0, torch.tensor([0, 1, 2]), offer)
    assert controller.lengths[0, :3].tolist() == [1, 1, 1]
    books.learn(0, torch.tensor([0]), drafts([-1, 3, 3]))
    assert controller.lengths[0, 0] == 0
    # More drafts than a span holds, and a length beyond the tokens given.
    long = Drafts(torch.full((1, 9), 5), torch.tensor([99]), torch.ones((1, 9)))
    books.learn(0, torch.tensor([0]), long)
    assert controller.lengths[0, 0] == K


def test_methods_pin_or_forbid_proposers() -> None:
    books = make_books(slots=3)
    slots = torch.tensor([0, 1, 2])
    for slot, method in enumerate(["auto", "b", "off"]):
        admit(books.controller, slot, SpeculationParams(method))
    books.learn(0, slots, drafts([7], [7], [7], confidence=0.9))
    books.learn(1, slots, drafts([8], [8], [8], confidence=0.2))
    none = torch.zeros_like(slots)
    tokens = torch.zeros((3, K + 1), dtype=torch.int64)
    verdict = RoundVerdict(tokens, none, none + 1, none, none, slots)
    books.choose_and_report(slots, none, verdict, True)
    offers = books.offers
    assert offers.lengths[:3].tolist() == [1, 1, 0]
    assert offers.tokens[:2, 0].tolist() == [7, 8]
    assert offers.proposer[:2].tolist() == [0, 1]


def test_a_new_request_inherits_nothing_from_the_slots_last() -> None:
    books = make_books(slots=1)
    controller, slots = books.controller, torch.tensor([0])
    for _ in range(9):
        books.learn(0, slots, drafts([7, 8, 9]))
        append(books.state, 0, 7, 8, 9)
        judge(books, slots)
    admit(controller, 0, SpeculationParams())
    assert not controller.estimators[0].trials[0].any()
    assert controller.lengths[:, 0].sum() == 0
    assert int(controller.estimators[0].watched_length[0]) == 0


def test_offers_that_agree_are_told_from_those_that_differ() -> None:
    """Each proposer is right as often with the other as against it; of two that differ, what is
    right that seldom must not be chosen, or promise what the proposer usually does."""
    books, dice = make_books(slots=1), Random(3)
    state, slots = books.state, torch.tensor([0])
    none, tokens = torch.zeros_like(slots), torch.zeros((1, K + 1), dtype=torch.int64)
    verdict = RoundVerdict(tokens, none, none + 1, none, none, slots)
    rates = {"alike": (0.9, 0.9), "apart": (0.2, 0.5), "alone": (0.6, 0.6)}
    found: dict[str, tuple[int, float]] = {}
    for turn in range(250):
        case = ("alike", "apart", "alone")[turn % 3]
        offers = [7], [7 if case == "alike" else 8], [9]
        books.learn(0, slots, drafts(offers[0]))
        books.learn(1, slots, None if case == "alone" else drafts(offers[1]))
        books.choose_and_report(slots, none, verdict, True)
        found[case] = int(books.offers.proposer[0]), float(books.offers.chances[0, 0])
        first, second = rates[case]
        draw = dice.random()
        right = offers[0] if draw < first else offers[1] if draw < first + second else offers[2]
        append(state, 0, *right)
        judge(books, slots)
    for case, (proposer, rate) in {"alike": (0, 0.9), "apart": (1, 0.5), "alone": (0, 0.6)}.items():
        assert found[case][1] == pytest.approx(rate, abs=0.15), case
        assert found[case][0] == proposer or case == "alike"
    seen = books.controller.estimators[0].all_trials[4::8, 0]
    assert seen.tolist() == pytest.approx([4 + 250 / 3] * 3, rel=0.15)
