"""What the next round does: how many drafts it verifies, and who drafts how far for the one after.

One goodput model for every engine and device: the planner compares committed tokens per second,
``(requests + expected accepted drafts) / seconds``, of every action (which proposers are awake,
and how far those with steps draft), with seconds from ``RoundCosts`` and ``HostCosts``.

How an engine uses it, at every launch and at every landing::

    decision = planner.decide(situation)      # before a launch
    planner.landed(decision, situation, outcome)  # when that round's report was read

Notes for whoever wires it in:

- ``RoundCosts.table`` returns two arrays instead of one entry per draft: the numbers of drafts that
  are worth considering (rising from 0; the top of each stair where sizes are recorded) and the
  seconds of each. ``RoundCosts.actions`` lists (proposers, steps), in place of ``depths``: the
  planner weighs sets of proposers and depths alike.
- ``Situation.chances`` has ``nan`` for requests that the last report does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

MIN_PACE = 0.95
"""No request's expected pace falls below this share of its pace without drafts in that batch."""

Action = tuple[tuple[int, ...], int]
"""(Proposers that propose, steps of those that pay per step; 0 where there is none of these)."""


@dataclass(frozen=True)
class Situation:
    """What is known when a round is launched."""

    requests: int
    """Requests that sample in this round: decoding, or at the end of their prompt."""
    prompt_rows: int
    """Rows of prompt chunks that ride along; 0: none."""
    chances: torch.Tensor | None
    """float32 [requests, K] on the CPU: the chance that each offered draft and all before it are
    accepted, never rising along a row, 0 beyond an offer, nan where the last landed report does not
    know the request. None: there is no report, or nobody proposed in the round that it is of."""
    whose: torch.Tensor | None
    """int64 [requests]: the proposer of each request's offer."""
    proposers: tuple[int, ...]
    """Those that some request allows, rising."""
    draft_limit: int
    """The largest ``max_draft_tokens`` of the requests."""
    context: float
    """Mean tokens of the texts."""


@dataclass(frozen=True)
class Decision:
    """What the round that is launched now does."""

    drafts: int
    """Rows for drafts, over all requests; the device gives them to the likeliest."""
    proposers: tuple[int, ...]
    """Who proposes at the end of the round; the others only catch up."""
    steps: int
    """How far proposers that pay per step draft; 0 where none of them is awake."""
    explores: bool
    """Whether this is tried in order to learn, not because it is believed to be best."""


@dataclass(frozen=True)
class Landed:
    """What a round turned out to be."""

    device_seconds: float | None
    """None where nobody measured it."""
    host_seconds: float
    """What the host did for this round, waiting for the device left out."""
    verified: int
    """Drafts that got a row, over all requests."""
    accepted: int
    drafting: int
    """Requests that had drafts verified or have some on offer now."""
    ends: int
    """Requests that ended."""


class RoundCosts(Protocol):
    """Believed seconds of the device's rounds."""

    @property
    def noise(self) -> float:
        """Standard error of a believed ratio of two rounds' times."""
        ...

    def actions(self, requests: int) -> Sequence[Action]:
        """What rounds of so many requests may propose with; ``((), 0)`` first."""
        ...

    def table(
        self, requests: int, prompt_rows: int, action: Action, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n], float64 [n]): numbers of drafts, rising from 0, that are worth considering,
        and seconds of a round that verifies so many and then proposes as ``action`` says."""
        ...

    def observe(
        self,
        requests: int,
        prompt_rows: int,
        action: Action,
        drafts: int,
        context: float,
        seconds: float,
    ) -> None:
        """Such a round took so long."""
        ...


class Planner:
    """Decides every round of an engine. ``overlap``: whether the host works while the device does,
    so that a round takes the longer of both times, not their sum."""

    def decide(self, situation: Situation) -> Decision:
        """What to launch now."""
        raise NotImplementedError

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        """Learn from a round that was decided so."""
        raise NotImplementedError
