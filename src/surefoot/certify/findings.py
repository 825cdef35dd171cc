"""What a section of the certificate found: counts, differences, and what they mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from surefoot.certify.jobs import Activity, ImpossibleToken

KEPT_DIFFERENCES = 20
KEPT_PROBLEMS = 50
NEAR = 0.05
"""Logits above what noise explains: a runner-up that came so near is a near tie."""


@dataclass(frozen=True)
class Difference:
    """A position where the tested text has another token than plain decoding.

    ``regret`` and ``plain_regret`` are the losses of the tested and of the plain token against
    the best one on freshly computed logits; a tie is explained by noise up to ``bound`` (0: there
    is none, and nothing is a tie)."""

    where: str
    position: int
    plain_token: int
    tested_token: int
    regret: float
    plain_regret: float
    bound: float
    context: tuple[int, ...]
    """The last tokens before it."""
    texts: tuple[str, str, str] | None = None
    """Context, plain token and tested token as text, where there is a tokenizer."""

    @property
    def tie(self) -> bool:
        return self.bound > 0 and max(self.regret, self.plain_regret) <= self.bound


@dataclass
class Refusals:
    """Gaps (logits, above the bound of ties) of the runners-up that were offered and refused.
    ``likelier``: how many others were likelier than the token that was sampled."""

    gaps: list[float] = field(default_factory=list)
    likelier: int = 0

    @property
    def near(self) -> int:
        """How many came within ``NEAR``."""
        return sum(gap <= NEAR for gap in self.gaps)

    @property
    def nearest(self) -> float:
        return min(self.gaps, default=float("inf"))

    def add(self, other: Refusals) -> None:
        self.gaps += other.gaps
        self.likelier += other.likelier

    def to_json(self) -> dict[str, Any]:
        within = {str(most): sum(gap <= most for gap in self.gaps) for most in (0.01, NEAR, 0.5)}
        nearest = self.nearest if self.gaps else None
        return {
            "refused": len(self.gaps),
            "within": within,
            "nearest": nearest,
            "likelier": self.likelier,
        }


@dataclass
class Section:
    """``positions``: tokens compared with plain decoding's. ``problems``: everything that
    disproves exactness, in words; ``gaps``: what was tested too little to say anything."""

    name: str
    positions: int = 0
    texts: int = 0
    ties: list[Difference] = field(default_factory=list)
    divergences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)
    refusals: Refusals = field(default_factory=Refusals)
    scenarios: list[str] = field(default_factory=list)
    margins: Counter[int] = field(default_factory=Counter)
    """Plain decoding's positions by log10 of the distance between best and second token."""
    logprobs: int = 0
    """Positions whose logprobs were compared."""
    largest_logprob_error: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    def enter(self, difference: Difference) -> None:
        """Count a difference as what it is."""
        if difference.tie:
            self.ties.append(difference)
            return
        self.divergences.append(difference)
        self.problem(
            f"{difference.where}: token {difference.position} is {difference.tested_token} instead "
            f"of {difference.plain_token}, regret {difference.regret:.3g} (plain decoding's own "
            f"{difference.plain_regret:.3g}), bound {difference.bound:.3g}"
        )

    def problem(self, text: str) -> None:
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(text)

    def to_json(self) -> dict[str, Any]:
        differences = sorted(self.divergences, key=lambda item: -item.regret)[:KEPT_DIFFERENCES]
        ties = sorted(self.ties, key=lambda item: -item.regret)[:KEPT_DIFFERENCES]
        activity = self.activity
        return {
            "name": self.name,
            "positions": self.positions,
            "texts": self.texts,
            "ties": len(self.ties),
            "divergences": len(self.divergences),
            "worst_ties": [_difference(item) for item in ties],
            "worst_divergences": [_difference(item) for item in differences],
            "problems": self.problems,
            "gaps": self.gaps,
            "notes": self.notes,
            "scenarios": self.scenarios,
            "verified": dict(activity.verified),
            "accepted": dict(activity.accepted),
            "rejections": dict(activity.rejections),
            "crowded_rejections": activity.crowded,
            "runners_up": self.refusals.to_json(),
            "most_requests": activity.most,
            "furthest_draft": activity.furthest,
            "rounds": dict(activity.rounds),
            "accepted_lengths": {
                name: dict(sorted(counts.items())) for name, counts in activity.lengths.items()
            },
            "preemptions": activity.preemptions,
            "prefix_hit_tokens": activity.prefix_hits,
            "cancellations": activity.cancellations,
            "chunked_prompts": activity.chunked,
            "recorded_rounds": activity.replays,
            "called_rounds": activity.called,
            "margins_log10": dict(sorted(self.margins.items())),
            "logprobs_compared": self.logprobs,
            "largest_logprob_error": self.largest_logprob_error,
            "details": self.details,
            "seconds": round(self.seconds, 2),
        }


def _difference(item: Difference) -> dict[str, Any]:
    # JSON knows no infinity.
    regret = item.regret if item.regret != float("inf") else "inf"
    plain = item.plain_regret if item.plain_regret != float("inf") else "inf"
    return {
        "where": item.where,
        "position": item.position,
        "plain_token": item.plain_token,
        "tested_token": item.tested_token,
        "regret": regret,
        "plain_regret": plain,
        "bound": item.bound,
        "context": list(item.context),
        "texts": item.texts,
    }


def guarded(section: Section, run: Callable[[], Section]) -> Section:
    """What ``run`` finds; if an impossible token broke it off, ``section``, which says so."""
    try:
        return run()
    except ImpossibleToken as error:
        section.problem(str(error))
        section.activity.add(error.activity)
        return section
