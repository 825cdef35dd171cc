"""What the planner is told of the drafts on offer: what the last report says of a slot's request,
and nothing of who held the slot before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from surefoot.engine.reported import ReportedOffers
from surefoot.speculation.books import ReportColumns

WIDTH = 3
COLUMNS = ReportColumns(WIDTH, trees=False)


def report_of(*offers: tuple[int, list[float]]) -> Any:
    """(Tokens committed, chances) by span, all of proposer 1."""
    rows = torch.zeros((len(offers) + 1, COLUMNS.count), dtype=torch.int32)
    for row, (count, chances) in zip(rows, offers, strict=False):
        row[COLUMNS.COUNT], row[COLUMNS.OFFERER] = count, 1
        row[COLUMNS.chances : COLUMNS.offer] = torch.tensor(chances).view(torch.int32)
    return SimpleNamespace(rows=rows.numpy())


def batch_of(*slots: int, chunks: int = 0, ending: int = 0) -> Any:
    return SimpleNamespace(
        group=SimpleNamespace(slots=np.array(slots)), chunks=(5,) * chunks, ending=ending
    )


def known() -> ReportedOffers:
    """Of slots 0 and 2."""
    reported = ReportedOffers(4, WIDTH, COLUMNS)
    report = report_of((1, [0.75, 0.5, 0.25]), (0, [0.9, 0.9, 0.9]), (2, [0.5, 0.0, 0.0]))
    told = reported.note(report, np.array([0, 1, 2]))
    assert told.tolist() == [True, False, True]
    return reported


def test_chances_are_those_of_the_last_report() -> None:
    chances, whose, parents = known().of(batch_of(2, 0))
    assert chances is not None and whose is not None
    assert chances.tolist() == [[0.5, 0.0, 0.0], [0.75, 0.5, 0.25]] and whose.tolist() == [1, 1]
    assert parents is None, "all of them are chains"


def test_who_sampled_nothing_or_has_left_is_not_told_of() -> None:
    reported = known()
    reported.note(report_of((1, [0.1] * 3), (0, [0.1] * 3)), np.array([-1, 2]))
    chances, *_ = reported.of(batch_of(0, 1, 2, 3))
    assert chances is not None
    assert chances[:, 0].tolist()[::2] == [0.75, 0.5] and np.isnan(chances[1::2]).all()


def test_of_one_request_a_report_tells_as_of_several() -> None:
    reported = known()
    for count, slot, told in ((1, 3, True), (1, -1, False), (0, 2, False), (0, -1, False)):
        report = report_of((count, [0.5, 0.25, 0.125]))
        report.rows[0, COLUMNS.OFFERER] = 0
        assert reported.note(report, np.array([slot])).tolist() == [told]
    chances, whose, _ = reported.of(batch_of(0, 1, 2, 3))
    assert chances is not None and whose is not None
    assert chances[3].tolist() == [0.5, 0.25, 0.125] and whose.tolist() == [1, 0, 1, 0]
    assert chances[0, 0] == 0.75 and chances[2, 0] == 0.5 and np.isnan(chances[1]).all()


def test_of_a_new_request_nothing_is_known() -> None:
    """Neither of one that took over a slot, nor of one at the end of its prompt: that is not the
    same as nothing on offer."""
    reported = known()
    reported.clear(0)
    chances, whose, _ = reported.of(batch_of(1, 3, 0, 2, chunks=2, ending=1))
    assert chances is not None and whose is not None and chances.shape == (3, WIDTH)
    assert np.isnan(chances[0]).all() and np.isnan(chances[2]).all()
    assert chances[1].tolist() == [0.5, 0.0, 0.0] and len(whose) == 3


def test_what_a_grammar_cuts_is_not_on_offer() -> None:
    reported = known()
    reported.cut(0, 1)
    chances, *_ = reported.of(batch_of(0))
    assert chances is not None and chances.tolist() == [[0.75, 0.0, 0.0]]


def test_nothing_is_told_where_nobody_decodes() -> None:
    assert known().of(batch_of(0, 1, chunks=2, ending=2)) == (None, None, None)
    assert ReportedOffers(4, 0, COLUMNS).of(batch_of(0)) == (None, None, None)


@pytest.mark.parametrize("count", [1, 2])
def test_where_there_are_trees_it_is_known_what_follows_what(count: int) -> None:
    columns = ReportColumns(WIDTH, True)
    rows = np.zeros((count, columns.count), dtype=np.int32)
    rows[:, columns.COUNT] = 1
    rows[:, columns.parents : columns.parents + WIDTH] = [-1, -1, 1]
    reported = ReportedOffers(4, WIDTH, columns)
    reported.note(cast(Any, SimpleNamespace(rows=rows)), np.array([2, 0])[:count])
    _, _, parents = reported.of(batch_of(3, 2, 0, chunks=1, ending=1))
    assert parents is not None and parents.dtype == np.int32
    assert parents[0].tolist() == [-1, -1, 1] and parents.shape == (3, WIDTH)
    assert (parents[1].tolist() == [-1, -1, 1]) == (count == 2)
