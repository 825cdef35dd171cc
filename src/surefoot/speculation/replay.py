"""A decoding round that needs no host: what a GPU captures once and replays.

``SpeculativeRound`` is told by the host who drafts how much. Here the host says only how many
spans and rows the round has room for; who is in it stands in static tensors, and the device splits
the rows over the offers, accepts, commits, stops at ends and takes the next offers. So one recorded
sequence of operations serves every round of its size, and the host may launch the next round before
it has read this one: a request that ended is dead on the device at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.kernels.rounds import RoundLayout, RoundSpans, RoundVerdict
from surefoot.sampling.logprobs import WIDTHS, RowLogprobs, pack
from surefoot.sampling.params import Features
from surefoot.speculation.compiled_control import LEAST, CompiledControl
from surefoot.speculation.controller import Choice, fill_rows
from surefoot.speculation.proposer import Commits, Drafts, Outlook
from surefoot.speculation.round import SpeculativeRound, write_drafts
from surefoot.speculation.trees import (
    NodeRows,
    Paths,
    Trees,
    ancestors,
    chain_parents,
    committed_logprobs,
    lay_out_trees,
    node_rows,
    settle,
)

GREEDY = Features()
ANY_TOP_K = 1 << 30
DRAWN = Features(noise=True, min_p=True, top_k=ANY_TOP_K, top_p=True)
ADJUSTED = Features(
    noise=True, penalties=True, bias=True, min_tokens=True, min_p=True, top_k=ANY_TOP_K, top_p=True
)
"""The three kinds of sampling that rounds are recorded for; filters that a row does not have are
told apart on the device."""

Override = Callable[[RoundSpans, RoundLayout, torch.Tensor], torch.Tensor]


def kind_of(features: Features) -> Features:
    """The recorded kind that serves these stages."""
    if features.penalties or features.bias or features.min_tokens:
        return ADJUSTED
    return DRAWN if features.noise else GREEDY


@dataclass(frozen=True)
class Size:
    """What tells recorded rounds apart; ``rows`` is at least ``spans``."""

    spans: int
    rows: int
    kind: Features
    proposers: tuple[int, ...]
    steps: int | None = None
    """How many tokens drafters draft for the next round; 0: they only catch up. None: all they can.
    Proposers without a network take no notice."""
    logprobs: int | None = None
    """How many likely tokens are reported beside each, one of ``WIDTHS``; None: no logprobs."""

    @property
    def verifies(self) -> bool:
        """Whether drafts get rows, even where some spans are empty."""
        return self.rows > self.spans


class ReplayRound:
    """Binds a round's parts to static tensors. ``spans``: the most requests of a round.

    The state's last slot is never a request's: unused entries of ``slots`` stand on it.
    """

    def __init__(self, round_: SpeculativeRound, spans: int) -> None:
        self.round = round_
        self.state = state = round_.state
        self.controller = round_.controller
        self.idle_slot = state.slots - 1
        width, device = state.max_drafts, state.device
        self.max_keys = state.history.shape[1]
        self.slots = torch.full((spans,), self.idle_slot, dtype=torch.int64, device=device)
        """int64 [spans]: the requests of the next round."""
        self.alive = torch.zeros(state.slots, dtype=torch.int64, device=device)
        """int64 [slots]: 1 until the request ends."""
        self.tokens = torch.zeros((state.slots, width), dtype=torch.int64, device=device)
        self.chances = torch.zeros((state.slots, width), device=device)
        self.lengths = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self.proposer = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self.parents: torch.Tensor | None = None
        """int64 [slots, max_drafts]: of ``tokens``, where some proposer offers trees."""
        if self.controller.parents is not None:
            self.parents = chain_parents(state.slots, width, device).clone()
        self.report = torch.zeros((spans, self.columns), dtype=torch.int32, device=device)
        columns = 2 + 2 * min(WIDTHS[-1], state.vocab_size)
        self.scores = torch.zeros((spans, width + 1, columns), dtype=torch.int32, device=device)
        """Logprobs of the committed tokens, as ``pack`` has them, where a size asks for them."""
        state.length[self.idle_slot] = 1
        self.drafters = {
            index: width if need.trees else need.longest_draft
            for index, need in enumerate(round_.needs)
            if need.has_network
        }
        """Most drafts of the proposers whose drafting costs a network's time, by index."""
        nothing = torch.zeros((spans, 1), dtype=torch.int64, device=device)
        self.nothing = Drafts(nothing, nothing[:, 0].clone(), nothing.float(), nothing - 1)
        control = round_.decoder.backend.control
        trees = self.parents is not None
        # The kernels for the book-keeping know chains only.
        self.compiled = None if control is None or trees else CompiledControl(self, control)
        round_.compiled = self.compiled
        self.override: Override | None = None
        """For measurements: replaces the sampled tokens."""

    @property
    def columns(self) -> int:
        """Of a report: counts, accepted, ends, drafted, whose drafts, how many offered next, then
        the tokens [max_drafts + 1], then the next offers' chances (float32 bits) [max_drafts]."""
        return 6 + 2 * self.state.max_drafts + 1

    def enter(self, slots: list[int]) -> None:
        """Take over requests from rounds that the host planned: choose among their offers."""
        self.alive.zero_()
        if slots:
            index = torch.tensor(slots, device=self.state.device)
            self.alive[index] = 1
            if self.controller.names and self.state.max_drafts:
                self._keep(index, self.controller.choose(index))

    def seat(self, slots: list[int]) -> None:
        """Who is in the next round; the rest of the entries are unused."""
        row = torch.full_like(self.slots, self.idle_slot, device="cpu")
        row[: len(slots)] = torch.tensor(slots, dtype=torch.int64)
        self.slots.copy_(row, non_blocking=True)

    def __call__(self, size: Size) -> None:
        """Run the round: updates the slots and leaves ``report``."""
        state, round_ = self.state, self.round
        slots = self.slots[: size.spans]
        split = self._split_torch if self.compiled is None else self.compiled.split
        known, drafts = split(slots, size)
        spans = RoundSpans(slots, known, drafts, known)
        backend = round_.decoder.backend
        # Nobody drafts in a round without rows to spare; kernels of single rows are quicker.
        longest = 1 + (state.max_drafts if size.verifies else 0)
        layout = backend.lay_out_spans(
            spans, state.history, state.computed, state.block_tables,
            size.rows, size.rows, self.max_keys, longest,
        )  # fmt: skip
        grown = self._grow(slots, size, layout)
        if grown is not None:
            layout = lay_out_trees(layout, grown[0])
        forward = round_.decoder.forward(layout.batch, round_.kv, round_.capture)
        sampled, logprobs = round_.draw(
            layout, forward.hidden, size.kind, size.logprobs, self.max_keys, grown
        )
        if self.override is not None:
            sampled = self.override(spans, layout, sampled)
        paths, chains = None, (spans, layout.first_sample, sampled)
        if grown is not None:
            paths, chains = round_.walk(spans, layout, grown[1], sampled)
        if logprobs is not None:
            self._report_logprobs(logprobs, layout, paths)
        verdict = backend.judge_and_advance(
            *chains, state.history, state.length, state.computed,
            state.limit, state.params.stop_ids, state.max_drafts,
        )  # fmt: skip
        if round_.stateful:
            commits = Commits(
                slots, verdict.first, verdict.settled, layout.first_row, layout.batch,
                forward.features,
            )  # fmt: skip
            if grown is not None and paths is not None:
                commits = settle(commits, layout, *grown, paths)
            round_.catch_up(commits, dict.fromkeys(size.proposers), masked=True)
        if self.compiled is None:
            self._finish_torch(slots, size, known, drafts, verdict)
        else:
            self.compiled.finish(slots, size, drafts, verdict)

    def _grow(
        self, slots: torch.Tensor, size: Size, layout: RoundLayout
    ) -> tuple[NodeRows, Trees] | None:
        """The trees among the drafts of a round's ``slots`` [B], and where its rows stand in them;
        None where there are only chains."""
        planting = any(self.controller.trees[index] for index in size.proposers)
        if self.parents is None or not planting or not size.verifies:
            return None
        parents = self.parents[slots]
        trees = Trees(self.tokens[slots], parents, *ancestors(parents))
        return node_rows(layout, trees), trees

    def _report_logprobs(
        self, logprobs: RowLogprobs, layout: RoundLayout, paths: Paths | None
    ) -> None:
        if paths is not None:
            logprobs = committed_logprobs(logprobs, layout, paths)
        first, most = layout.first_sample, len(logprobs.chosen) - 1
        rows = first.unsqueeze(1) + torch.arange(self.scores.shape[1], device=first.device)
        packed = pack(logprobs)[rows.clamp(max=most)]
        self.scores[: len(first), :, : packed.shape[2]] = packed

    def _split_torch(self, slots: torch.Tensor, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """(Rows of known tokens, drafts to verify) of each span, int64 [B] each, within the rows
        that the host gave."""
        state = self.state
        known = self.alive[slots]
        if not size.verifies or not size.proposers:
            return known, torch.zeros_like(known)
        drafts = fill_rows(self.chances[slots] * known.unsqueeze(1), size.rows - known.sum())
        # Behind the committed tokens, as far as the offer goes; columns beyond the drafts that are
        # verified are never read.
        write_drafts(state, slots, self.tokens[slots])
        return known, drafts

    def _finish_torch(
        self,
        slots: torch.Tensor,
        size: Size,
        known: torch.Tensor,
        drafts: torch.Tensor,
        verdict: RoundVerdict,
    ) -> None:
        """Judge earlier offers by the new tokens, take the offers for the next round, report."""
        self.alive[slots] = known * (verdict.ends == 0)
        whose = self.proposer[slots]
        if size.proposers:
            self.controller.learn(slots)
            for index in size.proposers:
                offers = self.propose(index, slots, size)
                self.controller.offer(index, slots, offers)
            self._keep(slots, self.controller.choose(slots))
        else:
            # Offers of earlier rounds do not follow these tokens. Assigning to an index would copy
            # the number from the host, which cannot be recorded.
            self.controller.lengths.index_fill_(1, slots, 0)
            self.lengths.index_fill_(0, slots, 0)
            self.chances.index_fill_(0, slots, 0.0)
        offered = self.lengths[slots]
        columns = [verdict.counts, verdict.accepted, verdict.ends, drafts, whose, offered]
        packed = torch.cat((torch.stack(columns, dim=1), verdict.tokens), dim=1)
        self.report[: size.spans, : packed.shape[1]] = packed.int()
        if self.state.max_drafts:
            self.report[: size.spans, packed.shape[1] :] = self.chances[slots].view(torch.int32)

    def propose(self, index: int, slots: torch.Tensor, size: Size) -> Drafts:
        """Proposer ``index``'s offers for ``slots`` [B]."""
        if size.steps == 0 and index in self.drafters:
            rows, none = slice(0, len(slots)), self.nothing
            parents = none.parents if self.controller.trees[index] else None
            return Drafts(
                none.tokens[rows],
                none.lengths[rows],
                none.confidence[rows],
                None if parents is None else parents[rows],
            )
        steps = size.steps if index in self.drafters else None
        outlook = Outlook(size.kind, self.max_keys, steps or self.state.max_drafts)
        return self.round.propose(index, slots, outlook)

    def _keep(self, slots: torch.Tensor, choice: Choice) -> None:
        self.tokens[slots] = choice.tokens
        if self.parents is not None and choice.parents is not None:
            self.parents[slots] = choice.parents
        steps = torch.arange(self.state.max_drafts, device=slots.device)
        offered = steps < choice.lengths.unsqueeze(1)
        # What is offered has some chance: rows that nobody else wants are for it.
        self.chances[slots] = torch.where(offered, choice.chances.clamp(min=LEAST), 0.0)
        self.lengths[slots] = choice.lengths
        self.proposer[slots] = choice.proposer
