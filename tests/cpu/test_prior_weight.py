"""How far a request's own record of acceptance is trusted against that of all requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.kernels.upload import sending
from surefoot.speculation.estimator import PRIOR_RANGE, AcceptanceEstimator
from surefoot.speculation.goodput import best_drafts
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState

K, REQUESTS = 4, 96
ROUNDS = 120


def taught(rates: torch.Tensor, seed: int = 0) -> tuple[AcceptanceEstimator, Drafts]:
    """An estimator that saw ``ROUNDS`` rounds of requests [B] whose drafts are each right with
    their request's rate [B], and their next offers."""
    torch.manual_seed(seed)
    state = SlotState(len(rates), 8, K, 4, 50, torch.device("cpu"))
    estimator = AcceptanceEstimator(state)
    slots = torch.arange(len(rates))
    drafts = torch.full((len(rates), K), 7)
    offers = Drafts(drafts, torch.full_like(slots, K), torch.full(drafts.shape, 0.5))
    for _ in range(ROUNDS):
        state.length[:] = 1
        estimator.watch(slots, offers)
        right = (torch.rand(len(rates), K) < rates.unsqueeze(1)).long().cumprod(dim=1).bool()
        state.history[:-1, 1 : 1 + K] = torch.where(right, drafts, 9)
        state.length[:] = 1 + K
        estimator.learn(slots)
        assert not estimator.watched_length.any()
    return estimator, offers


def test_requests_that_are_alike_share_one_rate() -> None:
    estimator, offers = taught(torch.full((REQUESTS,), 0.4))
    assert estimator.prior_weight()[4, 0] == PRIOR_RANGE[1]
    chances = estimator.chances(torch.arange(REQUESTS), offers)[:, 0]
    assert chances.min() > 0.33 and chances.max() < 0.47


def test_requests_that_differ_are_told_apart_at_once() -> None:
    rates = torch.where(torch.arange(REQUESTS) % 2 == 0, 0.0, 0.8)
    estimator, offers = taught(rates)
    assert estimator.prior_weight()[4, 0] == PRIOR_RANGE[0]
    with sending(torch.device("cpu")) as uploads:
        estimator.records.forget(np.array([0]), uploads)
    one = torch.tensor([0])
    fresh = Drafts(offers.tokens[:1], offers.lengths[:1], offers.confidence[:1])
    before = estimator.chances(one, fresh)[0, 0]
    state = estimator.state
    state.length[:] = 1
    estimator.watch(one, fresh)
    state.history[0, 1] = 9
    state.length[0] = 2
    estimator.learn(one)
    assert 0.3 < before < 0.5 and estimator.chances(one, fresh)[0, 0] < 0.15


@pytest.mark.parametrize("weight", [2.0, 6.0, 20.0])
def test_the_weight_is_that_of_the_distribution_of_rates(weight: float) -> None:
    """Rates drawn from a beta distribution, whose weight is known."""
    torch.manual_seed(1)
    mean = 0.45
    rates = torch.distributions.Beta(mean * weight, (1 - mean) * weight).sample((1500,))
    estimator, _ = taught(rates)
    found = float(estimator.prior_weight()[4, 0])
    assert weight / 1.5 < found < weight * 1.5


def test_one_unlucky_request_of_many_does_not_hold_back_the_drafts_of_all() -> None:
    """Rounds cost as on a large GPU at 96 requests. All are alike; the least likely by its own
    record must not look too slow to share a round with drafts (``MIN_PACE``)."""
    estimator, offers = taught(torch.full((REQUESTS,), 0.3))
    chances = estimator.chances(torch.arange(REQUESTS), offers)
    drafts = np.arange(REQUESTS * K + 1)
    seconds = 1 + 0.8 * drafts / (REQUESTS * K)
    assert best_drafts(chances.numpy(), drafts, seconds, margin=1.02).at >= REQUESTS
