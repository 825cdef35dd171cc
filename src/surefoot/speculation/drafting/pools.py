"""A drafter's KV: the target's blocks under the target's ids, and scratch blocks for drafts.

Keys of committed positions lie in the request's own blocks, so that a prefix hit serves target and
drafter alike. What drafting writes goes to the request's own unfinished block or to the slot's
scratch blocks, and the next catch-up knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import FlatBatch, SpanTable
from surefoot.kernels.drafter_parts import LiveRows, Scratch
from surefoot.speculation.drafting.network import Network
from surefoot.speculation.state import SlotState


class DrafterPools:
    """``scratch_keys``: the most keys that drafting writes for a request, the live row's too."""

    def __init__(self, network: Network, state: SlotState, scratch_keys: int) -> None:
        self.network = network
        self.state = state
        self.scratch_keys = scratch_keys
        self.scratch_blocks = -(-scratch_keys // state.block_size)
        """Blocks of its own that each slot has for drafts."""
        per_layer = network.backend.kv_bytes_per_block(state.block_size, network.shape)
        self.bytes_per_block = network.layers * per_layer
        self.scratch_bytes = state.slots * self.scratch_blocks * self.bytes_per_block
        self.blocks = 0
        self.kv: list[Any] = []
        """A pool for each layer."""
        self._each = torch.arange(state.slots, device=state.device)
        self._ones = torch.ones_like(self._each)

    def allocate(self, blocks: int) -> None:
        """Make room for the target's ``blocks`` and the scratch blocks behind them."""
        network, state = self.network, self.state
        total = blocks + state.slots * self.scratch_blocks
        self.blocks = blocks
        try:
            self.kv = network.backend.allocate_kv(
                network.layers, total, state.block_size, network.shape
            )
        except ValueError as error:
            raise SurefootError(
                "path", f"the {network.backend.name} backend cannot run it: {error}"
            ) from error

    def live_rows(
        self, slots: torch.Tensor, before: torch.Tensor | None, steps: int, max_keys: int
    ) -> LiveRows:
        """The current tokens of ``slots`` int64 [B], over keys that end in scratch. ``before``
        [slots, hidden]: features of the positions before them, if the network reads any;
        ``max_keys``: bound of the texts' lengths, 0 if none is known."""
        state, network = self.state, self.network
        return network.drafting.live_rows(
            slots, before, state.history, state.length, state.block_tables,
            self.scratch(max_keys), steps, network.behind, network.last_position,
        )  # fmt: skip

    def scratch(self, max_keys: int) -> Scratch:
        """Where drafts' keys go behind texts of at most ``max_keys`` tokens; 0: of any length."""
        most = (max_keys or self.state.history.shape[1]) + self.scratch_keys
        size = self.state.block_size
        return Scratch(self.blocks, self.scratch_blocks, size, -(-most // size))

    def rows(self, live: LiveRows, step: int) -> FlatBatch:
        """One row a request: the live row itself, or the draft so many steps after it."""
        row, one = self._each[: len(live.tokens)], self._ones[: len(live.tokens)]
        return FlatBatch(
            tokens=live.tokens,
            positions=live.positions[step],
            key_index=live.keys[step],
            row_slot=row,
            block_tables=live.tables,
            span_start=live.keys[1],
            max_keys=live.tables.shape[1] * self.state.block_size,
            first_key=self.network.first_key,
            spans=SpanTable(row, one, row, max_rows=1),
        )

    def block(self, live: LiveRows, rows: int, filler: int) -> FlatBatch:
        """``rows`` rows a request: the live row, and behind it rows of the token ``filler``. Who
        sees what is yet to be said."""
        found = self.network.drafting.block_rows(live, rows, filler)
        row = self._each[: len(live.tokens)]
        return FlatBatch(
            tokens=found.tokens,
            positions=found.positions,
            key_index=found.keys,
            row_slot=found.owners,
            block_tables=live.tables,
            span_start=live.keys[0],
            max_keys=live.tables.shape[1] * self.state.block_size,
            first_key=self.network.first_key,
            spans=SpanTable(found.first_rows, found.counts, row, max_rows=rows),
        )
