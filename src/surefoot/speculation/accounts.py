"""What rounds turned out to take and to bring: gauges, and what trials cost."""

from __future__ import annotations

import logging

from surefoot.speculation.decisions import (
    Decision,
    Expectation,
    Landed,
    Situation,
    is_other_load,
)
from surefoot.speculation.exploring import Budget

BARREN_ROUNDS = 4096
"""Rounds in a row with drafts on offer and none verified, after which a line is logged."""
_UNLIKELY = 3.0
"""Standard deviations that noise does not explain."""
_USUAL = 0.1
"""Weight of a round in what is usual, once ten are known."""
_RECENT = 0.02
"""Weight of a round in running averages."""
_log = logging.getLogger(__name__)


class Accounts:
    """Sums up the rounds that landed."""

    def __init__(self, budget: Budget) -> None:
        """``budget``: earns by the time that passes, and pays for trials."""
        self.budget = budget
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
        self._known = self._requests = 0
        """How many of them there were, and for how many requests the first was."""
        self._guessed = True
        """Whether all of them ran prompts."""

    def landed(
        self,
        decision: Decision,
        situation: Situation,
        outcome: Landed,
        seconds: float,
        noise: float,
    ) -> None:
        """A round took so many ``seconds``, host included. ``noise``: the relative deviation of a
        round's time from what is believed."""
        expected, requests = decision.expected, situation.requests
        self.believed_seconds += _RECENT * (expected.seconds - self.believed_seconds)
        self.measured_seconds += _RECENT * (seconds - self.measured_seconds)
        if outcome.verified and not situation.prompt_rows:
            plain = min(expected.plain_seconds, seconds)
            self.saved_seconds += plain * (1 + outcome.accepted / requests) - seconds
        self._trial(expected, requests, seconds, outcome.accepted / requests, noise)
        self.explored += decision.explores
        self.barren = 0 if outcome.verified or not outcome.drafting else self.barren + 1
        if self.barren == BARREN_ROUNDS:
            _log.warning("no draft was verified in %d rounds that had some on offer", self.barren)

    def _trial(
        self, expected: Expectation, requests: int, seconds: float, accepted: float, noise: float
    ) -> None:
        """Time earns credit for trials; what they lose is taken off it. Where the measured time
        does not contradict what was believed, that is less noisy; where it does, it is no longer
        than noise explains: hiccups of the machine are not the trial's. Prompts take so much longer
        than the rest of a round that beside them the measured time tells nothing of it."""
        plain = expected.plain_seconds
        if not expected.trials or plain <= 0:
            return
        believed = (expected.seconds - expected.prompt_seconds) / plain
        noise, beside = _UNLIKELY * noise * expected.seconds, expected.prompt_seconds > 0
        if beside:
            seconds = expected.seconds
        elif seconds > expected.seconds - noise:
            seconds = min(max(seconds - noise, expected.seconds), expected.seconds + noise)
        took = max(0.0, (seconds - expected.prompt_seconds) / plain)
        self.budget.earn(expected.trials, took)
        if expected.trial is None:
            self._learn_usual(requests, 1.0 + accepted, took, beside)
        elif expected.trial.verify:
            # Paid in full, whatever it gives: drafts that are believed to be unfair to somebody
            # must not pay for themselves.
            without = (expected.without_trial - expected.prompt_seconds) / plain
            self.budget.pay(expected.trial, took - without, believed - without)
        else:
            usual = self._usual_rounds / self._usual_tokens
            lost, to_lose = took - (1.0 + accepted) * usual, believed - expected.tokens * usual
            self.budget.pay(expected.trial, lost, to_lose)

    def _learn_usual(self, requests: int, tokens: float, rounds: float, beside: bool) -> None:
        """A round that tried nothing gave each request so many tokens in the time of so many plain
        rounds. ``beside``: it ran prompts, so that this is a guess."""
        if is_other_load(requests, self._requests):
            self._known, self._requests, self._guessed = 0, requests, True
        if beside and not self._guessed:
            return
        if self._guessed and not beside:
            self._known, self._guessed = 0, False
        self._known += 1
        weight = max(_USUAL, 1 / self._known)
        self._usual_tokens += weight * (tokens - self._usual_tokens)
        self._usual_rounds += weight * (rounds - self._usual_rounds)
