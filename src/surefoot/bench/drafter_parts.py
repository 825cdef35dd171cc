"""Where a recorded round's time goes when a drafter drafts: verify, catch-up, each draft.

Each part is the difference of two recorded rounds of one batch: with it and without. Beside the
catch-up that an engine does (keys and values only) stands a full one: the drafter's whole layer and
head on every row that was verified.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from surefoot.engine.cuda_graphs import CudaRoundGraphs
from surefoot.engine.engine import Engine
from surefoot.engine.rehearsal import rehearsal
from surefoot.sampling.params import Features
from surefoot.speculation.proposer import Commits, Proposer

TURNS = 9


@dataclass(frozen=True)
class Parts:
    """Milliseconds. ``full_catch_up`` would stand in place of ``catch_up``; ``drafts``: the first
    draft's, the second's, and so on."""

    concurrency: int
    rows: int
    verify: float
    catch_up: float
    full_catch_up: float
    drafts: list[float]

    @property
    def round(self) -> float:
        return self.verify + self.catch_up + sum(self.drafts)


class FullCatchUp:
    """A drafter's catch-up that leaves nothing out."""

    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer

    def catch_up(self, commits: Commits) -> None:
        proposer, drafter = self.proposer, self.proposer.drafter
        before, positions = drafter.backend.shift_features(
            drafter.fuse(commits.features), proposer.before, proposer.last_of_block,
            commits.slots, commits.rows, commits.counts, commits.batch,
            proposer.state.block_size, drafter.last_position,
        )  # fmt: skip
        batch = replace(commits.batch, positions=positions, first_key=1)
        _, logits = drafter.draft(batch.tokens, before, batch, proposer.kv)
        tokens, chances = torch.empty_like(batch.tokens), logits.new_empty(len(logits))
        drafter.backend.likeliest(logits, drafter.target_ids, tokens, chances)


def measure_parts(engine: Engine, concurrency: int) -> Parts:
    """Parts of a greedy round of so many requests that verifies and drafts as far as it can, on an
    idle engine whose one proposer is a drafter of chains. ValueError for any other."""
    if engine.pipeline is None or not isinstance(engine.pipeline.graphs, CudaRoundGraphs):
        raise ValueError("parts are those of recorded rounds on a GPU")
    graphs, round_ = engine.pipeline.graphs, engine.round
    if len(engine.proposers) != 1 or not graphs.longest:
        raise ValueError("parts are those of one drafter")
    base = graphs.plain(concurrency, Features(), (0,))
    base = replace(base, rows=base.spans * (1 + graphs.longest))

    sizes = [replace(base, steps=steps) for steps in range(graphs.longest + 1)]
    recorded = [graphs.capture(size) for size in sizes]
    stateful = round_.stateful
    try:
        for proposers in (
            [],
            [(cast(Proposer, FullCatchUp(proposer)), own) for proposer, own in stateful],
        ):
            round_.stateful = proposers
            recorded.append(graphs.capture(sizes[0]))
    finally:
        round_.stateful = stateful
    # In turn: the device's clock follows its load.
    with rehearsal(engine.pipeline.replay, engine.kv_blocks, context=1024) as seat:
        turns = [
            [graphs.time(graph, lambda: seat(concurrency)) for graph in recorded]
            for _ in range(TURNS)
        ]
    *by_steps, verify, full = (
        1000 * statistics.median(times) for times in zip(*turns, strict=True)
    )
    drafts = [after - before for before, after in itertools.pairwise(by_steps)]
    return Parts(concurrency, base.rows, verify, by_steps[0] - verify, full - verify, drafts)
