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

from collections.abc import Mapping
from functools import partial

import numpy as np

from surefoot.sampling.params import SamplingStages
from surefoot.speculation.accounts import Accounts
from surefoot.speculation.decisions import (
    NOTHING,
    Action,
    Decision,
    Expectation,
    Landed,
    RoundCosts,
    Situation,
)
from surefoot.speculation.exploring import Budget, Trial, Trials, rounds_apart
from surefoot.speculation.fairness import Fairness
from surefoot.speculation.following import Following
from surefoot.speculation.goodput import gains_of
from surefoot.speculation.holding import DecidedAnew, Held, waits_for_host
from surefoot.speculation.host_costs import HostCosts
from surefoot.speculation.learning import Learning
from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.offers_at_hand import OffersAtHand
from surefoot.speculation.plans import Case, Plan
from surefoot.speculation.restrained import Restrained
from surefoot.speculation.size import GREEDY
from surefoot.speculation.weighing import Weighing

_OTHER_TEXTS = 128
"""Rounds of the one kind, drawn or greedy, after which offers tell little of the other's: drafts of
likeliest tokens are accepted more often."""


class Planner:
    """Decides every round of an engine."""

    def __init__(
        self,
        costs: RoundCosts,
        host: HostCosts,
        width: int,
        drafters: Mapping[int, int] | None = None,
        overlap: bool = True,
        others: Mapping[SamplingStages, RoundCosts] | None = None,
        trees: Mapping[int, int] | None = None,
    ) -> None:
        """``width``: most drafts of a request; ``drafters`` and ``trees`` as of ``OfferMemory``.
        ``overlap``: whether the host works while the device does, so that a round takes the longer
        of both times, not their sum. ``others``: costs by kind of sampling, of rounds that do more
        than take the likeliest tokens."""
        self.offers = OfferMemory(width, drafters, overlap, trees)
        self._decided_anew = DecidedAnew(overlap)
        self._weighings = {
            kind: Weighing(each, host, self.offers, overlap, self._decided_anew)
            for kind, each in {GREEDY: costs, **(others or {})}.items()
        }
        self.weighing = self._weighings[GREEDY]
        """For the kind of sampling of the last decision."""
        self.fairness = Fairness()
        self.budget = Budget()
        self.accounts = Accounts(self.budget)
        self._learning = Learning(self.accounts)
        self._at_hand = OffersAtHand(self.offers)
        self._trials = Trials()
        self._second: Trial | None = None
        """What the last round tried, if that takes another round."""
        self._last = Decision(0, *NOTHING)
        self.held = Held()
        self._following = Following()
        self.restrained = Restrained()
        self._unweighed = 0
        """Rounds since actions were weighed."""
        self._since = {False: 0, True: 0}
        """Rounds since the last one that only took likeliest tokens, and since one that drew some.
        """
        self.decided = False
        """Whether the last decision was made anew, and has somebody propose."""
        self._entered = set[int]()
        """Slots of those of whom no round has sampled yet."""

    @property
    def costs(self) -> RoundCosts:
        """For the kind of sampling of the last decision."""
        return self.weighing.costs

    def _know_kind(self, situation: Situation) -> None:
        """Take what is known of rounds with the situation's sampling."""
        self.weighing = self._weighings.get(situation.kind, self._weighings[GREEDY])

    def _follow_kind(self, situation: Situation, rounds: int) -> None:
        """So many ``rounds`` after the last decision, another one is made. What was tried long ago
        with texts of this kind is tried again without delay."""
        drawn = situation.kind.noise
        self._since[not drawn] += rounds
        if self._since[drawn] > _OTHER_TEXTS:
            self.budget.hasten()
        self._since[drawn] = 0

    # --- deciding -----------------------------------------------------------------------------

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Requests enter ``slots``, int64 [n], that may get so many ``tokens``, int64 [n]."""
        self.fairness.admit(slots, tokens)
        self._entered.update(slots.tolist())

    def decide(self, situation: Situation) -> Decision:
        """What to launch now."""
        # Also while a decision holds: what a trial found is told some rounds later.
        tried = self._at_hand.read(situation)
        if tried and self.weighing.weigh_tried(situation, tried, self.held.left):
            self.held.break_off()
        decision = self._held(situation) or self._anew(situation)
        self._last = decision
        self.fairness.launched(situation.slots)
        if decision.expected.trial is None and situation.requests:
            prompts, proposing = situation.prompt_rows > 0, bool(decision.proposers)
            self._decided_anew.passed(situation.requests, prompts, proposing, self.decided)
        return decision

    def _held(self, situation: Situation) -> Decision | None:
        """The last decision, if it holds for this round, too, with what is expected of it."""
        on_offer = self.costs.actions(situation.requests)
        # Who comes next, and what prompts take, is another question than one request's offers.
        anew = self.held.follows and (self._entered or situation.prompt_rows)
        held = None if anew else self.held.next(situation, on_offer)
        if held is None:
            return None
        self.decided = False
        if self.held.follows:
            chances = self._at_hand.chances(situation, held.action)
            return self._following.next(held, chances, self.weighing.margin)
        if situation.prompt_rows or held.expected.prompt_seconds:
            return self._beside_other_prompts(held, situation)
        return held

    def _anew(self, situation: Situation) -> Decision:
        """What is best now, or tried."""
        rounds = self.held.end(situation)
        self._know_kind(situation)
        self._follow_kind(situation, rounds)
        if self._entered:
            self._begin_alone(situation)
        actions = self.weighing.allowed(situation)
        plain, prompts = self.weighing.plain_seconds(situation)
        chances = self._at_hand.chances(situation, self._last.action)
        owed = self.fairness.owed(situation.slots, plain, prompts, rounds)
        self._weigh(situation, actions, plain, rounds)
        case = Case(situation, actions, chances, owed, plain)
        best = self._best(case)
        trials = self._trials.beside(self.weighing.best, actions)
        action, plan, trial, without = self._explored(case, *best, trials, rounds)
        # What other proposers offer is verified a round later; what that loses is the trial's, too.
        before, last = self._last.expected.trial, self._last
        quiet = action == NOTHING and not plan.drafts
        second = last.explores and before is not None and not before.verify and not quiet
        charged = trial or (before if second else None)
        tokens = 1.0 + float(plan.gains.mean())
        expected = Expectation(plan.seconds, without, plain, prompts, charged, trials, tokens)
        decision = Decision(plan.drafts, *action, trial is not None, expected)
        self.decided = bool(action[0])
        known = self._at_hand.own and last.drafts and not last.explores
        if situation.requests > 1 and chances is not None and known:
            # Of a number that was chosen for these very offers, some would seem to gain too much.
            count = min(last.drafts, chances.size)
            self.fairness.compare(situation.slots, last.proposers, gains_of(chances, count))
        slower = plan.seconds / owed.plain
        bearable = self.fairness.decided(situation.slots, action[0], tokens - 1.0, slower)
        if charged is None:
            self._hold(situation, decision, len(actions) > 1, bearable)
        return decision

    def _weigh(
        self, situation: Situation, actions: tuple[Action, ...], plain: float, rounds: int
    ) -> None:
        """Choose the best action, if what is known of them may have changed."""
        self._unweighed += rounds
        settled = self.weighing.is_settled(situation, actions, self._unweighed)
        if settled or self._only_waits(situation, actions):
            return
        least = partial(self.fairness.least, situation.slots)
        self.weighing.weigh(situation, actions, plain, self._unweighed, least)
        self._unweighed = 0

    def _hold(self, situation: Situation, decision: Decision, choice: bool, most: int) -> None:
        """Have a decision that tries nothing hold for a while. ``choice`` and ``most`` as of
        ``Held.grant``."""
        action, last = decision.action, self._last
        # Another action finds nothing on offer yet, or what the one before it has left.
        there = set(action[0]).issubset(last.proposers) and action[1] <= last.steps
        lasts = there and bool(decision.drafts) == bool(action[0])
        if lasts and not self.weighing.undecided:
            host = self.weighing.host_seconds(situation, action)
            self.held.grant(situation, decision, host, self.weighing.overlap, choice, most)
        follows = there and not self.held.left
        if follows and self._following.begin(self.weighing, situation, decision, self.offers.width):
            self.held.follow(decision)

    def _begin_alone(self, situation: Situation) -> None:
        """Of a request that begins when there is no other, what all before it offered is expected,
        not what the last one did."""
        slots = situation.slots
        if situation.requests == 1 and slots is not None:
            if int(slots[0]) not in self._entered:
                # Others' prompts run beside one that goes on.
                return
            self.offers.renew()
            self.weighing.renew()
        if situation.requests:
            self._entered.clear()

    def _restrains(self, situation: Situation) -> bool:
        """Whether nobody may be slowed now. Whoever is alone is slowed by nobody, and what held for
        a crowd ends with it."""
        return situation.requests > 1 and self.fairness.restraint.holds

    def _only_waits(self, situation: Situation, actions: tuple[Action, ...]) -> bool:
        """Whether nobody proposes until everybody is ahead again, whatever may be best then: the
        device is not to wait for the host to find that out."""
        waits = self._restrains(situation) and self.restrained.action == NOTHING
        return waits and self.weighing.best in actions

    def _beside_other_prompts(self, held: Decision, situation: Situation) -> Decision:
        """What was decided beside other prompts, or none, with what is expected of this round."""
        before, action = held.expected, self._possible(situation, held.action)
        _, prompts = self.weighing.plain_seconds(situation, before.plain_seconds)
        more = prompts - before.prompt_seconds
        expected = Expectation(
            before.seconds + more,
            before.without_trial + more,
            before.plain_seconds,
            prompts,
            before.trial,
            before.trials,
            before.tokens,
        )
        return Decision(held.drafts, *action, held.explores, expected)

    def _best(self, case: Case) -> tuple[Action, Plan]:
        """What is best for all together, if it is fair to each; else, and for some rounds, the best
        of what slows nobody."""
        situation, owed = case.situation, case.owed
        if not self._restrains(situation):
            best = self.weighing.best
            action = self._possible(situation, best if best in case.actions else NOTHING)
            plan = case.verify(self.weighing, action)
            if situation.requests < 2 or owed.fair(plan.seconds, plan.gains):
                return action, plan
            enough = self.weighing.needed_to_go_on(situation, owed.plain)
            self.fairness.restrain(situation.slots, enough)
            self.restrained.begin(self.weighing, case, self.fairness.restraint.pace)
        action = self._possible(situation, self.restrained.possible(case.actions))
        plan = case.verify(self.weighing, action)
        known = self._at_hand.own and self._last.action == action != NOTHING
        if known and not self.restrained.found(plan, owed.plain):
            action = self._possible(situation, NOTHING)
            plan = case.verify(self.weighing, action)
        return action, plan

    def _explored(
        self, case: Case, action: Action, plan: Plan, trials: tuple[Trial, ...], rounds: int
    ) -> tuple[Action, Plan, Trial | None, float]:
        """The action and the plan that are believed best, or those of a trial with it; and the
        seconds that the round would take without."""
        trial, tried, chances = self._second, self._last.action, case.chances
        self._second = None
        spare = chances is not None and plan.drafts < np.count_nonzero(chances)
        if trial is not None and tried in case.actions:
            # In a second round there is to verify what the first had others offer.
            plan = case.verify(self.weighing, tried)
            verify = [t for t in trials if t.verify] if spare and not plan.drafts else []
            if verify and (another := self.budget.next(verify)):
                return tried, case.verify(self.weighing, tried, beyond=0), another, plan.seconds
            return tried, plan, trial, plan.seconds
        if self.weighing.undecided:
            # Trials are against what is best, and whoever arrives would wait for them.
            return action, plan, None, plan.seconds
        able = [trial for trial in trials if spare or not trial.verify]
        # Neither a trial nor what comes after it holds.
        drafting = action if action[0] else case.actions[-1]
        host = self.weighing.host_seconds(case.situation, drafting, decided=1.0)
        late = waits_for_host(host, plan.seconds)
        restrained, requests = self._restrains(case.situation), case.situation.requests
        trial = self.budget.next(able, rounds, rounds_apart(requests, restrained, late))
        if trial is None:
            return action, plan, None, plan.seconds
        if trial.verify:
            more = case.verify(self.weighing, action, beyond=plan.drafts)
            # Rounds without proposers may have no room for drafts.
            return action, more, trial if more.drafts > plan.drafts else None, plan.seconds
        other = self.weighing.to_try(trial, case.situation, case.actions, case.plain)
        other = self._possible(case.situation, other)
        trial = trial if other != action else None
        self._second = trial if other != NOTHING else None
        return other, case.verify(self.weighing, other), trial, plan.seconds

    def _possible(self, situation: Situation, action: Action) -> Action:
        """What this round proposes with where ``action`` is wanted."""
        if situation.hosted is not None:
            action = self.costs.with_drafts(situation.requests, action)
        if not situation.prompt_rows:
            return action
        return self.costs.with_prompts(situation.requests, action)

    def needs_offers(self, decision: Decision) -> bool:
        """Whether the next situation is to have what a round that was decided so left on offer.
        While a decision holds it is not looked at, unless it was tried what there would be."""
        held = self.held.left and not self.held.follows
        return not held or decision.expected.trial is not None

    # --- learning -----------------------------------------------------------------------------

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        """Learn from a round that was decided so."""
        self._know_kind(situation)
        trial = decision.expected.trial
        found = trial is not None and not trial.beside and decision.drafts > 0
        self._at_hand.landed(decision.action, found)
        if situation.requests:
            self._learning.landed(self.weighing, decision, situation, outcome)
