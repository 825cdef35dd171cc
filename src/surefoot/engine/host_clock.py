"""What the host does from one report to the next: all of it, whoever's code it is."""

from __future__ import annotations

import math
import time

from surefoot.speculation.host_costs import HostSample

_RECENT = 0.05
"""Weight of a round in the running average of what the host has to spare."""


class HostClock:
    """Times the host between two reports, with everything that keeps it from launching the next
    round: reading the report, handing tokens out, what the engine's caller does between two steps,
    letting requests in, deciding and launching. Waiting for the device is left out, and so is what
    tells nothing of later rounds: recording, and the time before a request came to an idle
    engine."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When the last report was there; None: there is nothing to be learnt of this time."""
        self._left_out = 0.0
        self._prompts = 0
        self._decided = False
        self._work: HostSample | None = None
        self.spare = math.inf
        """Seconds by which late rounds took the device longer than the host, on average."""

    def interrupt(self) -> None:
        """What happens until the next report tells nothing."""
        self._since = None

    def launched(self, prompts: int, decided: bool) -> None:
        """A round was launched that computes some of so many prompts; ``decided``: it was decided
        anew that somebody proposes."""
        self._prompts += prompts
        self._decided |= decided

    def leave_out(self, seconds: float) -> None:
        """So much of the time was no work of the host's, or will not come again."""
        self._left_out += seconds

    def wait_begins(self) -> HostSample | None:
        """The next report is waited for: what came before, if it tells anything."""
        since, work, left_out = self._since, self._work, self._left_out
        self._since = self._work = None
        if since is None or work is None:
            return None
        seconds = time.perf_counter() - since - left_out
        told = work.requests, work.drafting, work.ends, seconds, work.proposing
        return HostSample(*told, self._prompts, self._decided)

    def compare(self, host: HostSample | None, device_seconds: float | None) -> None:
        """What the host and the device took for a round, as far as it is known. Prompts are let in
        now and then, and a round that waits for that is none of those that wait all the time."""
        if host is None or host.prompts or not device_seconds:
            return
        spare = max(device_seconds - host.seconds, 0.0)
        if math.isinf(self.spare):
            self.spare = spare
        self.spare += _RECENT * (spare - self.spare)

    def report_came(self) -> None:
        """The wait is over."""
        self._since, self._left_out = time.perf_counter(), 0.0
        self._prompts, self._decided = 0, False

    def read(self, work: HostSample) -> None:
        """What the report told gives the host so much to do, in seconds that are yet to pass."""
        self._work = work
