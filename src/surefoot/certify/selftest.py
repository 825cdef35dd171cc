"""Would the certificate have noticed? Known defects are put in, and each must be found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from surefoot.certify import long_texts
from surefoot.certify.compare import Judge
from surefoot.certify.defect import Defect
from surefoot.certify.defects import DEFECTS
from surefoot.certify.distribution import run_distribution
from surefoot.certify.findings import Section, guarded
from surefoot.certify.parameters import run_parameters
from surefoot.certify.parity import Progress, run_parity
from surefoot.certify.sizes import Size
from surefoot.certify.subject import Subject


@dataclass(frozen=True)
class Trial:
    """One defect: whether its section found it, with the first finding. ``recorded``: rounds of
    recorded sizes that the broken engines ran."""

    defect: str
    section: str
    caught: bool
    finding: str
    positions: int
    seconds: float
    recorded: int = 0

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def choose_defects(
    subject: Subject, bound: float, defects: Sequence[Defect] | None = None
) -> tuple[list[Defect], list[str]]:
    """Of ``defects`` (None: all that are known), those that can show in this set-up, where noise
    explains differences of up to ``bound`` logits; and why others are left out, in words."""
    chosen, left_out = [], []
    for defect in DEFECTS if defects is None else defects:
        missing = defect.lacks(subject, bound)
        if missing is not None:
            left_out.append(f"an engine that {defect.name}: there are no {missing} here")
        else:
            chosen.append(defect)
    return chosen, left_out


def run_self_test(
    judge: Judge, size: Size, progress: Progress, defects: Sequence[Defect]
) -> list[Trial]:
    """Run each defect's section, at the certificate's own size, until something is found."""
    trials = []
    for number, defect in enumerate(defects):
        progress("self-test", number, len(defects))
        trials.append(try_defect(judge, size, defect))
    progress("self-test", len(defects), len(defects))
    return trials


def try_defect(judge: Judge, size: Size, defect: Defect) -> Trial:
    """Break the set-up and run the section that must notice."""
    broken = replace(judge, subject=judge.subject.broken(defect.install, defect.breaks_plain))
    started = time.perf_counter()
    section = run_section(
        defect.section, broken, size, _silent, stop_at_first=True, first=defect.scenario
    )
    return Trial(
        defect.name,
        defect.section,
        section.failed,
        section.problems[0] if section.problems else "",
        section.positions,
        round(time.perf_counter() - started, 2),
        section.activity.replays,
    )


def run_section(
    name: str,
    judge: Judge,
    size: Size,
    progress: Progress,
    stop_at_first: bool = False,
    first: str = "",
) -> Section:
    """A section by its name; ``stop_at_first`` ends it early where something is found, and the
    scenario named ``first`` comes before the others, if it has any."""
    if name == "distribution":
        run = partial(run_distribution, judge, size, progress, stop_at_first)
    elif name == long_texts.NAME:
        run = partial(long_texts.run_long_texts, judge, size, progress, stop_at_first)
    elif name == "sampling parameters":
        run = partial(run_parameters, judge, size, progress, stop_at_first, first)
    else:
        sampled = name == "sampled parity"
        run = partial(run_parity, judge, size, sampled, progress, stop_at_first, first)
    return guarded(Section(name), run)


def _silent(label: str, done: int, total: int) -> None:
    """Self-tests show up as one bar."""
