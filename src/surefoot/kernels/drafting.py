"""What proposers ask of a backend and targets do not: search the text, find the rows that drafts
start from, pair rows with features, write keys alone, pick drafts from logits. ``Backend.drafting``
is a backend's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.block_drafting import BlockDrafter, BlockWeights
from surefoot.kernels.drafter_parts import (
    BlockRows,
    ContextWeights,
    EntryWeights,
    FeatureWeights,
    LiveRows,
    Scratch,
)
from surefoot.kernels.draws import Adjustments, Draws
from surefoot.kernels.lookup import Matches, ngram_lookup
from surefoot.kernels.reference import silu_mul
from surefoot.kernels.tree_growth import TreeGrowth

if TYPE_CHECKING:
    from surefoot.kernels.backend import AttentionShape, Backend, LayerWeights, RopeTable


class Drafting(TreeGrowth, ABC):
    """The operations in torch, on any device; backends may do them faster."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def ngram_lookup(
        self,
        history: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        min_ngram: int,
        max_ngram: int,
        window: int,
        drafts: int,
    ) -> Matches:
        """See ``kernels.lookup``."""
        return ngram_lookup(history, length, slots, min_ngram, max_ngram, window, drafts)

    def write_keys(
        self,
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: Any,
        rope: RopeTable,
    ) -> None:
        """Of a block only the rows' keys and values, from ``inputs`` as in ``Backend.layer``."""
        projected = self.backend.linear(weights.kv, inputs)
        self.store_keys(projected, weights.shape, weights.k_norm, weights.eps, batch, kv, rope)

    @abstractmethod
    def store_keys(
        self,
        projected: torch.Tensor,
        shape: AttentionShape,
        k_norm: torch.Tensor | None,
        eps: float,
        batch: FlatBatch,
        kv: Any,
        rope: RopeTable,
    ) -> None:
        """Write the rows' keys, normed and rotated, and values: ``projected`` [N, 2 * kv_heads *
        head_dim], keys first. Rows may be strided, and may be overwritten."""

    def write_context(
        self,
        weights: ContextWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: Sequence[Any],
        rope: RopeTable,
    ) -> None:
        """The rows' keys and values in every layer, from ``inputs`` [N, hidden], into a pool each:
        one product for all."""
        projected = self.backend.linear(weights.kv, inputs).chunk(len(kv), dim=1)
        for part, k_norm, pool in zip(projected, weights.k_norms, kv, strict=True):
            self.store_keys(part, weights.shape, k_norm, weights.eps, batch, pool, rope)

    def write_features(
        self,
        weights: FeatureWeights,
        features: torch.Tensor,
        batch: FlatBatch,
        served: torch.Tensor | None,
        last_position: int,
        kv: Sequence[Any],
        rope: RopeTable,
        settled: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """``write_context`` of captured layers, ``features`` [N, any width], for the rows of slots
        that are ``served`` (bool [slots]; None: all). RoPE positions are the rows' key indices, as
        far as ``last_position``. ``settled``: first rows and numbers of rows of the spans of which
        anything is wanted, int64 [B] each; the others may be written or not."""
        backend, row_slot = self.backend, batch.row_slot
        if served is not None:
            row_slot = torch.where(served[row_slot], row_slot, -1)
        positions = batch.key_index.clamp(max=last_position)
        batch = replace(batch, positions=positions, row_slot=row_slot, mask=None)
        fused = backend.linear(weights.fuse, features)
        fused = backend.rms_norm(fused, weights.norm, weights.context.eps)
        self.write_context(weights.context, fused, batch, kv, rope)

    def keep_rows(
        self,
        features: torch.Tensor,
        batch: FlatBatch,
        slots: torch.Tensor,
        settled: tuple[torch.Tensor, torch.Tensor],
        kept: torch.Tensor,
        table: torch.Tensor,
        at: int,
        most: int,
    ) -> int:
        """Copy the settled rows of spans, span by span, behind the ``at`` rows that are kept: their
        ``features`` [N, width] into ``kept`` float32 [room, width], and their tokens, key indices
        and slots into ``table`` int64 [3, room]. ``slots`` and ``settled``, first rows and numbers
        of rows: int64 [B] each. Returns how many are kept then; -1, and nothing done, where they do
        not all fit, or are more than ``most``. Reads ``settled`` on the host."""
        first, counts = settled
        rows = [
            row
            for begin, count in zip(first.tolist(), counts.tolist(), strict=True)
            for row in range(begin, begin + count)
        ]
        end = at + len(rows)
        if len(rows) > most or end > len(kept):
            return -1
        index = torch.tensor(rows, dtype=torch.int64, device=features.device)
        kept[at:end] = features[index]
        own = batch.tokens[index], batch.key_index[index], slots.repeat_interleave(counts)
        table[:, at:end] = torch.stack(own)
        return end

    def block_drafter(
        self,
        weights: BlockWeights,
        kv: Sequence[Any],
        history: torch.Tensor,
        length: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> BlockDrafter | None:
        """What drafts blocks at once, with keys in ``kv``, a pool for each layer; the texts as of
        ``live_rows``, in tensors that are never replaced. None where the device has no kernel for
        it."""
        return None

    @abstractmethod
    def attention(
        self,
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: Any,
        rope: RopeTable,
    ) -> torch.Tensor:
        """Of ``Backend.layer`` the attention alone, its output projection included: ``inputs`` [N,
        any width] -> [N, hidden]. Writes the rows' keys and values."""

    def mlp(self, weights: LayerWeights, inputs: torch.Tensor) -> torch.Tensor:
        """Of ``Backend.layer`` the MLP alone: ``inputs`` [N, hidden], normed -> [N, hidden]."""
        backend = self.backend
        return backend.linear(weights.down, silu_mul(backend.linear(weights.gate_up, inputs)))

    def convolve(
        self, y: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, block: int
    ) -> torch.Tensor:
        """A causal convolution over the rows of each block, y [B * block, hidden]: row i becomes
        the sum over taps t of ``(base[t] + dynamic[i, t]) * y[i - t]``, without neighbours before
        a block's first row. ``base`` [taps, hidden]; ``dynamic`` [B * block, taps, groups], each
        for neighbouring channels."""
        rows = y.view(-1, block, y.shape[1])
        taps, groups = dynamic.shape[1:]
        per_group = y.shape[1] // groups
        weights = dynamic.repeat_interleave(per_group, dim=2) + base
        weights = weights.view(-1, block, taps, y.shape[1])
        mixed = weights[:, :, 0] * rows
        for tap in range(1, min(taps, block)):
            mixed[:, tap:] += weights[:, tap:, tap] * rows[:, :-tap]
        return mixed.view_as(y)

    def add_linear(self, logits: torch.Tensor, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """float32 logits [B, n] plus a packed linear of x [B, in]: float32 [B, n]."""
        return logits + self.backend.linear(linear, x).float()

    def add_looked_up(
        self, logits: torch.Tensor, linear: Any, table: Any, tokens: torch.Tensor
    ) -> torch.Tensor:
        """``add_linear`` without bias of what ``table``, an embedding, has for ``tokens`` int64
        [B]."""
        return self.add_linear(logits, linear, self.backend.embed(table, tokens))

    def markov(
        self,
        logits: torch.Tensor,
        before: Any,
        after: Any,
        current: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor | None,
    ) -> None:
        """One row of B requests after another, float32 logits [n, B, m]: the likeliest token
        (``likeliest``, with ``ids``) of the row plus ``after``, a packed linear, of what
        ``before``, an embedding by the target's ids, has for the token before it. The first rows
        follow ``current`` int64 [B]. Tokens go to ``tokens`` int64 [n, B], the chances of these to
        ``chances`` float32 [n, B], if anybody asks. May overwrite ``logits``."""
        if chances is None:
            chances = torch.empty(tokens.shape, device=tokens.device)
        for step, row in enumerate(logits):
            row = self.add_looked_up(row, after, before, current)
            current = tokens[step]
            self.likeliest(row, ids, current, chances[step])

    def draw_markov(
        self,
        logits: torch.Tensor,
        before: Any,
        after: Any,
        current: torch.Tensor,
        ids: torch.Tensor | None,
        draws: Draws,
        adjustments: Adjustments,
        positions: torch.Tensor,
        history: torch.Tensor,
        tokens: torch.Tensor,
        chances: torch.Tensor | None,
    ) -> bool:
        """As ``markov``, but each token is drawn as ``draw`` does, at ``positions`` int64 [n, B],
        after ``Backend.adjust`` of its logits, whose drafts before it count; ``draws`` and
        ``adjustments`` are those of the first rows. Ends may be masked as there.
        False, and nothing done, where the device has no kernel for it."""
        return False

    def layer_and_head(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        batch: FlatBatch,
        kv: Any,
        rope: RopeTable,
        inputs: torch.Tensor,
        norm: torch.Tensor,
        head: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``Backend.layer``, and ``Backend.head`` of its output [N, hidden] with the layer's
        epsilon: (output, float32 logits [N, vocab])."""
        backend = self.backend
        x = backend.layer(weights, x, batch, kv, rope, inputs)
        return x, backend.head(norm, weights.eps, head, x)

    def entry_inputs(
        self, weights: EntryWeights, tokens: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Tokens int64 [N] and features [N, hidden] -> [N, 2 * hidden]: both normed, side by side.
        ``tokens`` may be strided."""
        backend = self.backend
        embedded = backend.embed(weights.table, tokens)
        embedded = backend.rms_norm(embedded, weights.embedding_norm, weights.eps)
        normed = backend.rms_norm(features, weights.hidden_norm, weights.eps)
        return torch.cat((embedded, normed), dim=1)

    def shift_features(
        self,
        features: torch.Tensor,
        before: torch.Tensor,
        last_of_block: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        batch: FlatBatch,
        block_size: int,
        last_position: int,
        served: torch.Tensor | None = None,
        above: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pair each row of ``batch`` [N] with the feature of the position before it. Returns these
        features [N, hidden], RoPE positions int64 [N] (both unspecified for padding) and the rows'
        slots int64 [N], -1 also for rows of slots that are not ``served``.

        ``features`` [N, hidden]: the rows' own. ``before`` [slots, hidden]: of the position before
        each slot's first row; afterwards of its last settled one. ``last_of_block`` [blocks,
        hidden]: of each block's last position, written where a served row is that. By span, int64
        [B]: ``slots``, first ``rows`` and settled ``counts``; entries that settled nothing may
        share their slot with one that did. ``served`` bool [slots] or None as ``Commits.served``;
        ``before`` of other slots is unspecified afterwards. ``above`` int64 [N] and ``last`` int64
        [B] as ``Commits.before`` and ``Commits.last``."""
        owner, row_slot = batch.row_slot.clamp(min=0), batch.row_slot
        if served is not None:
            row_slot = torch.where(served[owner], row_slot, -1)
        if above is None:
            begins = torch.ones_like(batch.row_slot, dtype=torch.bool)
            begins[1:] = batch.row_slot[1:] != batch.row_slot[:-1]
            shifted = torch.cat((features[:1], features[:-1]))
        else:
            begins, shifted = above < 0, features[above.clamp(min=0)]
        shifted = torch.where(begins.unsqueeze(1), before[owner], shifted)
        # A rejected draft's feature may land here too; by the time that its block is full, and can
        # be found by others, the position has been run again.
        blocks = batch.block_tables[owner, batch.key_index // block_size].long()
        ends = (batch.key_index % block_size == block_size - 1) & (row_slot >= 0)
        # Block 0 belongs to nobody.
        last_of_block.index_copy_(0, torch.where(ends, blocks, 0), features)
        live = torch.where(counts > 0, rows + counts - 1 if last is None else last, -1)
        row = torch.full((before.shape[0],), -1, dtype=torch.int64, device=before.device)
        row.scatter_reduce_(0, slots, live, "amax")
        kept = (row < 0).unsqueeze(1)
        before.copy_(torch.where(kept, before, features[row.clamp(min=0)]))
        return shifted, (batch.key_index - 1).clamp(0, last_position), row_slot

    def live_rows(
        self,
        slots: torch.Tensor,
        before: torch.Tensor | None,
        history: torch.Tensor,
        length: torch.Tensor,
        block_tables: torch.Tensor,
        scratch: Scratch,
        steps: int,
        behind: int,
        last_position: int,
    ) -> LiveRows:
        """The live rows of ``slots`` int64 [B]. By slot: ``before`` [slots, hidden] (None: no
        features), ``history`` int64 [slots, width], ``length`` int64 [slots], ``block_tables``
        int32 [slots, blocks]. RoPE positions are ``behind`` those of the keys and end at
        ``last_position``."""
        # The slot that nobody has is one token long: at key 0 it would see nothing at all.
        current = (length[slots] - 1).clamp(min=1)
        keys = current + torch.arange(steps + 1, device=slots.device).unsqueeze(1)
        page = torch.arange(scratch.pages, device=slots.device)
        tables = block_tables[slots][:, page.clamp(max=block_tables.shape[1] - 1)]
        beyond = page - (current - 1).unsqueeze(1) // scratch.block_size - 1
        own = scratch.first + slots.unsqueeze(1) * scratch.blocks
        own = own + beyond.clamp(0, scratch.blocks - 1)
        return LiveRows(
            tokens=history[slots, current],
            features=None if before is None else before[slots],
            keys=keys,
            positions=(keys - behind).clamp(0, last_position),
            tables=torch.where(beyond < 0, tables, own.to(torch.int32)),
        )

    def block_rows(self, live: LiveRows, rows: int, filler: int) -> BlockRows:
        """``rows`` rows a request: the live row, and behind it rows of the token ``filler``. All of
        them are among ``live.keys``."""
        each = torch.arange(len(live.tokens), device=live.tokens.device)
        tokens = torch.full_like(live.keys[:rows].t(), filler)
        tokens[:, 0] = live.tokens
        return BlockRows(
            tokens.flatten(),
            live.positions[:rows].t().flatten(),
            live.keys[:rows].t().flatten(),
            each.repeat_interleave(rows, output_size=len(each) * rows),
            each * rows,
            torch.full_like(each, rows),
        )

    def likeliest(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor,
    ) -> None:
        """Of float32 logits [B, n] each row's largest, the first among equals: its column, or what
        ``ids`` int64 [n] call it, into ``tokens`` int64 [B], its probability into ``chances``
        float32 [B]. Both may be strided."""
        best = self.backend.argmax(logits)
        tokens.copy_(best if ids is None else ids[best])
        chosen = logits.gather(1, best.unsqueeze(1)).squeeze(1)
        chances.copy_((chosen - logits.logsumexp(dim=-1)).exp())

    def likeliest_by_head(
        self,
        norm: torch.Tensor,
        eps: float,
        head: Any,
        hidden: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor,
        most: int,
    ) -> None:
        """``likeliest`` of the logits that ``Backend.head`` has for ``hidden`` [B, n, width], of
        whose B * n rows there are ``most`` at a time, or none."""
        parts = (each.split(most) for each in (hidden.flatten(0, 1), tokens, chances))
        for rows, *out in zip(*parts, strict=True):
            self.likeliest(self.backend.head(norm, eps, head, rows), ids, out[0], out[1])

    def draw(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        draws: Draws,
        history: torch.Tensor,
        tokens: torch.Tensor,
        chances: torch.Tensor,
    ) -> bool:
        """``Backend.draw`` from float32 logits [B, n] over the target's tokens ``ids`` int64 [n]
        (None: all of them): the tokens into ``tokens`` int64 [B] and, at the draws' places, into
        ``history`` int64 [slots, width]; their probabilities before the filters into ``chances``
        float32 [B]. Borders of top-k and top-p may be found roughly: what is drafted is verified.
        False, and nothing done, where the device has no kernel for it."""
        return False
