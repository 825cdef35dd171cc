"""What an engine did since its start, as plain counters (a server exports them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from surefoot.engine.scheduler import Plan
    from surefoot.request import Request
    from surefoot.speculation.cost import CostModel


class Drafting(NamedTuple):
    """What one round did with one request's drafts: whose were verified (None for no drafts), how
    many were on offer for the next round, verified, and accepted."""

    proposer: str | None = None
    offered: int = 0
    drafted: int = 0
    accepted: int = 0


NO_DRAFTING = Drafting()


class Progress(NamedTuple):
    """What a round gave one request: its new tokens, already part of ``request.output``."""

    request: Request
    tokens: Sequence[int]
    drafting: Drafting


@dataclass
class EngineStats:
    """``rows`` are those of the target's forward passes, drafts included; ``prefix_queries`` and
    ``prefix_hits`` count tokens of admitted requests."""

    rounds: int = 0
    replays: int = 0
    """Of the rounds, those that were launched ahead: recorded ones, on a GPU."""
    rows: int = 0
    draft_rows: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    saved_seconds: float = 0.0
    """By the cost model: what plain rounds would have taken for the same tokens, less what the
    rounds with drafts took. Only counted where the cost of rounds was measured."""

    @property
    def rounds_by_kind(self) -> dict[str, int]:
        """How many rounds of each kind there were, by its name."""
        return {
            "launched ahead": self.replays,
            "planned by the host": self.rounds - self.replays,
        }

    def count_admissions(self, plan: Plan) -> None:
        """Call it before the round runs, which moves ``computed``."""
        for request in plan.admitted:
            self.prefix_queries += request.length
            self.prefix_hits += request.computed

    def count_round(
        self, plan: Plan, drafting: Mapping[str, Drafting], cost: CostModel | None
    ) -> None:
        drafts = sum(item.drafted for item in drafting.values())
        self.rounds += 1
        self.rows += plan.rows
        self.draft_rows += drafts
        if cost is not None and drafts:
            accepted = sum(item.accepted for item in drafting.values())
            plain = cost.predict(plan.rows - drafts) * (1 + accepted / len(drafting))
            self.saved_seconds += plain - cost.predict(plan.rows)

    def count_replay(
        self,
        rows: int,
        requests: int,
        drafting: Sequence[Drafting],
        plain: float,
        seconds: float,
    ) -> None:
        """A round of so many rows for so many requests. Its cost is ``seconds``, ``plain`` without
        its drafts."""
        drafts = sum(item.drafted for item in drafting)
        self.rounds += 1
        self.replays += 1
        self.rows += rows
        self.draft_rows += drafts
        if drafts:
            accepted = sum(item.accepted for item in drafting)
            self.saved_seconds += plain * (1 + accepted / requests) - seconds
