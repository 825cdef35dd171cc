"""What is done while nobody may be slowed."""

from __future__ import annotations

from surefoot.speculation.decisions import NOTHING, Action, Promise
from surefoot.speculation.plans import Case, Plan
from surefoot.speculation.weighing import Weighing


class Restrained:
    """The best action of those that slow nobody, if it brings more than plain rounds: by these
    everybody gets ahead, and what is best for all together goes on the sooner."""

    def __init__(self) -> None:
        self.action = NOTHING
        self.waiting = 0.0
        """As of ``Weighing.worth_of_waiting``."""

    def begin(self, weighing: Weighing, case: Case, pace: float) -> None:
        """From now on nobody may be slowed, and is owed ``pace`` tokens in a plain round."""
        self.waiting = weighing.worth_of_waiting(pace)
        plain = case.owed.plain
        self.action = weighing.harmless(case.situation, case.actions, plain, self.waiting)

    def found(self, plan: Plan, plain: float) -> bool:
        """Whether what the action has on offer now, for a ``plan``, is still worth more than plain
        rounds, of ``plain`` seconds; if it is not, these follow. (It promised more than it finds
        now that nobody may be slowed for it.)"""
        brings = Promise(1.0 + float(plan.gains.mean()), plan.seconds / plain)
        worth = brings.rate - 1.0 > self.waiting
        if not worth:
            self.action = NOTHING
        return worth

    def possible(self, actions: tuple[Action, ...]) -> Action:
        """What is left of it where requests allow these."""
        return self.action if self.action in actions else NOTHING
