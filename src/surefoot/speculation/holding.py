"""For how many rounds a decision holds."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.speculation.decisions import NOTHING, Action, Decision, Situation

CROWD, FEW_HELD, EACH_HELD, MOST_HELD = 8, 3, 4, 7
"""Where rounds wait for the host, time spent on deciding is lost: a decision takes it longer than
all else of a round. It then holds for some more rounds: ``FEW_HELD`` for a few requests, and for a
``CROWD`` one for each ``EACH_HELD`` requests, up to some, while nobody falls too far behind. (What
is on offer then is a report or two old anyhow.) What is best for one request depends on its offers,
except where all that drafters can offer is verified. Of a crowd one request in eight may come
without another decision."""
IDLE_HELD = 15
"""That nobody shall propose holds longer, also where the host's time adds to the device's: until
somebody does, nothing new is learnt. And so does what leaves no choice."""
FOLLOWED = 4
"""Where the host's time adds to the device's, and one request's drafts are known when a round is
decided, who proposes holds for so many more rounds, in which only the number of drafts to verify
follows what is on offer: all else of a decision takes a small model's round 4 % longer."""
_HOST_BOUND, _CROWD_BOUND = 0.75, 0.3
"""The part of a round's time that the host needs on average, from which on rounds wait for it; and
from which on those of a ``CROWD`` would, if each was decided by itself: a decision takes the host
several times as long as all else of a round. (Judged by the first, a crowd's decisions held, the
host needed less, they held no longer for that, and it needed more again.)"""
_ANEW_WEIGHT, _ANEW_FORGOTTEN = 0.05, 5e-4
"""Of a round, in the part of such rounds that are decided anew; and by how much of it what was
learnt is forgotten in a round without proposers."""
_ARRIVING_WEIGHT, _ARRIVING = 0.05, 0.1
"""Of a round, in the part of late ones that ran prompts; and how large that is where requests come
and go."""


def waits_for_host(host: float, seconds: float) -> bool:
    """Whether rounds wait for the host, now and then, which needs ``host`` seconds of their
    ``seconds``."""
    return host >= _HOST_BOUND * seconds


def crowd_holds(requests: int) -> int:
    """Rounds for which a decision that a ``CROWD`` drafts holds beside its own, where rounds wait
    for the host."""
    return min(requests // EACH_HELD, MOST_HELD)


class DecidedAnew:
    """The part of rounds with proposers that are decided anew: what a decision takes the host is
    expected of so many. By about how many requests there are, and whether others come: beside
    prompts no decision holds, and a crowd that is complete keeps what it decided."""

    def __init__(self, overlap: bool) -> None:
        """``overlap`` as in ``Planner``."""
        self._overlap = overlap
        self._parts = dict[tuple[int, bool], float]()
        self._arriving = 0.0
        """The part of late rounds that ran prompts."""

    def of(self, requests: int) -> float:
        """Of rounds of so many requests, where the host's time counts."""
        part = self._parts.get(self._kind(requests))
        return self._first(requests) if part is None else part

    def passed(self, requests: int, prompts: bool, proposing: bool, decided: bool) -> None:
        """There was such a round that tried nothing. ``prompts``: whether it ran some."""
        self._arriving += _ARRIVING_WEIGHT * (prompts - self._arriving)
        kind, part = self._kind(requests), self.of(requests)
        if proposing:
            part += _ANEW_WEIGHT * (decided - part)
        else:
            # Whatever made them short-lived does not last.
            part += _ANEW_FORGOTTEN * (self._first(requests) - part)
        self._parts[kind] = part

    def _kind(self, requests: int) -> tuple[int, bool]:
        return requests.bit_length(), self._arriving > _ARRIVING

    def _first(self, requests: int) -> float:
        """If they hold as long as they may."""
        if requests == 1 and not self._overlap:
            return 1 / (1 + FOLLOWED)
        return 1 / (1 + crowd_holds(requests)) if requests >= CROWD and self._overlap else 1.0


class Held:
    """The last decision, as long as it need not be made anew."""

    def __init__(self) -> None:
        self.left = self._granted = 0
        """Rounds for which it still holds, and held at first."""
        self._asked: tuple[object, ...] | None = None
        self._requests = 0
        """What it was made for, and for how many."""
        self._decision: Decision | None = None
        """This is it, if it holds at all."""
        self.follows = False
        """Whether its number of drafts does not hold."""

    def next(self, situation: Situation, actions: Sequence[Action]) -> Decision | None:
        """The decision, if it holds for this round, too, which is then counted. ``actions``: those
        that are on offer for so many requests."""
        # Of a crowd one may come, and, as that leaves the others no worse off, half of it may go.
        more = situation.requests - self._requests
        same = max(CROWD * more, -2 * more) <= self._requests
        same = same and _question(situation) == self._asked and situation.hosted is None
        decision = self._decision
        if not (self.left and same) or decision is None or decision.action not in actions:
            return None
        self.left -= 1
        return decision

    def end(self, situation: Situation) -> int:
        """Another one is made now. Returns the rounds since the one before was made."""
        rounds = 1 + self._granted - self.left
        self.left, self._granted, self.follows = 0, 0, False
        self._asked = _question(situation)
        self._requests = situation.requests
        return rounds

    def break_off(self) -> None:
        """Another decision is to be made next, and no rounds passed for that."""
        self._granted -= self.left
        self.left = 0

    def grant(
        self,
        situation: Situation,
        decision: Decision,
        host: float,
        overlap: bool,
        choice: bool,
        most: int,
    ) -> None:
        """The decision that was just made may hold for a while, in which nothing else is tried.
        ``host``: seconds that the host needs for its round; ``overlap`` as in ``Planner``;
        ``choice``: whether there was any; ``most``: rounds that it may hold, this one included."""
        quiet = decision.action == NOTHING and not decision.drafts
        # Beside prompts there is other room for drafts.
        if situation.hosted is not None or (situation.prompt_rows and not quiet):
            return
        self._decision = decision
        seconds, many = decision.expected.seconds, situation.requests >= CROWD
        late = host >= (_CROWD_BOUND if many else _HOST_BOUND) * seconds
        if (decision.action == NOTHING and (late or not overlap)) or not choice:
            self._granted = IDLE_HELD
        elif late:
            whole = 0 < situation.requests * decision.steps <= decision.drafts
            if many:
                held = crowd_holds(situation.requests)
            else:
                held = FEW_HELD if whole or (overlap and situation.requests > 1) else 0
            self._granted = max(0, min(held, most - 1))
        self.left = self._granted

    def follow(self, decision: Decision) -> None:
        """Of the decision that was just made, who proposes is to hold for a while."""
        self._decision, self.follows = decision, True
        self.left = self._granted = FOLLOWED


def _question(situation: Situation) -> tuple[object, ...]:
    return situation.proposers, situation.draft_limit, situation.kind
