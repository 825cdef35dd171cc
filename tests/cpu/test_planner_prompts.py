"""The planner beside prompts, whose requests the host lets in: on made-up engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner_world import Decides, Fixed, Texts, World
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.planner import Planner

ROWS = [1, 8, 32, 64, 128, 256, 512, 1024, 2048]


def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
    """Of a small model's round, on a GPU."""
    return 7e-4 + 4e-6 * (requests + prompt_rows + drafts) + 1.5e-5 * bool(action[0])


def host(requests: int, drafting: int, ends: int) -> float:
    return 3e-4 + 2e-6 * requests + 6e-6 * drafting + 2e-5 * ends


def planner() -> Planner:
    samples = [
        HostSample(b, d, 0, host(b, d, 0), d > 0, decided=d > 0)
        for b in (1, 64, 512)
        for d in (0, b)
    ]
    seconds = [device(rows, 0, NOTHING, 0) for rows in ROWS]
    return Planner(ExactCosts(ROWS, seconds, {0: Proposing(1.5e-5)}), HostCosts(samples), 8)


def world(requests: int, texts: Callable[[], Texts], share: float, seconds: float) -> World:
    """``share`` of the rounds carry prompts; each takes the host so many ``seconds``."""
    return World(
        device, host, texts(), requests, in_flight=2, overlap=True, noise=0.01, prompt_rows=100,
        prompts=1 + requests // 256, prompt_host=seconds, prompt_share=share,
    )  # fmt: skip


def pace(decides: Decides, in_world: World) -> float:
    in_world.run(decides, 500)
    return in_world.run(decides, 1500)


def prose() -> Texts:
    return Texts(repeating=0.0, idle_offers=0.15)


def some() -> Texts:
    return Texts(repeating=0.3, chance=0.7, idle_offers=0.15)


def much() -> Texts:
    return Texts(repeating=0.9, chance=0.8, idle_offers=0.15)


@pytest.mark.parametrize(
    ("requests", "texts", "share", "least"),
    [
        (512, prose, 1.0, 0.992),
        (512, some, 1.0, 1.0),
        (512, some, 0.5, 1.0),
        (128, some, 1.0, 1.0),
        (128, some, 0.5, 1.0),
        (128, much, 1.0, 1.1),
        (32, much, 1.0, 2.2),
    ],
)
def test_where_rounds_wait_for_requests_to_be_let_in_drafts_are_weighed_by_that(
    requests: int, texts: Callable[[], Texts], share: float, least: float
) -> None:
    """Looking for drafts takes the host time that these rounds have not, and rows of drafts are
    free beside them."""
    plain = world(requests, texts, share, 1.2e-3)
    ours = pace(planner(), world(requests, texts, share, 1.2e-3))
    assert ours / pace(Fixed(NOTHING, plain), plain) > least
