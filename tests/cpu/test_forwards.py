"""Forwards padded to few sizes: the same results, and nothing of others touched."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from harness import random_weights, tiny_config
from surefoot.engine.forwards import PaddedForward, row_counts
from surefoot.kernels.batch import FlatBatch, SpanTable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.speculation.state import SlotState

SLOTS, BLOCK, PAGES = 4, 4, 20


@pytest.mark.parametrize("most", [16, 17, 40, 100, 2560])
def test_sizes_waste_less_than_half(most: int) -> None:
    counts = row_counts(most)
    assert counts == sorted(set(counts)) and counts[-1] == most
    assert all(after <= 1.5 * before for before, after in itertools.pairwise(counts))


class World:
    """Two copies of a decoder's KV and slots."""

    def __init__(self) -> None:
        config = tiny_config()
        backend = TorchBackend("cpu", torch.float32)
        self.decoder = Decoder(config, random_weights(config), backend)
        pools = [backend.allocate_kv(config.layers, 99, BLOCK, self.decoder.shape) for _ in "ab"]
        self.kv, self.expected = pools
        self.state = SlotState(SLOTS, 60, 8, BLOCK, config.vocab_size, torch.device("cpu"))
        blocks = 1 + torch.arange(SLOTS * self.state.block_tables.shape[1])
        self.state.block_tables.copy_(blocks.view_as(self.state.block_tables))
        self.forward = PaddedForward(self.decoder, self.kv, [1], self.state, 40)

    def batch(self, counts: dict[int, int]) -> FlatBatch:
        """The next ``counts[slot]`` rows of each slot."""
        start, slots = self.state.computed, list(counts)
        rows = torch.tensor(list(counts.values()))
        owner = torch.tensor(slots).repeat_interleave(rows)
        first = rows.cumsum(0) - rows
        offset = torch.arange(len(owner)) - first.repeat_interleave(rows)
        positions = start[owner] + offset
        return FlatBatch(
            tokens=(owner * 5 + positions * 3) % 20,
            positions=positions,
            key_index=positions,
            row_slot=owner,
            block_tables=self.state.block_tables,
            span_start=start,
            max_keys=int(positions.max()) + 1,
            spans=SpanTable(first, rows, torch.tensor(slots), int(rows.max())),
        )

    def check(self, batch: FlatBatch) -> None:
        found = self.forward(batch)
        right = self.decoder.forward(batch, self.expected, [1])
        torch.testing.assert_close(found.hidden, right.hidden)
        if len(batch.tokens) <= 40:
            # This backend goes by rows; others by spans.
            assert batch.spans is not None
            counts = self.forward.spans[1]
            assert torch.equal(counts[: len(batch.spans.rows)], batch.spans.rows)
            assert int(counts.sum()) == len(batch.tokens)
        torch.testing.assert_close(found.features, right.features)
        # Padding rows may write to block 0, which is nobody's.
        for pool, expected in zip(self.kv, self.expected, strict=True):
            torch.testing.assert_close(pool[:, 1:], expected[:, 1:])

    def keep(self, counts: dict[int, int]) -> None:
        for slot, count in counts.items():
            self.state.computed[slot] += count


def test_padding_changes_nothing() -> None:
    """Also after a larger round, whose rows still stand in the tables, and beyond all sizes."""
    world = World()
    for counts in ({0: 30, 1: 5}, {1: 1}, {2: 7, 0: 1, 1: 1}, {3: 1, 2: 1}, {3: 41}, {1: 2, 3: 1}):
        world.check(world.batch(counts))
        world.keep(counts)


def test_masks_are_padded_with_their_rows() -> None:
    world = World()
    world.check(world.batch({0: 9, 1: 6}))
    world.keep({0: 9, 1: 6})
    batch = world.batch({0: 4, 1: 3})
    # Two branches under each root; the second slot is causal.
    mask = torch.tensor([0b1, 0b11, 0b101, 0b1011, -1, -1, -1])
    world.check(replace(batch, mask=mask))
    world.check(world.batch({0: 4, 1: 3}))
