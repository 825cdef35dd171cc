"""How much time goes to what is not believed to be best, and what it is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from surefoot.speculation.decisions import Action

SHARE = 0.005
"""Of the time, for all trials together."""
_APART, _APART_RESTRAINED = 6, 12
"""Rounds from one trial to the next of its kind, at least: what rounds bring without trials has to
be known. More where nobody may be slowed: what is learnt is of no use yet."""
_CROWD, _APART_CROWD, _APART_LATE = 8, 24, 128
"""Of so many requests it is so many, and of fewer as much less: a trial tells of all of them at
once. Of a crowd it is more still where rounds wait for the host: deciding on a trial and reading
what it found takes that as long as a round, or nearly, which no trial is charged with."""
_FIRST, _MOST = 0.5, 1.0
"""Plain rounds that a trial may cost at first, and at most be saved up."""
_DEBT = 1.0
"""Plain rounds that may be owed: what a trial lost while beliefs were wrong does not forbid it. But
what it was believed to lose is owed."""


class Trial(NamedTuple):
    """Something to learn about."""

    verify: bool
    """More drafts than those that are believed to pay are verified; else other proposers than those
    that are believed best propose, or the same to another depth."""
    proposers: tuple[int, ...]
    beside: tuple[int, ...]
    """Those that are believed best: what a trial costs depends on it."""


def rounds_apart(requests: int, restrained: bool = False, late: bool = False) -> int:
    """Rounds from one trial to the next of its kind, at least, with so many ``requests``.
    ``restrained``: nobody may be slowed now. ``late``: rounds wait for the host."""
    if requests >= _CROWD and late:
        return _APART_LATE
    crowd = _APART_CROWD * min(requests, _CROWD) // _CROWD
    return max(_APART_RESTRAINED if restrained else _APART, crowd)


class Trials:
    """What may be tried beside the best action."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Action, ...], Action] | None = None
        self._there: tuple[Trial, ...] = ()
        """For these actions, and the best of them."""

    def beside(self, best: Action, actions: tuple[Action, ...]) -> tuple[Trial, ...]:
        """Other proposers, the best ones to other depths, and more of their drafts verified."""
        if len(actions) < 2:
            return ()
        if (actions, best) != self._known:
            proposers = best[0]
            trials = [
                Trial(False, chosen, proposers) for chosen in dict(actions) if chosen != proposers
            ]
            if sum(action[0] == proposers for action in actions) > 1:
                trials.append(Trial(False, proposers, proposers))
            trials.append(Trial(True, proposers, proposers))
            self._known, self._there = (actions, best), tuple(trials)
        return self._there


class Budget:
    """Credit of each trial, in plain rounds. All earn equally, up to a limit, so that cheap ones
    are frequent while dear ones wait until they can be paid."""

    def __init__(self) -> None:
        self._credit: dict[Trial, float] = {}
        self._tried: dict[Trial, int] = {}
        self._last: dict[bool, int] = {}
        self._rounds = 0

    def next(self, trials: Sequence[Trial], rounds: int = 1, apart: int = _APART) -> Trial | None:
        """What to try now, so many rounds after this was asked last, if anything: what was tried
        longest ago. ``apart``: as ``rounds_apart`` has it."""
        self._rounds += rounds
        # What one trial has others offer is there for another to verify.
        due = [t for t in trials if self._rounds - self._last.get(t.verify, -apart) >= apart]
        due = [trial for trial in due if self._credit.get(trial, _FIRST) > 0.0]
        if not due:
            return None
        trial = min(due, key=lambda trial: self._tried.get(trial, 0))
        self._tried[trial] = self._last[trial.verify] = self._rounds
        return trial

    def hasten(self) -> None:
        """What was tried last tells nothing of what there is now: any trial may be the next one."""
        self._last.clear()

    def earn(self, trials: Sequence[Trial], rounds: float) -> None:
        """So many plain rounds' time has passed, in which these might have been tried. Those that
        have saved up all they may leave their part to the others."""
        poor = [trial for trial in trials if self._credit.get(trial, _FIRST) < _MOST]
        for trial in poor:
            credit = self._credit.get(trial, _FIRST) + SHARE * rounds / len(poor)
            self._credit[trial] = min(credit, _MOST)

    def pay(self, trial: Trial, rounds: float, believed: float = 0.0) -> None:
        """A round for this trial lost so many plain rounds' time against the best; below 0: it
        gained. ``believed``: what it was to lose, which is owed in any case."""
        before = self._credit.get(trial, _FIRST)
        least = min(before - max(believed, 0.0), -_DEBT)
        self._credit[trial] = min(max(before - rounds, least), _MOST)
