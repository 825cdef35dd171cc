"""The round: verify, sample, accept, commit, catch up, draft, for the whole batch at once.

Everything here is a fixed sequence of tensor operations; nothing reads a tensor on the host, so
that a GPU can capture it. The host plans (which requests, how many rows) and reads the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.draws import TokenMasks
from surefoot.kernels.rounds import RoundLayout, RoundSpans, RoundVerdict
from surefoot.models.decoder import Decoder, ForwardResult
from surefoot.sampling.logprobs import RowLogprobs, row_logprobs
from surefoot.sampling.params import Features
from surefoot.sampling.sampler import SampleRows, sample_rows
from surefoot.speculation.compiled_control import CompiledControl
from surefoot.speculation.controller import Choice, Controller
from surefoot.speculation.layout import RoundPlan, lay_out
from surefoot.speculation.proposer import Commits, Drafts, Outlook, Proposer, ServedRows
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import (
    NodeRows,
    Paths,
    Trees,
    committed_logprobs,
    key_moves,
    lay_out_trees,
    node_rows,
    path_histories,
    plant,
    settle,
    walk,
)

PROMPT_LOGPROB_ROWS = 64


@dataclass(frozen=True)
class Wanted:
    """What the round's requests want of it beyond tokens; host-side."""

    features: Features = Features()
    logprobs: int | None = None
    """Largest ``logprobs`` of the round, None if nobody wants any."""
    proposers: tuple[int, ...] = ()
    """Indices of the proposers that some request with a sampled row allows."""
    catching_up: Mapping[int, ServedRows | None] = field(default_factory=dict)
    """By index of the proposers that some request of the round allows: whose rows; None: all."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Longest draft asked for, by proposer; 0 for one that sleeps. Absent: its longest."""
    prompt_rows: torch.Tensor | None = None
    """int64 [R]: prefill rows of the flat batch whose next token's logprob is wanted."""
    prompt_logprobs: int = 0
    masks: TokenMasks | None = None
    """By sampled row, where some request of the round has a grammar."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round, by span."""

    counts: torch.Tensor
    """int64 [B]: tokens committed; 0 for spans that sample nothing."""
    accepted: torch.Tensor
    """int64 [B]: drafts accepted, before the cut at an end."""
    ends: torch.Tensor
    """int64 [B]: 0 runs on, 1 ended by a stop id, 2 by the token limit."""
    tokens: torch.Tensor
    """int64 [B, K + 1], valid up to ``counts``."""
    offered: torch.Tensor
    """int64 [B]: drafts offered for the next round, by all proposers together."""
    logprobs: RowLogprobs | None
    """By sampled row; a span's committed tokens are its first rows."""
    first_sample: torch.Tensor
    prompt_logprobs: list[RowLogprobs]


class SpeculativeRound:
    """Binds a target, its KV, the slots and the proposers; call it once a round."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[Any],
        state: SlotState,
        proposers: Sequence[Proposer],
        controller: Controller,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.state = state
        self.proposers = list(proposers)
        self.controller = controller
        self.padded_forward: Callable[[FlatBatch], ForwardResult] | None = None
        """Stands in for ``decoder.forward`` where batches are padded to few sizes."""
        self.compiled: CompiledControl | None = None
        """Keeps the controller's books where they are a recorded round's, too."""
        # What every round would otherwise ask again: who keeps state, and which layers it reads.
        self.needs = [proposer.needs() for proposer in proposers]
        self.capture = sorted({layer for need in self.needs for layer in need.captured_layers})
        self.stateful = [
            index
            for index, proposer in enumerate(proposers)
            if type(proposer).catch_up is not Proposer.catch_up
        ]
        longest = state.history.shape[1] - state.max_drafts - 1
        self.context_limits = [
            limit if limit is not None and limit < longest else None
            for limit in (need.context_limit for need in self.needs)
        ]
        """By proposer, where it is below what texts can reach."""

    def __call__(self, plan: RoundPlan, choice: Choice | None, wanted: Wanted) -> Verdict:
        """``choice`` holds the drafts of the spans from ``plan.first_decoding`` on."""
        state = self.state
        self.controller.draft_seconds.clear()
        if choice is not None:
            write_drafts(state, plan.slots[plan.first_decoding :], choice.tokens)
        layout = lay_out(state, plan, self.decoder.backend.lay_out_spans)
        grown = paths = None
        if choice is not None and choice.parents is not None:
            trees = plant(plan, choice.tokens, choice.parents)
            grown = node_rows(layout, trees, plan.first_decoding), trees
            layout = lay_out_trees(layout, grown[0])
        forward = self.forward(layout.batch)
        sampled, logprobs = self.sample(plan, layout, forward.hidden, wanted, grown)
        verdict, paths = self.judge(plan, layout, sampled, grown)
        commits = Commits(
            plan.slots, verdict.first, verdict.settled, layout.first_row, layout.batch,
            forward.features,
        )  # fmt: skip
        if grown is not None and paths is not None:
            commits = settle(commits, layout, *grown, paths)
            if logprobs is not None:
                logprobs = committed_logprobs(logprobs, layout, paths)
        self.catch_up(commits, wanted.catching_up)
        return Verdict(
            counts=verdict.counts,
            accepted=verdict.accepted,
            ends=verdict.ends,
            tokens=verdict.tokens,
            offered=self.draft(plan, wanted),
            logprobs=logprobs,
            first_sample=layout.first_sample,
            prompt_logprobs=self.score_prompt(layout, forward.hidden, wanted),
        )

    def forward(self, batch: FlatBatch) -> ForwardResult:
        """The target's, with the layers that proposers read."""
        if self.padded_forward is not None:
            return self.padded_forward(batch)
        return self.decoder.forward(batch, self.kv, self.capture)

    def sample(
        self,
        plan: RoundPlan,
        layout: RoundLayout,
        hidden: torch.Tensor,
        wanted: Wanted,
        grown: tuple[NodeRows, Trees] | None = None,
    ) -> tuple[torch.Tensor, RowLogprobs | None]:
        """The token of every row that samples, int64 [M], and its logprobs if wanted."""
        if plan.sampled_rows == 0:
            return torch.zeros(1, dtype=torch.int64, device=self.state.device), None
        if not plan.every_row_samples:
            hidden = hidden[layout.sample_index]
        return self.draw(
            layout, hidden, wanted.features, wanted.logprobs, plan.max_keys, grown, wanted.masks
        )

    def draw(
        self,
        layout: RoundLayout,
        hidden: torch.Tensor,
        features: Features,
        logprobs: int | None,
        max_keys: int,
        grown: tuple[NodeRows, Trees] | None,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, RowLogprobs | None]:
        """``sample`` for the rows of ``hidden`` [M, hidden], all of which sample."""
        decoder = self.decoder
        if features == Features() and masks is None and logprobs is None:
            return decoder.greedy(hidden), None
        logits = decoder.logits(hidden)
        rows = self.rows_to_sample(layout, features, grown, max_keys)
        sampled = sample_rows(logits, rows, self.state.params, features, decoder.backend, masks)
        return sampled, None if logprobs is None else row_logprobs(logits, sampled, logprobs)

    def rows_to_sample(
        self,
        layout: RoundLayout,
        features: Features,
        grown: tuple[NodeRows, Trees] | None,
        max_keys: int,
    ) -> SampleRows:
        """What the sampler has to know of them; in trees, penalties see each row's own path."""
        history = self.state.history
        rows = SampleRows(layout.sample_slots, layout.sample_positions, history, max_keys)
        if grown is None or not features.penalties:
            return rows
        texts = path_histories(self.state, layout, *grown, max_keys)
        return replace(rows, history=texts, history_by_row=True)

    def judge(
        self,
        plan: RoundPlan,
        layout: RoundLayout,
        sampled: torch.Tensor,
        grown: tuple[NodeRows, Trees] | None = None,
    ) -> tuple[RoundVerdict, Paths | None]:
        """Accept the drafts that equal what their rows sampled, int64 [M], cut at ends, commit.
        With the accepted paths where trees have ``grown``."""
        state, slots = self.state, plan.slots
        samples = torch.arange(len(slots), device=state.device) >= plan.first_sampling
        spans = RoundSpans(slots, plan.known, plan.drafts, samples.long())
        paths, first_sample = None, layout.first_sample
        if grown is not None:
            paths, (spans, first_sample, sampled) = self.walk(spans, layout, grown[1], sampled)
        stop_ids = state.params.stop_ids
        if state.native is None:
            verdict = self.decoder.backend.judge_and_advance(
                spans, first_sample, sampled, state.history, state.length, state.computed,
                state.limit, stop_ids, state.max_drafts,
            )  # fmt: skip
            return verdict, paths
        tokens, accepted, counts, ends = state.native.judge(
            slots, spans.drafts, plan.first_sampling, sampled, first_sample, stop_ids
        )
        first, settled = state.native.advance(slots, plan.known, tokens, counts)
        return RoundVerdict(tokens, accepted, counts, ends, first, settled), paths

    def walk(
        self, spans: RoundSpans, layout: RoundLayout, trees: Trees, sampled: torch.Tensor
    ) -> tuple[Paths, tuple[RoundSpans, torch.Tensor, torch.Tensor]]:
        """Lay what is accepted of the trees out as chains that were all right: keys, texts, and
        (spans, first samples [B], samples [M]) for a judge of chains."""
        paths, tokens = walk(trees, sampled, layout.first_sample, spans.drafts)
        self.gather_paths(spans.slots, paths)
        write_drafts(self.state, spans.slots, tokens[:, :-1])
        first = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1]
        return paths, (replace(spans, drafts=paths.lengths), first, tokens.flatten())

    def gather_paths(self, slots: torch.Tensor, paths: Paths) -> None:
        """Bring the target's keys of the accepted paths of ``slots`` int64 [B] together, before
        ``computed`` advances."""
        source, target = key_moves(paths, self.state.computed[slots])
        tables = self.state.block_tables[slots]
        for layer in self.kv:
            self.decoder.backend.move_keys(layer, tables, source, target)

    def catch_up(
        self, commits: Commits, allowed: Mapping[int, ServedRows | None], masked: bool = False
    ) -> None:
        """Tell the proposers what was settled; ``commits`` has the features of all captured
        layers. ``allowed``: by index of the proposers that some request of the round allows, the
        rows that a network gets; None: all. Other networks have nothing to do. ``masked``: networks
        get a mask of the slots, because the host does not know whose rows they are."""
        for index in self.stateful:
            need = self.needs[index]
            own = select_layers(commits.features, self.capture, need.captured_layers)
            news = replace(commits, features=own)
            if need.has_network:
                if index not in allowed:
                    continue
                if (rows := allowed[index]) is not None:
                    news = news.of(rows)
                if masked:
                    news = replace(news, served=self.controller.allowed[index])
            self.proposers[index].catch_up(news)

    def propose(self, index: int, slots: torch.Tensor, outlook: Outlook) -> Drafts:
        """Proposer ``index``'s drafts for ``slots`` [B], as far as its context reaches."""
        proposer, limit = self.proposers[index], self.context_limits[index]
        proposer.expect(outlook)
        drafts = proposer.propose(slots)
        return drafts if limit is None else drafts.within(limit - self.state.length[slots])

    def draft(self, plan: RoundPlan, wanted: Wanted) -> torch.Tensor:
        """Judge earlier offers by the new tokens, and take the offers for the next round. Returns
        how many drafts are on offer, int64 [B]."""
        offered = torch.zeros_like(plan.slots)
        slots = plan.slots[plan.first_sampling :]
        if not len(slots) or not wanted.proposers:
            return offered
        if self.compiled is None:
            self.controller.learn(slots)
        offers: dict[int, Drafts] = {}
        for index in wanted.proposers:
            steps = wanted.steps.get(index, self.state.max_drafts)
            if steps == 0:
                self.controller.withdraw(index, slots)
                continue
            started = time.perf_counter()
            outlook = Outlook(wanted.features, plan.max_keys + 1, steps)
            offers[index] = drafts = self.propose(index, slots, outlook)
            if self.compiled is None:
                offered[plan.first_sampling :] += self.controller.offer(index, slots, drafts)
            self.controller.draft_seconds[index] = time.perf_counter() - started
        if self.compiled is not None:
            offered[plan.first_sampling :] += self.compiled.take_in(slots, offers)
        return offered

    def score_prompt(
        self, layout: RoundLayout, hidden: torch.Tensor, wanted: Wanted
    ) -> list[RowLogprobs]:
        """Logprobs of prompt tokens, each under the row before it, a few rows at a time."""
        if wanted.prompt_rows is None:
            return []
        batch, scores = layout.batch, []
        for rows in wanted.prompt_rows.split(PROMPT_LOGPROB_ROWS):
            following = self.state.history[batch.row_slot[rows], batch.positions[rows] + 1]
            logits = self.decoder.logits(hidden[rows])
            scores.append(row_logprobs(logits, following, wanted.prompt_logprobs))
        return scores


def select_layers(
    features: torch.Tensor, captured: Sequence[int], wanted: Sequence[int]
) -> torch.Tensor:
    """The ``wanted`` layers of ``features`` [N, captured * hidden] side by side; without a copy
    where they are neighbours."""
    if not wanted:
        return features[:, :0]
    hidden = features.shape[1] // len(captured)
    places = [captured.index(layer) for layer in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return features[:, places[0] * hidden : (places[-1] + 1) * hidden]
    return torch.cat([features[:, at * hidden : (at + 1) * hidden] for at in places], dim=1)


def write_drafts(state: SlotState, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put drafts [B, K] behind the committed tokens of ``slots`` [B]."""
    if state.native is not None:
        state.native.write_drafts(slots, tokens)
        return
    columns = state.length[slots].unsqueeze(1)
    columns = columns + torch.arange(tokens.shape[1], device=state.device)
    state.history[slots.unsqueeze(1), columns] = tokens
