"""What the next round does: how many drafts it verifies, and who drafts how far for the one after.

One goodput model for every engine and device: committed tokens per second, ``(requests + expected
accepted drafts) / seconds``, of every action (which proposers are awake, and how far those with
steps draft), with seconds from ``RoundCosts`` and ``HostCosts``.

How an engine uses it::

    decision = planner.decide(situation)          # before every launch
    planner.landed(decision, situation, outcome)  # when that round's report was read, in order

Actions are weighed by the offers that their proposers made lately (``Offers``), the number of
drafts to verify by the chances of those at hand. A small share of the time goes to what is not
believed to be best (``exploring``), so that no belief stays wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import (
    NOTHING,
    Action,
    Decision,
    Expectation,
    Landed,
    RoundCosts,
    Situation,
)
from surefoot.speculation.exploring import Budget, Trial
from surefoot.speculation.goodput import best_count, gains_of, nearest_count
from surefoot.speculation.host_costs import HostCosts
from surefoot.speculation.offers import OfferMemory
from surefoot.speculation.paces import Fairness, Owed
from surefoot.speculation.size import GREEDY
from surefoot.speculation.weighing import Weighing

BARREN_ROUNDS = 4096
"""Rounds in a row with drafts on offer and none verified, after which a line is logged."""
MANY, MOST_HELD, IDLE_HELD = 8, 3, 15
"""Where rounds wait for the host, time spent on deciding is lost, and what is best for many
requests changes slowly: a decision then holds for one more round for each ``MANY`` requests, up to
some. That nobody shall propose to them holds longer, also where the host's time adds to the
device's."""
_HOST_BOUND = 0.75
"""The part of a round's time that the host needs, from which on rounds wait for it."""
_BEYOND = 1.5
"""How many times longer rounds may be than they would be, to learn about more drafts."""
_UNLIKELY = 3.0
"""Standard deviations that noise does not explain."""
_USUAL = 0.1
_RECENT = 0.02
"""Weight of a round in running averages."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a round verifies."""

    drafts: int
    seconds: float
    gains: np.ndarray
    """float64 [requests, or 1 where there are none]: drafts that are expected to be accepted."""


class Planner:
    """Decides every round of an engine."""

    def __init__(
        self,
        costs: RoundCosts,
        host: HostCosts,
        width: int,
        drafters: Sequence[int] = (),
        overlap: bool = True,
        others: Mapping[SamplingStages, RoundCosts] | None = None,
    ) -> None:
        """``width``: most drafts of a request. ``drafters``: the proposers that pay by steps.
        ``overlap``: whether the host works while the device does, so that a round takes the longer
        of both times, not their sum. ``others``: costs by kind of sampling, of rounds that do more
        than take the likeliest tokens."""
        self.host = host
        self.offers = OfferMemory(width, frozenset(drafters))
        self._weighings = {
            kind: Weighing(each, host, self.offers, overlap)
            for kind, each in {GREEDY: costs, **(others or {})}.items()
        }
        self.weighing = self._weighings[GREEDY]
        """For the kind of sampling of the last decision."""
        self.fairness = Fairness()
        self.budget = Budget()
        self.explored = 0
        """Rounds that explored."""
        self.barren = 0
        """Rounds in a row that had drafts on offer and verified none."""
        self.believed_seconds = self.measured_seconds = 0.0
        """Of late rounds, on average."""
        self.saved_seconds = 0.0
        """What plain rounds would have taken for the tokens of those with drafts, less what these
        took. A plain round is never believed to take longer than the measured one, which had more
        rows: so the sum of what was saved is bounded, whatever was believed."""
        self._usual_tokens = self._usual_rounds = 1.0
        """Of rounds that try nothing, on the running average: tokens of a request, and the time in
        plain rounds."""
        self._depth = 0
        self._second: Trial | None = None
        """What the last round tried, if that takes another round."""
        self._last = Decision(0, *NOTHING)
        self._held = self._holds = 0
        """Rounds for which the last decision still holds, and held at first."""
        self._asked: tuple[tuple[int, ...], int, SamplingStages] | None = None
        self._asked_by = 0
        """What it was made for, and for how many."""
        self._calm = NOTHING
        """What is best of what slows nobody."""
        self._reported = NOTHING
        self._unread = False
        self._trials_for: tuple[tuple[Action, ...], Action] | None = None
        self._trials_there: tuple[Trial, ...] = ()

    @property
    def costs(self) -> RoundCosts:
        """For the kind of sampling of the last decision."""
        return self.weighing.costs

    def _attend(self, situation: Situation) -> None:
        """Take what is known of rounds with the situation's sampling."""
        self.weighing = self._weighings.get(situation.kind, self._weighings[GREEDY])

    # --- deciding -----------------------------------------------------------------------------

    def admit(self, slots: np.ndarray) -> None:
        """Requests enter ``slots``, int64 [n]."""
        self.fairness.paces.admit(slots)

    def decide(self, situation: Situation) -> Decision:
        """What to launch now."""
        decision = self._next(situation)
        self.fairness.launched(situation.slots)
        return decision

    def _next(self, situation: Situation) -> Decision:
        asked = situation.proposers, situation.draft_limit, situation.kind
        # Of a crowd one may come or go.
        same = abs(situation.requests - self._asked_by) * MANY <= self._asked_by
        same = same and asked == self._asked and situation.hosted is None
        if self._held and same and not situation.prompt_rows:
            self._held -= 1
            return self._last
        rounds, self._asked, self._held = 1 + self._holds - self._held, asked, 0
        self._asked_by = situation.requests
        self._attend(situation)
        self._read(situation)
        actions = self.weighing.allowed(situation)
        plain, prompts = self.weighing.plain_seconds(situation)
        self.weighing.weigh(situation, actions, plain, rounds)
        chances = self._with_hosted(situation, self._at_hand(situation))
        owed = self.fairness.owed(situation.slots, plain, prompts, rounds)
        action, plan = self._best(situation, actions, chances, owed)
        without = plan.seconds
        trials = self._trials(actions)
        spare = chances is not None and plan.drafts < np.count_nonzero(chances)
        trial, tried = self._second, self._last.action
        self._second = None
        if trial is not None and tried in actions:
            # In a second round there is to verify what the first had others offer.
            action = tried
            plan = self._verify(situation, action, chances, owed)
            without = plan.seconds
            verify = [t for t in trials if t.verify] if spare and not plan.drafts else []
            if verify and (more := self.budget.next(verify)):
                trial = more
                plan = self._verify(situation, action, chances, owed, beyond=0)
        else:
            trial = self.budget.next([t for t in trials if spare or not t.verify], rounds)
            if trial is not None and trial.verify:
                plan = self._verify(situation, action, chances, owed, beyond=plan.drafts)
            elif trial is not None:
                other = self._action_of(trial, actions, situation, plain)
                other = self._possible(situation, other)
                trial = trial if other != action else None
                action = other
                plan = self._verify(situation, action, chances, owed)
                self._second = trial if action != NOTHING else None
        # What other proposers offer is verified a round later; what that loses is the trial's, too.
        before, last = self._last.expected.trial, self._last
        charged = trial or (before if last.explores and before and not before.verify else None)
        self._last = Decision(
            plan.drafts,
            *action,
            trial is not None,
            Expectation(plan.seconds, without, plain, prompts, charged, trials),
        )
        self.fairness.decided(plan.gains, plan.seconds / owed.plain)
        # Another action finds nothing on offer yet, or what the one before it has left.
        lasts = action == last.action and bool(plan.drafts) == bool(action[0])
        if charged is None and lasts and situation.hosted is None and not situation.prompt_rows:
            host, few = self.weighing.host_seconds(situation, action), situation.requests // MANY
            waits = host >= _HOST_BOUND * plan.seconds
            if action == NOTHING and (waits or not self.weighing.overlap):
                self._held = IDLE_HELD if few else 0
            elif waits:
                self._held = min(few, MOST_HELD)
        self._holds = self._held
        return self._last

    def _best(
        self,
        situation: Situation,
        actions: tuple[Action, ...],
        chances: np.ndarray | None,
        owed: Owed,
    ) -> tuple[Action, _Plan]:
        """What is best for all together, if it is fair to each; until those who lack something have
        it again, what slows nobody."""
        if situation.requests < 2 or not self.fairness.turns.resting:
            action = self._possible(situation, self.weighing.best)
            plan = self._verify(situation, action, chances, owed)
            if situation.requests < 2 or owed.fair(plan.seconds, plan.gains):
                return action, plan
            self.fairness.turns.rest()
            self._calm = self.weighing.calm(situation, actions, owed.plain)
        action = self._possible(situation, self._calm if self._calm in actions else NOTHING)
        return action, self._verify(situation, action, chances, owed)

    def _with_hosted(self, situation: Situation, chances: np.ndarray | None) -> np.ndarray | None:
        """``chances`` as of ``_at_hand``, and what the host has on offer."""
        hosted = situation.hosted
        if hosted is None:
            return chances
        if chances is None:
            return np.nan_to_num(hosted)
        return np.where(np.isnan(hosted), chances, hosted)

    def _possible(self, situation: Situation, action: Action) -> Action:
        """What this round proposes with where ``action`` is wanted."""
        if situation.hosted is not None:
            action = self.costs.with_drafts(situation.requests, action)
        if not situation.prompt_rows:
            return action
        return self.costs.with_prompts(situation.requests, action)

    def _read(self, situation: Situation) -> None:
        """Remember the offers of a report that landed since the last decision."""
        if not self._unread or situation.chances is None or situation.whose is None:
            return
        self._unread = False
        proposers, steps = self._reported
        steps = min(steps, max(1, situation.draft_limit))
        if proposers:
            self.offers.record(situation.chances, situation.whose, proposers, steps)

    def _at_hand(self, situation: Situation) -> np.ndarray | None:
        """float32 [requests, K]: chances of the drafts that this round finds on offer, as far as
        they are known; None where there are none."""
        proposers, steps = self._last.action
        if not proposers or not situation.requests:
            return None
        reported, reported_steps = self._reported
        if situation.chances is None or situation.whose is None or reported != proposers:
            return self.offers.latest(situation.requests, proposers, steps)
        chances = situation.chances
        unknown = np.isnan(chances[:, 0])
        chances = self.offers.continued(chances, situation.whose, reported_steps, steps)
        if unknown.any():
            chances = chances.copy()
            chances[unknown] = self.offers.latest(int(unknown.sum()), proposers, steps)
        return chances

    def _verify(
        self,
        situation: Situation,
        action: Action,
        chances: np.ndarray | None,
        owed: Owed,
        beyond: int | None = None,
    ) -> _Plan:
        """What to verify in a round that then proposes so. ``beyond``: more than so many drafts,
        which are believed best."""
        offered = 0 if chances is None else int(np.count_nonzero(chances))
        nothing = np.zeros(max(1, situation.requests))
        if not offered and action == NOTHING:
            return _Plan(0, owed.plain, nothing)
        drafts, seconds = self.weighing.table(situation, action, offered, situation.prompt_rows)
        if chances is None or not offered:
            return _Plan(0, float(seconds[0]), nothing)
        fair = owed.prompts, owed.plain, owed.ahead
        if beyond is None:
            at = best_count(chances, drafts, seconds, *fair, margin=self.weighing.margin)
        elif beyond == 0:
            at = nearest_count(chances, drafts, seconds, *fair)
        else:
            at = int(np.searchsorted(drafts, beyond))
            most = int(np.searchsorted(seconds, _BEYOND * seconds[at], side="right")) - 1
            at = min(max(most, at + 1), len(drafts) - 1)
        count = min(int(drafts[at]), offered)
        return _Plan(count, float(seconds[at]), gains_of(chances, count))

    # --- exploring ----------------------------------------------------------------------------

    def _trials(self, actions: tuple[Action, ...]) -> tuple[Trial, ...]:
        """What may be tried beside the best action."""
        if len(actions) < 2:
            return ()
        proposers = self.weighing.best[0]
        if (actions, self.weighing.best) != self._trials_for:
            trials = [
                Trial(False, chosen, proposers) for chosen in dict(actions) if chosen != proposers
            ]
            if sum(action[0] == proposers for action in actions) > 1:
                trials.append(Trial(False, proposers, proposers))
            trials.append(Trial(True, proposers, proposers))
            self._trials_for, self._trials_there = (actions, self.weighing.best), tuple(trials)
        return self._trials_there

    def _action_of(
        self, trial: Trial, actions: tuple[Action, ...], situation: Situation, plain: float
    ) -> Action:
        """Others are tried as far as now, or as they promise most; those that are awake to each
        other depth in turn, the longest first."""
        own = [action for action in actions if action[0] == trial.proposers]
        if trial.proposers == self.weighing.best[0]:
            own.remove(self.weighing.best)
            self._depth += 1
            return own[-self._depth % len(own)]
        if (same := (trial.proposers, self.weighing.best[1])) in own:
            return same
        return max(own, key=lambda action: self.weighing.promise(situation, action, plain).rate)

    # --- learning -----------------------------------------------------------------------------

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        """Learn from a round that was decided so."""
        self._attend(situation)
        self._reported, self._unread = decision.action, True
        s, expected = situation, decision.expected
        if not s.requests:
            return
        proposing = bool(decision.proposers)
        host_seconds = self.host.seconds(s.requests, outcome.drafting, proposing)
        if outcome.host is not None:
            self.host.observe(outcome.host)
            host_seconds = outcome.host.seconds
        if outcome.device_seconds is None:
            return
        self.costs.observe(
            s.requests, s.prompt_rows, decision.action, decision.drafts, s.context,
            outcome.device_seconds,
        )  # fmt: skip
        seconds = self.weighing.together(outcome.device_seconds, host_seconds)
        self.believed_seconds += _RECENT * (expected.seconds - self.believed_seconds)
        self.measured_seconds += _RECENT * (seconds - self.measured_seconds)
        if outcome.verified and not s.prompt_rows:
            plain = min(expected.plain_seconds, seconds)
            self.saved_seconds += plain * (1 + outcome.accepted / s.requests) - seconds
        self._account(expected, seconds, outcome.accepted / s.requests)
        self.explored += decision.explores
        self.barren = 0 if outcome.verified or not outcome.drafting else self.barren + 1
        if self.barren == BARREN_ROUNDS:
            _log.warning("no draft was verified in %d rounds that had some on offer", self.barren)

    def _account(self, expected: Expectation, seconds: float, accepted: float) -> None:
        """Time earns credit for trials; what they lose is taken off it. Where the measured time
        does not contradict what was believed, that is less noisy; where it does, it is no longer
        than noise explains: hiccups of the machine are not the trial's."""
        plain = expected.plain_seconds
        if not expected.trials or plain <= 0:
            return
        noise = _UNLIKELY * self.costs.noise * expected.seconds
        if seconds > expected.seconds - noise:
            seconds = min(max(seconds - noise, expected.seconds), expected.seconds + noise)
        took = max(0.0, (seconds - expected.prompt_seconds) / plain)
        self.budget.earn(expected.trials, took)
        if expected.trial is None:
            self._usual_tokens += _USUAL * (1.0 + accepted - self._usual_tokens)
            self._usual_rounds += _USUAL * (took - self._usual_rounds)
        elif expected.trial.verify:
            # Paid in full, whatever it gives: drafts that are believed to be unfair to somebody
            # must not pay for themselves.
            without = (expected.without_trial - expected.prompt_seconds) / plain
            self.budget.pay(expected.trial, took - without)
        else:
            usual = (1.0 + accepted) * self._usual_rounds / self._usual_tokens
            self.budget.pay(expected.trial, took - usual)
