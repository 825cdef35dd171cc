"""What the planner is told, what it says, and what it asks of the costs of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from surefoot.sampling.params import SamplingStages
from surefoot.speculation.exploring import Trial
from surefoot.speculation.host_costs import HostSample

_OTHER_LOAD = 1.5
"""Times more or fewer requests."""
Action = tuple[tuple[int, ...], int]
"""(Proposers that propose, steps of those that pay by steps; 0 where there is none of these). Of a
tree the steps are levels."""
NOTHING: Action = ((), 0)


class Promise(NamedTuple):
    """What a round is expected to bring."""

    tokens: float
    """For each request."""
    seconds: float
    """Against a round without drafts and proposers."""

    @property
    def rate(self) -> float:
        """Tokens a second, against such a round."""
        return self.tokens / self.seconds


PLAIN = Promise(1.0, 1.0)


class SamplingCost(NamedTuple):
    """What a kind of sampling adds to a round that takes the likeliest tokens."""

    seconds: float = 0.0
    row_seconds: float = 0.0
    """For each row that samples."""

    def of(self, rows: float) -> float:
        """Seconds of a round in which so many sample."""
        return self.seconds + self.row_seconds * rows


LIKELIEST = SamplingCost()


def is_other_load(requests: int, before: int) -> bool:
    """Whether rounds of so many requests tell nothing of those of so many ``before``; 0: there were
    none."""
    return not before or not 1 / _OTHER_LOAD < requests / before < _OTHER_LOAD


@dataclass(frozen=True)
class Situation:
    """What is known when a round is launched."""

    requests: int
    """Requests that sample in this round: decoding, or at the end of their prompt."""
    prompt_rows: int
    """Rows of prompt chunks that ride along; 0: none. Where rounds are called with just their rows,
    as many at a prompt's beginning as take that long."""
    chances: np.ndarray | None
    """float32 [requests, K], of the last landed report: the chance that each offered
    draft and all before it are accepted, never rising along a row, 0 beyond an offer, nan for a
    request that the report does not know. None: there is no report, nobody proposed in its round,
    or nobody asked."""
    whose: np.ndarray | None
    """int64 [requests]: the proposer of each request's offer."""
    proposers: tuple[int, ...]
    """Those that some request allows, rising."""
    draft_limit: int
    """The largest ``max_draft_tokens`` of the requests."""
    context: float
    """Mean tokens of the texts."""
    hosted: np.ndarray | None = None
    """float32 [requests, K], nan for those without: chances of the drafts that the host has on
    offer for this very round, in place of what the report said. None: for nobody."""
    kind: SamplingStages = SamplingStages()
    """The sampling of the round, as rounds are recorded for it: what costs are told apart by."""
    slots: np.ndarray | None = None
    """int64 [requests]: by which the planner knows who was how fast; None: it is not to know."""
    prompts: int = 0
    """Prompts that ``prompt_rows`` are of."""
    parents: np.ndarray | None = None
    """int32 [requests, K], of these offers, as in ``Drafts``; None: all of them are chains."""


class Expectation(NamedTuple):
    """What the planner believed of a round when it decided: not the engine's business."""

    seconds: float = 0.0
    """What the round takes, host included."""
    without_trial: float = 0.0
    """What it would take if nothing were tried."""
    plain_seconds: float = 0.0
    """What it takes without drafts, proposers and prompts."""
    prompt_seconds: float = 0.0
    """What prompts add to that."""
    trial: Trial | None = None
    """What the round's loss against others, if any, is spent on."""
    trials: tuple[Trial, ...] = ()
    """What there is to be tried, in such rounds."""
    tokens: float = 1.0
    """Of each request, on average."""


_NOTHING_KNOWN = Expectation()


@dataclass(frozen=True)
class Decision:
    """What the round that is launched now does."""

    drafts: int
    """Rows for drafts, over all requests; the device gives them to the likeliest."""
    proposers: tuple[int, ...]
    """Who proposes at the end of the round; the others only catch up."""
    steps: int
    """How far proposers that pay by steps draft; 0 where none of them is awake."""
    explores: bool = False
    """Whether this is tried in order to learn, not because it is believed to be best."""
    expected: Expectation = _NOTHING_KNOWN

    @property
    def action(self) -> Action:
        """Who proposes, and how far."""
        return self.proposers, self.steps


class Landed(NamedTuple):
    """What a round turned out to be."""

    device_seconds: float | None
    """None where nobody measured it."""
    host: HostSample | None
    """What the host did between the report before and this one; None where that tells nothing."""
    verified: int
    """Drafts that got a row, over all requests."""
    accepted: float
    drafting: int
    """Requests that had drafts verified or have some on offer now."""


class RoundCosts(Protocol):
    """Believed seconds of the device's rounds."""

    @property
    def noise(self) -> float:
        """Relative deviation of a round's time from what is believed."""
        ...

    def actions(self, requests: int) -> Sequence[Action]:
        """What rounds of so many requests may propose with; ``NOTHING`` first."""
        ...

    def with_prompts(self, requests: int, action: Action) -> Action:
        """What a round that carries prompts proposes with where ``action`` is wanted: rounds with
        prompts may come in fewer kinds."""
        ...

    def with_drafts(self, requests: int, action: Action) -> Action:
        """What a round proposes with that verifies drafts where ``action`` is wanted: of those that
        propose nothing, none may have room for drafts."""
        ...

    def table(
        self, requests: int, prompt_rows: int, action: Action, most: int, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n], float64 [n]): numbers of drafts that are worth considering, rising from 0 to
        about ``most``, and the seconds of a round that verifies so many, with ``prompt_rows`` rows
        of prompts, and then proposes as ``action`` says."""
        ...

    def observe(
        self,
        requests: int,
        prompt_rows: int,
        action: Action,
        drafts: int,
        context: float,
        seconds: float,
    ) -> bool:
        """Such a round took so long. Returns whether that told little: it is known better than one
        measurement tells, and nothing contradicts it."""
        ...

    def pass_over(self) -> None:
        """There was a round of which nothing is to be learnt."""
        ...
