"""Which action is best: who should propose, and how far, by what they offered lately."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from surefoot.speculation.decisions import (
    NOTHING,
    PLAIN,
    Action,
    Promise,
    RoundCosts,
    Situation,
    is_other_load,
)
from surefoot.speculation.exploring import Trial
from surefoot.speculation.holding import DecidedAnew
from surefoot.speculation.host_costs import HICCUP, HostCosts
from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.paces import MIN_PACE, Proposers

_BELIEVED = 0.25
"""A belief about a time is as noisy as the mean of some sixteen rounds."""
_WEIGH_EVERY, _MOST_TURNS = 5, 3
"""Rounds between two looks whether another action is better; and of those since the last decision,
how many count at most: where decisions hold, one of them is to weigh no more than one action."""
_PER_STEP, _FAR = 4.0, 4.25
_STEPS = np.arange(0.0, _FAR + 0.1, 1 / _PER_STEP)
_EXCESS = [
    math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) - 0.5 * x * math.erfc(x / math.sqrt(2))
    for x in _STEPS.tolist()
]
"""Of a normal variable whose mean lies so many quarters of standard deviations below a limit: by
how many it exceeds the limit, on average."""
_LESS_LATE = 2.5
"""Where one more round is in flight, it makes up for most of what the host is late: as if that
varied so many times less (by simulation of both, late by a fifth to four fifths of their time)."""
_CROWD, _STALE = 16, 32
"""Of so many requests, decisions take the host long. Where nothing new was offered, actions are
weighed after so many rounds, whose times may have changed."""
_WHILE_PROMPTS_RUN = 4
"""Actions that are weighed in one decision under another load whose prompts are under way: all of
them take the host longer than a small model's device needs for those."""
_WORTH_BEGINNING = 8
"""Rounds that verify something, for which a crowd begins to draft again after it was restrained:
the one before them verifies nothing, and slows everybody."""
_CHOICES = 256
"""Of requests, for which it is known what they leave of the actions."""


def _alike(proposers: Proposers) -> float:
    """What who gains least has of the mean of all gains, where nobody says otherwise."""
    return 1.0


class Weighing:
    """Weighs actions by tokens a second: offers of late, times of the device and the host."""

    def __init__(
        self,
        costs: RoundCosts,
        host: HostCosts,
        offers: OfferMemory,
        overlap: bool,
        anew: DecidedAnew | None = None,
    ) -> None:
        """``overlap`` as in ``Planner``; ``anew``: what others learn, too."""
        self.costs = costs
        self.host = host
        self.offers = offers
        self.overlap = overlap
        self.anew = anew or DecidedAnew(overlap)
        self.best = NOTHING
        self._promises: dict[Action, Promise] = {}
        """Of each action, when it was weighed last."""
        self._turn = self._depth = 0
        """What is compared with the best action next, and which depth is tried next."""
        self._weighed_for = 0
        """Requests when all actions were compared with each other; 0: they never were."""
        self._unweighed: list[Action] = []
        """What is still to be weighed for that."""
        self._at_once = 0
        """How much of it in one decision."""
        self._least = _alike
        """As of ``weigh``, the last time."""
        self._reports = -1
        """Of offers, that were known when actions were weighed last."""
        self._allowed: dict[tuple[Sequence[Action], tuple[int, ...], int], tuple[Action, ...]] = {}

    def allowed(self, situation: Situation) -> tuple[Action, ...]:
        """What the requests' choices leave of the actions."""
        s = situation
        if not s.requests or s.draft_limit < 1 or not s.proposers:
            return (NOTHING,)
        there = self.costs.actions(s.requests)
        key = there, s.proposers, s.draft_limit
        found = self._allowed.get(key)
        if found is None:
            actions = _able(there, s.proposers)
            # A drafter whose shortest draft is longer than anybody wants is of use all the same.
            shortest = dict(reversed(actions))
            found = tuple(a for a in actions if a[1] <= max(s.draft_limit, shortest[a[0]]))
            if len(self._allowed) >= _CHOICES:
                self._allowed.clear()
            self._allowed[key] = found
        return found

    def plain_seconds(
        self, situation: Situation, alone: float | None = None
    ) -> tuple[float, float]:
        """Seconds of a round without drafts, proposers and prompts, and what prompts add.
        ``alone``: the former, where it is known."""
        if alone is None:
            alone = self.seconds(situation, NOTHING, alone=True)
        if not situation.prompt_rows:
            return alone, 0.0
        return alone, self.seconds(situation, NOTHING) - alone

    def together(self, device: float, host: float) -> float:
        """Seconds of a round that took the device and the host so long."""
        return max(device, host) if self.overlap else device + host

    def expected(self, device: np.ndarray, host: float, spread: float) -> np.ndarray:
        """Seconds of rounds that take the device (float64 [n], rising) and the host so long on
        average; ``spread``: standard deviation of the latter. Where both take about as long, now
        the one is late and now the other: the longer of the averages would be too little."""
        if not self.overlap:
            return device + host
        if device[0] - host >= spread * _FAR:
            return device
        late = np.where(device - host < HICCUP, spread / _LESS_LATE, spread)
        apart = np.abs(device - host) / np.maximum(late, 1e-9)
        return np.maximum(device, host) + late * np.interp(apart, _STEPS, _EXCESS)

    def table(
        self, situation: Situation, action: Action, most: int, alone: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """As of ``RoundCosts``, the host included; ``alone``: as if there were no prompts."""
        s = situation
        rows = 0 if alone else s.prompt_rows
        drafts, seconds = self.costs.table(s.requests, rows, action, most, s.context)
        host = self.host_seconds(s, action, alone)
        spread = self._spread(s, action, host) if self.overlap else 0.0
        return drafts, self.expected(seconds, host, spread)

    def seconds(self, situation: Situation, action: Action, alone: bool = False) -> float:
        """As of ``table``, of a round that verifies nothing."""
        s = situation
        prompts = 0 if alone else s.prompt_rows
        device = float(self.costs.table(s.requests, prompts, action, 0, s.context)[1][0])
        host = self.host_seconds(s, action, alone)
        if not self.overlap:
            return device + host
        spread = self._spread(s, action, host)
        # With arrays of one number, every round with prompts would wait longer for this.
        if device - host >= spread * _FAR:
            return self.together(device, host)
        late = max(spread / _LESS_LATE if device - host < HICCUP else spread, 1e-9)
        at, part = divmod(abs(device - host) / late * _PER_STEP, 1.0)
        if at >= len(_EXCESS) - 1:
            return max(device, host) + late * _EXCESS[-1]
        before, behind = _EXCESS[int(at)], _EXCESS[int(at) + 1]
        return max(device, host) + late * (before + part * (behind - before))

    def host_seconds(
        self,
        situation: Situation,
        action: Action,
        alone: bool = False,
        decided: float | None = None,
    ) -> float:
        """Of the host, for a round that proposes so; ``alone`` as in ``table``. ``decided``: the
        part of such rounds, in which somebody proposes, that are decided anew; None: as usual."""
        s = situation
        drafting = s.requests * self.offers.share(action[0])
        prompts = 0 if alone else s.prompts
        if decided is None:
            decided = self._decided_anew(s, action)
        return self.host.seconds(s.requests, drafting, bool(action[0]), prompts, decided)

    def _spread(self, situation: Situation, action: Action, host: float) -> float:
        """As of ``expected``, of such rounds that take the host so long."""
        return self.host.spread(host, self._decided_anew(situation, action))

    def _decided_anew(self, situation: Situation, action: Action) -> float:
        """The part of such rounds that are decided anew, as usual."""
        return self.anew.of(situation.requests) if action[0] else 0.0

    @property
    def margin(self) -> float:
        """How much more than another an action must promise."""
        return 1.0 + _BELIEVED * self.costs.noise

    @property
    def undecided(self) -> bool:
        """Whether the load is another one, and it is known soon what is best now."""
        return bool(self._unweighed) and self._at_once > 1

    def is_settled(self, situation: Situation, actions: tuple[Action, ...], rounds: int) -> bool:
        """Whether a crowd's best action is that nobody proposes, and would be found again: by the
        same offers as not many ``rounds`` ago, and for as many requests, about."""
        if situation.requests < _CROWD or rounds >= _STALE:
            return False
        same = not (self._unweighed or is_other_load(situation.requests, self._weighed_for))
        told = self._reports != self.offers.reports
        return self.best == NOTHING and NOTHING in actions and same and not told

    def renew(self) -> None:
        """Another request is the only one now: what was best for the one before it tells little."""
        self._weighed_for = 0

    def weigh(
        self,
        situation: Situation,
        actions: tuple[Action, ...],
        plain: float,
        rounds: int = 1,
        least: Callable[[Proposers], float] = _alike,
    ) -> None:
        """Choose the best action, ``rounds`` after it was chosen last. ``least`` as of
        ``OfferMemory.promise``, by who proposes."""
        self._least = least
        self._reports = self.offers.reports
        if len(actions) < 2:
            # Rounds of prompts alone tell nothing of what is best for their requests.
            self.best = NOTHING if situation.requests else self.best
            return
        if self.best not in actions:
            self.best = self._first_of(actions)
        if is_other_load(situation.requests, self._weighed_for):
            leaving = 1 < situation.requests < self._weighed_for
            arriving = bool(situation.prompt_rows) and self.overlap
            # While a crowd leaves, rounds are short, and wait for it: one after the other.
            self._at_once = 1 if leaving else _WHILE_PROMPTS_RUN if arriving else len(actions)
            self._weighed_for = situation.requests
            self._unweighed = [self.best, *(each for each in actions if each != self.best)]
            if arriving and not leaving:
                # The device is idle now, and is not to wait for any of it.
                return
        if self._unweighed:
            self._choose_anew(situation, actions, plain)
            if self.undecided:
                return
        # One now and then, and none older than that: of old promises the best would be too good.
        before, self._turn = self._turn, self._turn + min(rounds, _MOST_TURNS)
        if before // _WEIGH_EVERY < self._turn // _WEIGH_EVERY:
            self._promises[self.best] = self.promise(situation, self.best, plain)
        if (before - 1) // _WEIGH_EVERY == (self._turn - 1) // _WEIGH_EVERY:
            return
        other = self._other(actions, (self._turn - 1) // _WEIGH_EVERY)
        self._promises[other] = self.promise(situation, other, plain)
        self._prefer(other, situation, plain)
        first = self._first_of([action for action in actions if action[0] == self.best[0]])
        if self._better(first, self.best):
            # Weighed a while ago. The neighbours in depth of a bad choice may all be worse than it.
            self._promises[first] = self.promise(situation, first, plain)
            self._prefer(first, situation, plain)

    def weigh_tried(self, situation: Situation, action: Action, left: int) -> bool:
        """A trial has just told what an action offers, while a decision holds for so many rounds
        that are ``left``. Returns whether another action is best now that gains a round in these:
        about as long as the host takes to decide anew."""
        if self._unweighed or action not in self.allowed(situation):
            return False
        before, (plain, _) = self._promise_of(self.best), self.plain_seconds(situation)
        self._promises[action] = self.promise(situation, action, plain)
        self._prefer(action, situation, plain)
        return left * (self._promise_of(self.best).rate / before.rate - 1.0) >= 1.0

    def _first_of(self, actions: Sequence[Action]) -> Action:
        """What promised most when it was weighed last."""
        return max(actions, key=lambda action: self._promise_of(action).rate)

    def _prefer(self, other: Action, situation: Situation, plain: float) -> None:
        """Take another action than the best so far, if it promises enough more."""
        if not self._better(other, self.best):
            return
        # Texts repeat themselves for a while, now and then, and nothing tells when but a look. That
        # is given up where it does not pay in the long run.
        looks = set(self.best[0]) - set(other[0]) - self.offers.drafters
        if looks:
            rates = (self.promise(situation, a, plain, False).rate for a in (self.best, other))
            if next(rates) > next(rates):
                return
        self.best = other

    def harmless(
        self, situation: Situation, actions: tuple[Action, ...], plain: float, waiting: float
    ) -> Action:
        """Of the actions whose rounds are fair to whoever gains nothing, the one that promises
        most, if that is more than ``waiting`` is worth. ``plain``: seconds of a round without
        drafts and proposers, prompts included."""
        fair = [a for a in actions if MIN_PACE * self.seconds(situation, a) <= plain]
        most = self._first_of((NOTHING, *fair))
        return most if self._promise_of(most).rate - 1.0 > waiting else NOTHING

    def worth_of_waiting(self, pace: float) -> float:
        """What all gain by plain rounds while nobody may be slowed, in tokens a second against such
        rounds. Who gains least is owed ``pace`` tokens in the time of one, and gets more: the best
        action may then take that from it, for a part of the time. (Drafts that are verified without
        slowing anybody leave it as it is.)"""
        best = self._promise_of(self.best)
        lost = self._lost(pace) / best.seconds
        part = (1.0 - pace) / (1.0 - pace + max(lost, 0.0))
        return part * max(best.rate - 1.0, 0.0)

    def _lost(self, pace: float) -> float:
        """Tokens that who gains least lacks after a round with the best action, of those owed."""
        best = self._promise_of(self.best)
        return pace * best.seconds - 1.0 - self._least(self.best[0]) * (best.tokens - 1.0)

    def needed_to_go_on(self, situation: Situation, plain: float) -> float:
        """Tokens that who gains least must be ahead, so that the best action can go on for as many
        rounds as are worth it. ``plain`` as of ``harmless``."""
        first = MIN_PACE * self.seconds(situation, self.best) / plain - 1.0
        return max(first, 0.0) + _WORTH_BEGINNING * max(self._lost(MIN_PACE), 0.0)

    def to_try(
        self, trial: Trial, situation: Situation, actions: tuple[Action, ...], plain: float
    ) -> Action:
        """The action that a ``trial`` of proposers is made with. Others are tried as far as the
        best now, or as they promise most; the best ones to each other depth in turn, the longest
        first."""
        own = [action for action in actions if action[0] == trial.proposers]
        if trial.proposers == self.best[0]:
            own.remove(self.best)
            self._depth += 1
            return own[-self._depth % len(own)]
        if (same := (trial.proposers, self.best[1])) in own:
            return same
        return max(own, key=lambda action: self.promise(situation, action, plain).rate)

    def _choose_anew(self, situation: Situation, actions: tuple[Action, ...], plain: float) -> None:
        """Under another load, who drafts and how far is another question: all actions are
        compared. From one depth to the next would not do: where few numbers of rows are recorded,
        one between two good ones may be bad; and what was promised before is worth nothing."""
        for action in self._unweighed[: self._at_once]:
            self._promises[action] = self.promise(situation, action, plain)
        del self._unweighed[: self._at_once]
        if not self._unweighed:
            self._prefer(self._first_of(actions), situation, plain)

    def _better(self, other: Action, than: Action) -> bool:
        """Whether ``other`` promises enough more."""
        return self._promise_of(other).rate > self.margin * self._promise_of(than).rate

    def _other(self, actions: tuple[Action, ...], turn: int) -> Action:
        """What is weighed against the best action: its neighbours in depth and other proposers, and
        now and then any action."""
        if turn % 4 == 3:
            return actions[turn // 4 % len(actions)]
        own = [action for action in actions if action[0] == self.best[0]]
        at = own.index(self.best)
        near = own[max(0, at - 1) : at] + own[at + 1 : at + 2]
        for chosen in dict(actions):
            if chosen != self.best[0]:
                same = (chosen, self.best[1])
                others = [action for action in actions if action[0] == chosen]
                near.append(same if same in others else self._first_of(others))
        return near[turn % len(near)]

    def _promise_of(self, action: Action) -> Promise:
        """The last time that it was weighed."""
        return self._promises.get(action, PLAIN)

    def promise(
        self, situation: Situation, action: Action, plain: float, lately: bool = True
    ) -> Promise:
        """What a round of so many requests brings with an action."""
        if action == NOTHING:
            return PLAIN
        requests = situation.requests
        most = requests * self.offers.width
        drafts, seconds = self.table(situation, action, most, alone=True)
        tokens, seconds = self.offers.promise(
            requests, *action, drafts, seconds, self.margin, lately, self._least(action[0])
        )
        return Promise(tokens / requests, seconds / plain)


def _able(there: Sequence[Action], allowed: tuple[int, ...]) -> list[Action]:
    """The actions that these proposers can be asked with. Where drafters are recorded together
    only, others go along for nobody: as few as can be."""
    found = [action for action in there if set(allowed).issuperset(action[0])]
    missing = set(allowed).difference(*(proposers for proposers, _ in found))
    others = {
        action: len(set(action[0]).difference(allowed))
        for action in there
        if not missing.isdisjoint(action[0])
    }
    fewest = min(others.values(), default=0)
    return found + [action for action, count in others.items() if count == fewest]
