"""The round: verify, sample, accept, commit, catch up, propose, for the whole batch at once.

Prompt chunks, chains, trees and single tokens are spans of one flat batch, and everything here is a
fixed sequence of tensor operations that reads nothing on the host. The host says who takes part
(``Round.set_batch``) and how large the round is (``Size``); who drafts how much, what is accepted
and which texts end is found on the device. So a GPU records a round once for each size, and the
host may launch the next one before it has read this one. It records it in two parts, ``run_target``
and ``go_on``: the first takes most of the time to record, and many sizes have it in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from surefoot.kernels.batch import AcceptedPaths, FlatBatch, OutputRows
from surefoot.kernels.rounds import RoundLayout, RoundSpans, RoundVerdict, sampled_rows
from surefoot.kernels.upload import Mirrored
from surefoot.models.decoder import Decoder, ForwardResult
from surefoot.sampling.params import SamplingStages
from surefoot.sampling.sampler import SampleRows, sample_rows
from surefoot.speculation.books import book_keeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.keeping_up import KeepingUp
from surefoot.speculation.proposer import (
    Commits,
    DraftCost,
    DraftRequest,
    Drafts,
    Proposer,
    blamed,
)
from surefoot.speculation.scoring import PromptReads, PromptScores, TokenScores
from surefoot.speculation.size import GREEDY, Size
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import (
    NodeRows,
    Paths,
    Trees,
    lay_out_trees,
    path_histories,
)

ReplaceSampled = Callable[[RoundSpans, RoundLayout, torch.Tensor], torch.Tensor]
"""(spans, layout, sampled tokens int64 [M]) -> tokens int64 [M] in their place."""
TreeRows = tuple[NodeRows, Trees]


class TargetRows(NamedTuple):
    """The rows of a round, and what the target made of them."""

    spans: RoundSpans
    layout: RoundLayout
    tree_rows: TreeRows | None
    """None where there are only chains."""
    hidden: torch.Tensor
    """[M, hidden], before the final norm: of the rows that sample."""
    features: torch.Tensor
    """[N, captured * hidden]: the layers that proposers read, of all rows."""
    prompt_scores: PromptScores
    tokens: torch.Tensor | None = None
    """int64 [M]: the likeliest behind these rows, where they are known already."""


class Round:
    """Binds a target, its KV, the slots and the proposers."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[Any],
        state: SlotState,
        proposers: Sequence[Proposer],
        controller: Controller,
        spans: int,
    ) -> None:
        """``spans``: the most requests of a round."""
        self.decoder = decoder
        self.backend = decoder.backend
        self.kv = kv
        self.state = state
        self.proposers = list(proposers)
        self.controller = controller
        self._batch = Mirrored((3, spans), state.device)
        self.slots, self.quota, self.scored = self._batch.there
        """int64 [spans] each: the requests of the next round, where the rest are unused entries;
        the most rows of known tokens of each: 1, or a prompt chunk; and the places of those whose
        tokens' logprobs are wanted."""
        self.slots.fill_(state.padding_slot)
        self._entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By spans, the first of ``slots`` and of ``quota``."""
        self.needs = [proposer.needs() for proposer in proposers]
        width = state.max_drafts
        longest = state.history.shape[1] - width - 1
        self.context_limits = [
            limit if limit is not None and limit < longest else None
            for limit in (need.context_limit for need in self.needs)
        ]
        """By proposer, where it is below what texts can reach."""
        self.drafters = {
            index: need.longest_draft for index, need in enumerate(self.needs) if need.has_network
        }
        """Most drafts in a row of the proposers whose drafting costs a network's time, by index."""
        self.longest = max(self.drafters.values(), default=0)
        self.whole = {
            index for index, need in enumerate(self.needs) if need.cost is DraftCost.PER_BLOCK
        }
        """Those of them whose offers cost about the same however far they draft."""
        self.trees = {
            index: _most_drafts(proposer, width)
            for index, (proposer, need) in enumerate(zip(self.proposers, self.needs, strict=True))
            if need.trees and need.has_network
        }
        """Most drafts of all branches of those of them that offer trees."""
        self.books = book_keeping(self.backend, state, controller, spans)
        self.keeping_up = KeepingUp(self.backend, state, self.proposers, self.needs, controller)
        """Whose state follows the texts."""
        self._first_of_paths = torch.arange(spans, device=state.device) * (1 + width)
        """int64 [spans]: where each path's tokens begin, laid out one behind the other."""
        self.scores = TokenScores(decoder, state, spans)
        self.replace_sampled: ReplaceSampled | None = None
        """For measurements and the certificate: between sampling and accepting."""

    def set_batch(
        self,
        slots: Sequence[int] | np.ndarray,
        quota: Sequence[int] | np.ndarray,
        scored: Sequence[int],
    ) -> None:
        """Say who takes part in the next round (int64 [n]), the most known rows that each of them
        runs, and the places of those whose tokens' logprobs are wanted."""
        table = self._batch.write()
        table[0] = self.state.padding_slot
        table[0, : len(slots)] = slots
        table[1, : len(slots)] = quota
        table[2, : len(scored)] = scored
        self._batch.send()

    def entries(self, spans: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first of ``slots`` and of ``quota``, which stay where they are."""
        found = self._entries.get(spans)
        if found is None:
            found = self._entries[spans] = self.slots[:spans], self.quota[:spans]
        return found

    def __call__(
        self, size: Size, max_keys: int | None = None, reads: PromptReads | None = None
    ) -> PromptScores:
        """Run a round: updates the slots, and leaves ``books.report`` and ``scores``.

        ``max_keys`` bounds what the texts hold after it, drafts included (None: nothing is
        known). ``reads``: what is wanted of prompts' rows, which is returned.
        """
        max_keys = max_keys or self.state.history.shape[1]
        rows = self.run_target(size, max_keys, reads)
        self.go_on(size, rows, max_keys)
        return rows.prompt_scores

    def run_target(self, size: Size, max_keys: int, reads: PromptReads | None = None) -> TargetRows:
        """The first part of a round: who gets rows, and the target's forward pass over them. It is
        the same for all sizes with the same ``Size.target``."""
        self.keeping_up.late_seconds = 0.0
        books = self.books
        spans = books.split(*self.entries(size.spans), size)
        layout = books.lay_out(spans, size, max_keys)
        tree_rows = self.find_trees(spans, size, layout)
        if tree_rows is not None:
            layout = lay_out_trees(layout, *tree_rows)
        outputs = None
        if size.has_prompts and reads is None:
            outputs = sampled_rows(spans, layout, 1 + self.state.max_drafts)
        likeliest = not size.has_prompts and self.takes_likeliest(size)
        forward = self.forward(layout.batch, outputs, likeliest)
        prompt_scores = self.scores.of_prompt(size, layout, forward.hidden, reads)
        hidden = forward.hidden
        if size.has_prompts and outputs is None:
            hidden = hidden[layout.sample_index]
        found = forward.features, prompt_scores, forward.tokens
        return TargetRows(spans, layout, tree_rows, hidden, *found)

    def go_on(self, size: Size, rows: TargetRows, max_keys: int) -> None:
        """The second part: sample, accept, commit, catch up, propose."""
        slots, spans, layout, tree_rows = rows.spans.slots, rows.spans, rows.layout, rows.tree_rows

        early = self._all_is_settled(size)
        works = self.keeping_up.works(self.settled(spans.known, rows)) if early else ()
        with self.backend.beside(works):
            sampled, logits = self.sample(
                size, layout, rows.hidden, max_keys, tree_rows, rows.tokens
            )
            verdict, paths = self.judge(spans, layout, sampled, tree_rows)
            if logits is not None and size.logprobs is not None:
                places = self.scored[: size.scored]
                self.scores.of_tokens(size, layout, logits, sampled, places, paths)
            if not early:
                self.catch_up(verdict.settled, size, rows, paths)

            def propose(index: int, going: torch.Tensor) -> Drafts:
                return self.propose(index, going, size, max_keys)

            self.books.finish(slots, size, spans.drafts, verdict, propose)

    def find_trees(self, spans: RoundSpans, size: Size, layout: RoundLayout) -> TreeRows | None:
        """The trees among the drafts of a round, and where its rows stand in them; None where there
        are only chains."""
        if not size.verifies or self.books.offers.parents is None:
            return None
        trees = self.books.offered_trees(spans.slots)
        return self.books.node_rows(layout, trees, spans.drafts), trees

    def forward(
        self, batch: FlatBatch, outputs: OutputRows | None = None, likeliest: bool = False
    ) -> ForwardResult:
        """The target's, with the layers that proposers read."""
        return self.decoder.forward(batch, self.kv, self.keeping_up.capture, outputs, likeliest)

    @staticmethod
    def takes_likeliest(size: Size) -> bool:
        """Whether all that is sampled is the likeliest token of its row, and nothing else told."""
        return size.kind == GREEDY and size.logprobs is None and not size.masked

    def sample(
        self,
        size: Size,
        layout: RoundLayout,
        hidden: torch.Tensor,
        max_keys: int,
        tree_rows: TreeRows | None = None,
        likeliest: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The token of every row that samples, int64 [M], from their ``hidden`` [M, hidden], and
        the float32 logits [M, vocab] where logprobs are wanted, at least those of who wants them.
        ``likeliest``: int64 [M], where they are known already."""
        if size.samples == 0:
            return torch.zeros(1, dtype=torch.int64, device=self.state.device), None
        decoder = self.decoder
        if self.takes_likeliest(size):
            return decoder.greedy(hidden) if likeliest is None else likeliest, None
        params, backend = self.state.params, self.backend
        logits, maxima = decoder.logits_where_used(hidden, layout.sample_slots, params.use)
        rows = self.rows_to_sample(layout, size.kind, tree_rows, max_keys)
        masks = None
        if size.masked:
            masks = self.state.token_masks(layout.sample_slots, layout.first_sample)
        unread = size.logprobs is None
        sampled = sample_rows(logits, rows, params, size.kind, backend, masks, unread, maxima)
        return sampled, None if unread else logits

    def rows_to_sample(
        self, layout: RoundLayout, kind: SamplingStages, tree_rows: TreeRows | None, max_keys: int
    ) -> SampleRows:
        """What the sampler has to know of them; in trees, penalties see each row's own path."""
        history = self.state.history
        rows = SampleRows(layout.sample_slots, layout.sample_positions, history, max_keys)
        if tree_rows is None or not kind.penalties:
            return rows
        texts = path_histories(self.state, layout, *tree_rows, max_keys)
        return replace(rows, history=texts, history_by_row=True)

    def judge(
        self,
        spans: RoundSpans,
        layout: RoundLayout,
        sampled: torch.Tensor,
        tree_rows: TreeRows | None = None,
    ) -> tuple[RoundVerdict, Paths | None]:
        """Accept the drafts that equal what their rows sampled, int64 [M], cut at ends, commit.
        With the accepted paths where there are trees."""
        if self.replace_sampled is not None:
            sampled = self.replace_sampled(spans, layout, sampled)
        paths, first_sample = None, layout.first_sample
        if tree_rows is not None:
            paths, (spans, first_sample, sampled) = self.walk(spans, layout, tree_rows[1], sampled)
        return self.books.judge(spans, first_sample, sampled), paths

    def walk(
        self, spans: RoundSpans, layout: RoundLayout, trees: Trees, sampled: torch.Tensor
    ) -> tuple[Paths, tuple[RoundSpans, torch.Tensor, torch.Tensor]]:
        """Lay what is accepted of the trees out as chains that were all right: keys, texts, and
        (spans, first samples [B], samples [M]) for a judge of chains."""
        paths, tokens = self.books.walk(trees, sampled, layout.first_sample, spans.drafts)
        state, slots = self.state, spans.slots
        accepted = paths.rows, paths.lengths
        moved = AcceptedPaths(state.block_tables, slots, state.computed, *accepted)
        self.backend.move_paths(self.kv, moved)
        self.books.write_drafts(slots, tokens[:, :-1])
        first = self._first_of_paths[: len(tokens)]
        return paths, (replace(spans, drafts=paths.lengths), first, tokens.flatten())

    def _drafting(self, size: Size) -> bool:
        """Whether a drafter is to draft."""
        return not self.drafters.keys().isdisjoint(size.proposers)

    def _all_is_settled(self, size: Size) -> bool:
        """Whether drafters, which do no more than catch up, need not wait for what is sampled; and
        a device runs both at once."""
        settled = not size.verifies and not self._drafting(size) and self.keeping_up.only_networks
        return settled and size.catches_up and self.backend.runs_beside

    def settled(self, counts: torch.Tensor, rows: TargetRows) -> Commits:
        """So many rows of each span, int64 [B], are settled."""
        layout = rows.layout
        return Commits(rows.spans.slots, counts, layout.first_row, layout.batch, rows.features)

    def catch_up(
        self, settled: torch.Tensor, size: Size, rows: TargetRows, paths: Paths | None = None
    ) -> None:
        """Tell the proposers what was settled: so many rows of each span, int64 [B]."""
        if not self.keeping_up.tells(size.catches_up):
            return
        commits, layout = self.settled(settled, rows), rows.layout
        if rows.tree_rows is not None and paths is not None:
            commits = self.books.follow_paths(commits, layout, *rows.tree_rows, paths)
        drafting = self._drafting(size)
        self.keeping_up.settled(commits, size.catches_up, drafting, trees=paths is not None)

    def propose(self, index: int, slots: torch.Tensor, size: Size, max_keys: int) -> Drafts:
        """Proposer ``index``'s offers for ``slots`` [B], as far as its context reaches."""
        proposer, limit = self.proposers[index], self.context_limits[index]
        steps = size.steps if index in self.drafters else None
        most = min(max_keys + 1, self.state.history.shape[1])
        with blamed(proposer, "propose"):
            proposer.expect(DraftRequest(size.kind, most, steps or self.state.max_drafts))
            drafts = proposer.propose(slots)
            # Kernels read them by their addresses.
            self.controller.check(index, slots, drafts)
        if limit is None:
            return drafts
        return self.books.within(drafts, limit - self.state.length[slots])


def _most_drafts(proposer: Proposer, width: int) -> int:
    """Of all that ``proposer`` offers at once, of ``width`` that can be verified."""
    own = proposer.draft_tokens(proposer.options)
    return width if own is None else min(own, width)
