"""The book-keeping around a round in a few kernels, on an NVIDIA GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.backend import Backend
from surefoot.kernels.rounds import RoundLayout, RoundSpans, RoundVerdict
from surefoot.kernels.triton import control, learning, trees
from surefoot.kernels.triton.slots import lay_out
from surefoot.kernels.triton.verdict import judge_and_advance
from surefoot.speculation.books import LEAST, BookKeeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.estimator import BINS, GLOBAL_DECAY, PRIOR_RANGE, SLOT_DECAY
from surefoot.speculation.proposer import Commits, Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import NodeRows, Paths, Trees

if TYPE_CHECKING:
    from surefoot.speculation.size import Size

SLOT_DECAY_LOG2, GLOBAL_DECAY_LOG2 = math.log2(SLOT_DECAY), math.log2(GLOBAL_DECAY)


class TritonBooks(BookKeeping):
    """``BookKeeping`` by Triton kernels: one for each operation."""

    def __init__(
        self, backend: Backend, state: SlotState, controller: Controller, spans: int
    ) -> None:
        super().__init__(backend, state, controller, spans)
        self.news = torch.zeros_like(controller.records.seen, dtype=torch.int64)
        """What a round taught, until the next one's ``split`` enters it (``learning``)."""

    def split(self, slots: torch.Tensor, quota: torch.Tensor, size: Size) -> RoundSpans:
        rows = size.rows, size.samples
        return control.split(self, self.news, slots, quota, *rows, GLOBAL_DECAY_LOG2, size.verifies)

    def lay_out(self, spans: RoundSpans, size: Size, max_keys: int) -> RoundLayout:
        state = self.state
        return lay_out(
            spans, state.history, state.computed, state.block_tables,
            size.rows, size.samples, max_keys, size.longest_span(state.max_drafts),
        )  # fmt: skip

    def write_drafts(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        trees.write_drafts(slots, tokens, self.state.history, self.state.length)

    def judge(
        self, spans: RoundSpans, first_sample: torch.Tensor, sampled: torch.Tensor
    ) -> RoundVerdict:
        state = self.state
        return judge_and_advance(
            spans, first_sample, sampled, state.history, state.length, state.computed,
            state.limit, state.params.stop_ids, state.max_drafts,
        )  # fmt: skip

    def learn(self, index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        offers = None
        if drafts is not None:
            offers = drafts.tokens, drafts.lengths, drafts.confidence, drafts.parents
        learning.learn(self, self.news, index, slots, offers, SLOT_DECAY_LOG2, BINS)

    def choose_and_report(
        self, slots: torch.Tensor, drafts: torch.Tensor, verdict: RoundVerdict, proposing: bool
    ) -> None:
        control.keep(
            self, self.news, slots, drafts, verdict, proposing,
            GLOBAL_DECAY_LOG2, PRIOR_RANGE, LEAST, BINS,
        )  # fmt: skip

    def cut(self, cuts: torch.Tensor) -> None:
        control.cut(self, cuts)

    def ancestors(self, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return trees.ancestors(parents)

    def offered_trees(self, slots: torch.Tensor) -> Trees:
        assert self.offers.parents is not None
        return Trees(*trees.offered_trees(slots, self.offers.tokens, self.offers.parents))

    def node_rows(self, layout: RoundLayout, offered: Trees, drafts: torch.Tensor) -> NodeRows:
        batch = layout.batch
        assert batch.spans is not None
        owner, offset, depth, positions, masks = trees.node_rows(
            layout.first_row,
            batch.spans.rows,
            batch.positions,
            offered.masks,
            offered.depths,
            drafts,
        )
        return NodeRows(owner, offset, depth, positions, masks, drafts)

    def walk(
        self,
        offered: Trees,
        sampled: torch.Tensor,
        first_sample: torch.Tensor,
        drafts: torch.Tensor,
    ) -> tuple[Paths, torch.Tensor]:
        lengths, rows, tokens = trees.walk(
            offered.tokens,
            offered.parents,
            offered.masks,
            offered.depths,
            sampled,
            first_sample,
            drafts,
        )
        return Paths(lengths, rows), tokens

    def follow_paths(
        self, commits: Commits, layout: RoundLayout, rows: NodeRows, offered: Trees, paths: Paths
    ) -> Commits:
        batch = commits.batch
        keys, slots, before, last = trees.follow_paths(
            (rows.owner, rows.offset, rows.depth), offered.parents, (paths.lengths, paths.rows),
            layout.first_row, commits.counts, batch.key_index, batch.row_slot, rows.nodes,
        )  # fmt: skip
        batch = replace(batch, key_index=keys, row_slot=slots, mask=None)
        return commits._replace(batch=batch, before=before, last=last)
