"""Layers in one call of C: bit for bit what they give one after the other, which
test_native_backend compares with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from surefoot.kernels.backend import Backend
from surefoot.kernels.batch import OutputRows
from surefoot.kernels.cpu.backend import NativeBackend
from test_native_backend import LAYOUTS, Row, Runner, chain, native

COUNT = 3
ROWS = [*chain(0, 0, 5), *chain(1, 0, 1), *chain(2, 0, 3)]
STARTS = {0: 0, 1: 0, 2: 0}
WANTED = [3, 4, 5, 8]
VOCABULARY = 40


class Stack(Runner):
    """Layers of different weights, each with keys of its own."""

    def __init__(self, name: str, threads: int, backend: NativeBackend | None = None) -> None:
        layout = LAYOUTS[name]
        super().__init__(layout, backend or native(layout, threads).backend)
        self.weights_of = [layout.weights(self.backend) for _ in range(COUNT)]
        for place, weights in enumerate(self.weights_of):
            # Else every layer would do the same.
            weights.post_norm.mul_(1.0 + 0.25 * place)
        pages = self.tables.numel() + 1
        self.kv = self.backend.allocate_kv(COUNT, pages, self.block_size, layout.shape)

    def run(
        self, whole: bool, capture: Sequence[int], wanted: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, outputs = self.batch(ROWS, STARTS), None
        if wanted is not None:
            part = self.batch([ROWS[row] for row in wanted], STARTS)
            outputs = OutputRows(torch.tensor(wanted), part)
        x = torch.stack([self.input(row) for row in ROWS])
        args = self.weights_of, x, batch, self.kv, self.rope, capture, outputs
        return self.backend.layers(*args) if whole else Backend.layers(self.backend, *args)

    def target(
        self, apart: bool, capture: Sequence[int], wanted: Sequence[int] | None, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of tokens from ``first`` on. ``apart``: part by part, with tokens in any case."""
        tokens = torch.arange(first, first + len(ROWS))
        batch, outputs = replace(self.batch(ROWS, STARTS), tokens=tokens), None
        if wanted is not None:
            part = self.batch([ROWS[row] for row in wanted], STARTS)
            outputs = OutputRows(torch.tensor(wanted), part)
        generator = torch.Generator().manual_seed(9)
        weight = torch.randn(VOCABULARY, self.layout.hidden, generator=generator)
        table, linear = self.backend.pack_embedding(weight)
        head = torch.ones(self.layout.hidden), 1e-5, linear
        args = self.weights_of, batch, self.kv, self.rope, capture, outputs
        if not apart:
            return self.backend.target(table, *args, head)
        hidden, features, _ = Backend.target(self.backend, table, *args)
        return hidden, features, self.backend.greedy(*head, hidden)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_layers_one_after_the_other(name: str, threads: int) -> None:
    whole, apart = Stack(name, threads), Stack(name, 1)
    cases = [((), None), ((0, 2), None), ((1, COUNT), None), ((1,), WANTED), ((2, COUNT), WANTED)]
    for capture, wanted in cases:
        (found, features), (expected, wanted_features) = (
            stack.run(stack is whole, capture, wanted) for stack in (whole, apart)
        )
        assert torch.equal(found, expected), (capture, wanted)
        assert torch.equal(features, wanted_features), (capture, wanted)
        assert features.shape == (len(ROWS), len(capture) * whole.layout.hidden)
        for mine, theirs in zip(whole.kv, apart.kv, strict=True):
            assert torch.equal(mine.data, theirs.data)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_targets_pass_is_its_parts_one_after_the_other(name: str, threads: int) -> None:
    whole, apart = Stack(name, threads), Stack(name, 1)
    cases = [((), None), ((0, 2), None), ((1, COUNT), None), ((1,), WANTED)]
    for capture, wanted in cases:
        found, features, tokens = whole.target(False, capture, wanted)
        expected, wanted_features, likeliest = apart.target(True, capture, wanted)
        assert torch.equal(found, expected) and torch.equal(features, wanted_features)
        assert likeliest is not None
        if tokens is not None:
            assert torch.equal(tokens, likeliest)
        # Whoever wants other rows' hidden states, or what leaves the last layer, needs these first.
        assert (tokens is None) == (wanted is not None or COUNT in capture)
        for mine, theirs in zip(whole.kv, apart.kv, strict=True):
            assert torch.equal(mine.data, theirs.data)


def test_a_token_outside_the_table_is_refused_before_anything_is_written() -> None:
    stack = Stack("fp32", 1)
    with pytest.raises(IndexError, match=f"vocabulary of {VOCABULARY}"):
        stack.target(False, (), None, first=VOCABULARY)
    assert not any(pool.data.any() for pool in stack.kv)


def test_other_layers_and_other_keys_are_noticed() -> None:
    """What was prepared for the last call is not what this one is about."""
    first = Stack("fp32", 1)
    assert isinstance(first.backend, NativeBackend)
    second = Stack("fp32", 1, first.backend)
    second.weights_of = [replace(each, eps=0.5) for each in second.weights_of]
    alone = {}
    for stack in (first, second):
        alone[stack] = stack.run(False, (1,))
    for stack in (first, second, first, first, second):
        for pool in stack.kv:
            pool.data.zero_()
        found, features = stack.run(True, (1,))
        assert torch.equal(found, alone[stack][0]) and torch.equal(features, alone[stack][1])
        assert all(pool.data.any() for pool in stack.kv)
    assert not torch.equal(alone[first][0], alone[second][0])
    # One layer in the middle is another one, or has its keys elsewhere.
    first.run(True, ())
    first.weights_of[1] = second.weights_of[1]
    assert torch.equal(first.run(True, ())[0], first.run(False, ())[0])
    first.kv[1] = second.kv[1]
    second.kv[1].data.zero_()
    first.run(True, ())
    assert second.kv[1].data.any()


def test_no_rows_and_no_layers() -> None:
    stack = Stack("fp32", 1)
    x = torch.randn(2, 64)
    batch = stack.batch([Row(0, 0), Row(0, 1)], STARTS)
    found, features = stack.backend.layers([], x, batch, [], stack.rope, (0,))
    assert torch.equal(found, x) and torch.equal(features, x)
    none = stack.batch(ROWS[:1], STARTS)
    none = replace(none, **{n: getattr(none, n)[:0] for n in ("tokens", "positions", "key_index")})
    none = replace(none, row_slot=none.row_slot[:0])
    args = stack.weights_of, torch.zeros(0, 64), none, stack.kv, stack.rope, (0, COUNT)
    found, features = stack.backend.layers(*args)
    assert found.shape == (0, 64) and features.shape == (0, 128)
