"""What is learnt of rounds that landed: of the times that they took, and of what they brought."""

from __future__ import annotations

from surefoot.speculation.accounts import Accounts
from surefoot.speculation.beliefs import Familiar
from surefoot.speculation.decisions import Decision, Landed, Situation
from surefoot.speculation.weighing import Weighing

_ALIKE = 5
"""Rounds are alike whose numbers of requests are equally long in binary and begin with the same
digits, so many: where some come and go, the number is another one in most rounds."""


class Learning:
    """Corrects what is believed of the device and the host, and keeps the accounts."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._familiar = Familiar()

    def landed(
        self, weighing: Weighing, decision: Decision, situation: Situation, outcome: Landed
    ) -> None:
        """A round of requests, at least one, was decided so; ``weighing``: for its sampling."""
        s, host = situation, outcome.host
        if host is not None:
            weighing.host.observe(host)
        if outcome.device_seconds is None:
            return
        if host is not None and not s.prompts and not host.prompts:
            host_seconds = host.seconds
        else:
            # Prompts that were launched meanwhile are not this round's.
            proposing = bool(decision.proposers)
            host_seconds = weighing.host.seconds(s.requests, outcome.drafting, proposing, s.prompts)
        self._observe(weighing, decision, situation, outcome.device_seconds)
        seconds = weighing.together(outcome.device_seconds, host_seconds)
        self._accounts.landed(decision, s, outcome, seconds, weighing.costs.noise)

    def _observe(
        self, weighing: Weighing, decision: Decision, situation: Situation, seconds: float
    ) -> None:
        """Such a round took the device so many ``seconds``."""
        s, costs = situation, weighing.costs
        digits = s.requests.bit_length()
        about = digits, s.requests >> max(0, digits - _ALIKE)
        like = s.kind, about, decision.action, decision.drafts
        if not s.prompt_rows and self._familiar.passes(like):
            costs.pass_over()
            return
        told_little = costs.observe(
            s.requests, s.prompt_rows, decision.action, decision.drafts, s.context, seconds
        )
        if not s.prompt_rows:
            self._familiar.learnt(like, told_little)
