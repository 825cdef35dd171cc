"""How much a certificate tests, and how much it must have tested to mean anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """The shape of an engine and the traffic it gets. ``share``: part of the jobs that run."""

    name: str
    batch: int
    drafts: int
    """Most drafts of a span; 0 takes the configuration's."""
    share: float = 1.0
    policy: str = "fixed"
    chunk: int | None = None
    """Rows of a round before drafts; prompts longer than this are prefilled in chunks."""
    prefix_caching: bool = False
    repeat: int = 1
    """How often each prompt arrives."""
    tight: bool = False
    """Room for about two requests, so that others are preempted."""
    stagger: int = 0
    """Steps between arrivals."""
    cancel: bool = False
    crowd: bool = False
    """As many requests at once as the configuration allows; ``batch`` does not count."""
    length: int | None = None
    """Most tokens of a text."""
    drafts_by: str = "all"
    """``all``: proposers and probes in turn; ``runner-up`` or ``tree``: that probe alone;
    ``mixed``: requests without drafts, with few, with many, and with anybody's, side by side."""


SCENARIOS = (
    Scenario("batch of 8, 3 drafts, staggered", 8, 3, stagger=2),
    Scenario("batch of 16, longest drafts", 16, 0),
    Scenario("chunked prefill, staggered", 8, 5, chunk=11, stagger=1),
    Scenario("prefix hits", 8, 0, 0.5, prefix_caching=True, repeat=2, stagger=3),
    Scenario("shortage of KV memory", 8, 4, tight=True, prefix_caching=True),
    Scenario("cancellations", 8, 4, stagger=1, cancel=True),
    Scenario("pairs, 1 draft", 2, 1, 0.5),
    Scenario("alone, longest drafts", 1, 0, 0.35),
    Scenario("the controller decides", 8, 0, policy="auto", chunk=64),
    Scenario("second likeliest tokens offered", 8, 3, drafts_by="runner-up"),
    Scenario("speculation on, off and of any depth", 12, 0, drafts_by="mixed", stagger=1),
    Scenario("as many requests as the engine runs", 0, 3, crowd=True, length=40),
    Scenario("trees", 8, 0, drafts_by="tree"),
)


@dataclass(frozen=True)
class Size:
    """Counts of jobs, tokens and samples; ``min_…`` are the thresholds of a meaningful result."""

    name: str
    greedy_jobs: int
    greedy_length: int
    sampled_jobs: int
    sampled_length: int
    scenarios: tuple[Scenario, ...]
    designs: int
    """Pairwise designs over the sampling options."""
    parameter_length: int
    long_texts: int
    """Longest text that crosses a boundary of positions, tokens."""
    long_tokens: int
    """Tokens behind each boundary."""
    seeds: int
    """Seeds of each cell of the distribution test."""
    sampled_positions: int
    """Neighbouring positions of each cell."""
    offers: int
    """Offers whose drafter state is recomputed."""
    min_positions: int
    min_verified: int
    """Drafts that each proposer under test must have had verified."""
    min_accepted: int
    """Of these, accepted."""
    min_rejections: int
    """Spans with a draft turned down, probes included."""
    min_crowded: int
    """Of these, in rounds of more than ``jobs.CROWD`` requests, where the engine runs as many."""
    min_near: int
    """Runners-up that were offered and refused within ``near_ties.NEAR`` of the best token."""
    min_offers: int
    more: int = 12
    """Batches of further texts, at most, where counts are still below these."""


DEFAULT = Size(
    name="default",
    greedy_jobs=16,
    greedy_length=96,
    sampled_jobs=16,
    sampled_length=64,
    scenarios=SCENARIOS,
    designs=2,
    parameter_length=40,
    long_texts=33_000,
    long_tokens=40,
    seeds=96,
    sampled_positions=6,
    offers=48,
    min_positions=20_000,
    min_verified=500,
    min_accepted=100,
    min_rejections=700,
    min_crowded=200,
    min_near=10,
    min_offers=12,
)
QUICK = Size(
    name="quick",
    greedy_jobs=10,
    greedy_length=48,
    sampled_jobs=8,
    sampled_length=32,
    scenarios=(*SCENARIOS[:6], *SCENARIOS[9:]),
    designs=1,
    parameter_length=24,
    long_texts=2_500,
    long_tokens=24,
    seeds=64,
    sampled_positions=4,
    offers=24,
    min_positions=3_000,
    min_verified=100,
    min_accepted=20,
    min_rejections=200,
    min_crowded=60,
    min_near=3,
    min_offers=8,
)
