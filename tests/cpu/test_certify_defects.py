"""Every known defect is found, at every size and in every kind of round that it can show in."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from certify_setups import make_judge, make_subject, one_thread  # noqa: F401
from harness import needs_native
from surefoot.certify.compare import Judge
from surefoot.certify.defect import RECORDED, TREES, Defect
from surefoot.certify.defects import DEFECTS
from surefoot.certify.selftest import choose_defects, try_defect
from surefoot.certify.sizes import DEFAULT, QUICK, SCENARIOS, Size
from tree_proposers import Bush

CUT = replace(DEFAULT, greedy_jobs=12, greedy_length=64, sampled_jobs=8, designs=1, seeds=64)
"""The default size, with fewer texts of each kind: what finds a defect is all there."""
EVERY = pytest.mark.parametrize("defect", DEFECTS, ids=lambda item: item.install.__name__)


@functools.cache
def judge(recorded: bool = False, trees: bool = False) -> Judge:
    """Plain texts are worked out once for all defects."""
    subject = make_subject(proposers=(Bush.name,)) if trees else make_subject()
    return make_judge(replace(subject, recorded=recorded))


def check(defect: Defect, size: Size, bound: Judge) -> None:
    if missing := defect.lacks(bound.subject, bound.noise.regret_bound):
        pytest.skip(f"there are no {missing}")
    trial = try_defect(bound, size, defect)
    assert trial.caught and trial.finding, trial
    assert (trial.recorded > 0) == bool(bound.subject.recorded)


@EVERY
@pytest.mark.parametrize("size", [CUT, QUICK], ids=["default", "quick"])
@needs_native
def test_every_defect_is_found(defect: Defect, size: Size) -> None:
    trees = defect.needs == TREES
    if defect.needs != RECORDED:
        check(defect, size, judge(trees=trees))


@EVERY
@needs_native
def test_every_defect_is_found_through_recorded_rounds(defect: Defect) -> None:
    if defect.needs != TREES:
        check(defect, QUICK, judge(recorded=True))


def test_what_cannot_show_is_not_tried_and_said() -> None:
    subject = make_subject("torch")
    chosen, left_out = choose_defects(subject, 0.0)
    assert len(chosen) + len(left_out) == len(DEFECTS) >= 17
    assert any("there are no trees here" in words for words in left_out)
    assert any("there are no recorded rounds here" in words for words in left_out)
    # A runner-up within what noise explains is a tie to every judge.
    for bound, fewer in ((0.049, 0), (0.05, 1), (0.6, 1)):
        noisy, more = choose_defects(subject, bound)
        assert len(chosen) - len(noisy) == len(more) - len(left_out) == fewer
        assert any("a runner-up within 0.05" in words for words in more) == bool(fewer)


def test_the_default_size_has_every_scenario_of_the_quick_one() -> None:
    assert DEFAULT.scenarios == SCENARIOS and set(QUICK.scenarios) <= set(SCENARIOS)
