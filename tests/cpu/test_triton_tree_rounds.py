"""The kernels of tree rounds against the torch operations that they stand for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.rounds import RoundLayout, RoundSpans, lay_out_spans
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import trees as kernels
from surefoot.speculation import trees
from surefoot.speculation.books import book_keeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.proposer import Commits
from surefoot.speculation.state import SlotState
from triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)


def both(name: str, *arguments: Any) -> list[Any]:
    """[the torch twin's result, the kernels']."""
    backend = TorchBackend(DEVICE, torch.float32)
    state = SlotState(1, 8, 3, 4, 9, DEVICE)
    results = []
    for backend.book_keeping in ("torch", "triton"):
        books = book_keeping(backend, state, Controller(state, ("a",), (True,)), 1)
        results.append(getattr(books, name)(*arguments))
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
        (masks, depths), found = both("ancestors", parents)
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
        rows, found = both("node_rows", layout, planting, spans.drafts)
        same(rows, found)
        layout = cast(RoundLayout, trees.lay_out_trees(layout, rows, planting))
        sampled = torch.randint(0, 3, layout.sample_index.shape)
        (paths, tokens), (found, others) = both(
            "walk", planting, sampled, layout.first_sample, spans.drafts
        )
        same(paths, found)
        valid = torch.arange(width + 1) <= paths.lengths.unsqueeze(1)
        assert torch.equal(tokens[valid], others[valid])
        counts = torch.where(spans.known > 1, spans.known, spans.known * (paths.lengths + 1))
        counts = (counts - (torch.rand(len(known)) < 0.2).long()).clamp(min=0)
        features = torch.zeros(len(layout.batch.tokens), 1)
        commits = Commits(spans.slots, counts, layout.first_row, layout.batch, features)
        want, found = both("follow_paths", commits, layout, rows, planting, paths)
        for name in ("before", "last"):
            assert torch.equal(getattr(want, name), getattr(found, name)), name
        same(want.batch, found.batch)
        accepted += int(paths.lengths.sum())
    assert accepted or not any(drafts)


def test_drafts_are_written_behind_the_text() -> None:
    history, length = torch.zeros(4, 12, dtype=torch.int64), torch.tensor([5, 0, 2, 7])
    tokens = torch.arange(1, 9).view(2, 4)[:, :3]
    kernels.write_drafts(torch.tensor([3, 0]), tokens, history, length)
    assert history[3].tolist() == [0] * 7 + [1, 2, 3, 0, 0]
    assert history[0].tolist() == [0] * 5 + [5, 6, 7] + [0] * 4
    assert not history[1:3].any()
