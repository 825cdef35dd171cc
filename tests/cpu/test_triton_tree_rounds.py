"""The kernels of tree rounds against the torch operations that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.rounds import RoundLayout, RoundSpans, lay_out_spans
from surefoot.kernels.triton import trees as kernels
from surefoot.speculation import tree_estimator, trees
from surefoot.speculation.proposer import Commits, Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.tree_estimator import TreeEstimator
from triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """Which of the twins runs is the test's choice."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (trees, tree_estimator):
            patch.setattr(module, "compiled", lambda _: chosen[0])
        yield


chosen: list[Any] = [None]


def both(function: Any, *arguments: Any) -> list[Any]:
    """[the torch twin's result, the kernels']."""
    results = []
    for chosen[0] in (None, kernels):
        results.append(function(*arguments))
    chosen[0] = None
    return results


def random_parents(batch: int, width: int, chain: bool = False) -> torch.Tensor:
    order = torch.arange(width)
    parents = (torch.rand(batch, width) * (order + 1)).long() - 1
    return (order - 1).expand(batch, width) if chain else torch.minimum(parents, order - 1)


def same(left: Any, right: Any) -> None:
    for field in fields(left):
        one, two = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == two.dtype and torch.equal(one, two), field.name


@pytest.mark.parametrize("width", [1, 2, 7, 8, 31, 63])
def test_ancestors(width: int) -> None:
    torch.manual_seed(width)
    for parents in (random_parents(5, width), random_parents(2, width, chain=True)):
        (masks, depths), found = both(trees.ancestors, parents)
        assert torch.equal(found[0], masks) and torch.equal(found[1], depths)


def planted(width: int, known: list[int], drafts: list[int], padding: int) -> Any:
    """(trees, layout of a round of these spans)."""
    batch = len(known)
    parents = random_parents(batch, width)
    tokens = torch.randint(0, 3, (batch, width))
    state = torch.randint(0, 50, (batch + 1,))
    history = torch.randint(0, 9, (batch + 1, 200))
    tables = torch.zeros((batch + 1, 50), dtype=torch.int32)
    spans = RoundSpans(
        torch.arange(batch), torch.tensor(known), torch.tensor(drafts), torch.tensor(known).sign()
    )
    rows = sum(known) + sum(drafts) + padding
    layout = lay_out_spans(spans, history, state, tables, rows, rows, 200, 64)
    return trees.Trees(tokens, parents, *trees.ancestors(parents)), spans, layout


CASES = [
    (7, [1, 1, 1, 1], [7, 0, 3, 5], 0),
    (7, [1, 0, 1, 0], [2, 0, 7, 0], 9),
    (63, [1, 1], [63, 20], 5),
    (5, [0, 0, 0], [0, 0, 0], 4),
    (5, [9, 3, 1, 1], [0, 0, 5, 2], 0),
    (5, [9, 1, 7, 1], [0, 5, 0, 2], 3),
    (1, [1], [1], 0),
]


@pytest.mark.parametrize("case", CASES)
def test_rows_and_paths_and_what_is_settled(case: Any) -> None:
    width, known, drafts, padding = case
    accepted = 0
    for seed in range(8):
        torch.manual_seed(seed)
        planting, spans, layout = planted(width, known, drafts, padding)
        rows, found = both(trees.node_rows, layout, planting, spans.drafts)
        same(rows, found)
        layout = cast(RoundLayout, trees.lay_out_trees(layout, rows))
        sampled = torch.randint(0, 3, layout.sample_index.shape)
        (paths, tokens), (found, others) = both(
            trees.walk, planting, sampled, layout.first_sample, spans.drafts
        )
        same(paths, found)
        valid = torch.arange(width + 1) <= paths.lengths.unsqueeze(1)
        assert torch.equal(tokens[valid], others[valid])
        counts = torch.where(spans.known > 1, spans.known, spans.known * (paths.lengths + 1))
        counts = (counts - (torch.rand(len(known)) < 0.2).long()).clamp(min=0)
        features = torch.zeros(len(layout.batch.tokens), 1)
        commits = Commits(spans.slots, counts, counts, layout.first_row, layout.batch, features)
        want, found = both(trees.settle, commits, layout, rows, planting, paths)
        for name in ("before", "last"):
            assert torch.equal(getattr(want, name), getattr(found, name)), name
        same(want.batch, found.batch)
        accepted += int(paths.lengths.sum())
    assert accepted or not any(drafts)


@pytest.mark.parametrize("width", [1, 7, 20])
def test_what_is_learnt(width: int) -> None:
    torch.manual_seed(width)
    learnt = 0
    for _ in range(10):
        state = SlotState(5, 60, width, 4, 9, DEVICE)
        state.native = None
        state.history.copy_(torch.randint(0, 2, state.history.shape))
        state.length.copy_(torch.randint(5, 40, (6,)))
        twins = [TreeEstimator(state) for _ in "12"]
        before = torch.rand(twins[0].trials.shape) * 9
        for estimator in twins:
            estimator.trials.copy_(before)
            estimator.hits.copy_(before / 2)
        slots = torch.tensor([4, 0, 3, 5, 2])
        start = state.length.clone()
        drafts = Drafts(
            torch.randint(0, 2, (5, width)),
            torch.randint(0, width + 1, (5,)),
            torch.rand(5, width),
            random_parents(5, width),
        )
        for estimator in twins:
            estimator.watch(slots, drafts)
        for step in range(3):
            state.length.copy_(start + step * torch.randint(0, 3, (6,)))
            for chosen[0], estimator in zip((None, kernels), twins, strict=True):
                estimator.learn(slots)
            chosen[0] = None
            for name in ("hits", "trials", "all_hits", "all_trials", "watched_length"):
                torch.testing.assert_close(*(getattr(e, name) for e in twins))
        learnt += int((twins[0].trials != before).sum())
    assert learnt > 20
