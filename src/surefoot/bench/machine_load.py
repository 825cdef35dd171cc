"""Who else used the processor while something was measured."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.bench.hardware import usable_cores

PROC_STAT = Path("/proc/stat")
BUSY_OTHERS, BUSY_STEAL = 0.10, 0.02
"""Shares of the usable cores' time from which on a machine is called busy."""


@dataclass(frozen=True)
class MachineLoad:
    """What happened on the usable cores over ``seconds``. ``others``: the share of their time that
    went to other processes; ``steal``: the share that the hypervisor gave to other machines; both
    None where the system does not tell (it does on Linux). ``load_average``: the system's, over the
    last minute before the start; None where there is none."""

    seconds: float
    cores: int
    others: float | None
    steal: float | None
    load_average: float | None

    @property
    def busy(self) -> bool:
        """Whether the numbers measured meanwhile are suspect. Without shares it is a load average
        above the number of cores that tells: this process alone does not make one."""
        if self.others is None or self.steal is None:
            return self.load_average is not None and self.load_average > self.cores
        return self.others > BUSY_OTHERS or self.steal > BUSY_STEAL

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "busy": self.busy}

    def note(self) -> str:
        """A warning for people; empty for a quiet machine."""
        if not self.busy:
            return ""
        facts = []
        if self.others is not None and self.steal is not None:
            facts.append(f"other processes took {self.others:.0%} of its {self.cores} cores")
            facts.append(f"steal {self.steal:.1%}")
        if self.load_average is not None:
            facts.append(f"load average {self.load_average:.1f} at the start")
        return (
            f"The machine was busy ({', '.join(facts)}): on a quiet one speeds are higher and "
            "ranges narrower."
        )


class LoadWatch:
    """Counts from its creation on; ``stop`` tells."""

    def __init__(self) -> None:
        self._average = _load_average()
        self._cores = _core_ids()
        self._wall = time.monotonic()
        self._own = time.process_time()
        self._ticks = _read_ticks(self._cores)

    def stop(self) -> MachineLoad:
        """The load so far."""
        seconds = time.monotonic() - self._wall
        own = time.process_time() - self._own
        before, after = self._ticks, _read_ticks(self._cores)
        others = steal = None
        if before is not None and after is not None and seconds > 0:
            capacity = seconds * len(self._cores)
            working, stolen = (
                (new - old) / os.sysconf("SC_CLK_TCK")
                for old, new in zip(before, after, strict=True)
            )
            others = min(1.0, max(0.0, (working - own) / capacity))
            steal = min(1.0, stolen / capacity)
        return MachineLoad(seconds, len(self._cores), others, steal, self._average)


def _core_ids() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return list(range(usable_cores()))


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _read_ticks(cores: list[int]) -> tuple[int, int] | None:
    """(ticks at work, ticks stolen) of these cores since the system started; proc(5)."""
    try:
        lines = PROC_STAT.read_text().splitlines()
    except OSError:
        return None
    wanted = {f"cpu{core}" for core in cores}
    fields = [line.split() for line in lines if line.split(" ", 1)[0] in wanted]
    working = stolen = 0
    for _, user, nice, system, _idle, _iowait, irq, softirq, steal, *_ in fields:
        working += sum(map(int, (user, nice, system, irq, softirq)))
        stolen += int(steal)
    return (working, stolen) if fields else None
