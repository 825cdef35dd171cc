"""Known defects, for the certificate to find: each breaks an engine in place, from outside, at one
of the ``seams``. The coarse ones; ``subtle_sampling`` and ``subtle_rounds`` are those that ordinary
texts hardly show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from surefoot.certify.defect import Defect
from surefoot.certify.seams import Chance, DecoderProxy, before_judging, drafts_of, sample_with
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.rounds import RoundLayout
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, adjust, apply_penalties, sample_rows

WRONG_ACCEPTANCE = 0.01
LEAK = 0.25
"""Share of the rejections whose KV entry is leaked."""
NOWHERE = 1 << 40


def accept_wrong_drafts(engine: Engine, speculative: bool) -> None:
    """A draft that is wrong is accepted with probability 1 %."""
    if not speculative:
        return
    chance = Chance(engine.state.device)

    def lenient(
        slots: torch.Tensor, drafts: torch.Tensor, layout: RoundLayout, sampled: torch.Tensor
    ) -> torch.Tensor:
        draft, is_draft = drafts_of(engine, slots, drafts, layout)
        lucky = chance(len(draft)) < WRONG_ACCEPTANCE
        return torch.where(is_draft & lucky, draft, sampled)

    before_judging(engine, lenient)


def shift_positions(engine: Engine, speculative: bool) -> None:
    """Drafts are verified one position further than they stand."""
    if not speculative:
        return
    last = engine.decoder.rope.cos.shape[0] - 1

    def shifted(batch: FlatBatch) -> FlatBatch:
        slots = batch.row_slot.clamp(min=0)
        is_draft = batch.positions >= engine.state.length[slots]
        positions = (batch.positions + is_draft.long()).clamp(max=last)
        return replace(batch, positions=positions)

    DecoderProxy(engine.decoder, before=shifted).install(engine)


def leak_rejected_kv(engine: Engine, speculative: bool) -> None:
    """The KV entry of a rejected draft comes back after the right one was written."""
    if not speculative:
        return
    leak = Leak(engine)
    before_judging(engine, leak.watch)
    DecoderProxy(engine.decoder, after=leak.restore).install(engine)


class Leak:
    """Rejected drafts that will come back: position and token by slot, int64 [slots]."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        state = engine.state
        self.position = torch.full((state.slots,), -1, dtype=torch.int64, device=state.device)
        self.token = torch.zeros_like(self.position)
        self.chance = Chance(state.device)

    def watch(
        self,
        slots: torch.Tensor,
        drafts: torch.Tensor,
        layout: RoundLayout,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Note the first rejected draft of some spans, and forget what these slots had before."""
        state = self.engine.state
        draft, is_draft = drafts_of(self.engine, slots, drafts, layout)
        at = torch.where(is_draft & (draft != sampled), layout.sample_positions, NOWHERE)
        first = torch.full_like(self.position, NOWHERE)
        first = first.scatter_reduce(0, layout.sample_slots, at, "amin")[slots]
        leaks = (first < NOWHERE) & (self.chance(len(slots)) < LEAK)
        self.position[slots] = torch.where(leaks, first, -1)
        self.token[slots] = state.history[slots, torch.where(leaks, first, 0)]
        return sampled

    def restore(self, batch: FlatBatch, kv: Sequence[Any]) -> None:
        """Where a current token was written over a rejected draft, write that draft again."""
        state = self.engine.state
        slots = batch.row_slot.clamp(min=0)
        current = batch.key_index == state.length[slots] - 1
        back = (batch.row_slot >= 0) & current & (batch.key_index == self.position[slots])
        again = replace(
            batch,
            tokens=torch.where(back, self.token[slots], batch.tokens),
            row_slot=torch.where(back, batch.row_slot, -1),
        )
        self.engine.decoder.forward(again, kv)
        done = torch.zeros_like(self.position).scatter_add(0, slots, back.long())
        self.position.masked_fill_(done > 0, -1)


def forget_penalties(engine: Engine, speculative: bool) -> None:
    """Penalties see the committed text only, not the drafts before a row."""
    if not speculative:
        return

    def forgetful(
        logits: torch.Tensor,
        rows: SampleRows,
        params: SlotParams,
        stages: SamplingStages,
        *rest: Any,
    ) -> torch.Tensor:
        if stages.penalties:
            committed = torch.minimum(rows.positions, engine.state.length[rows.slots])
            logits = apply_penalties(logits, replace(rows, positions=committed), params)
        return sample_rows(logits, rows, params, replace(stages, penalties=False), *rest)

    sample_with(engine, forgetful)


def reuse_noise(engine: Engine, speculative: bool) -> None:
    """Every other position gets the noise of the position before it, in plain decoding too."""

    def repeated(
        logits: torch.Tensor,
        rows: SampleRows,
        params: SlotParams,
        stages: SamplingStages,
        *rest: Any,
    ) -> torch.Tensor:
        logits = adjust(logits, rows, params, stages)
        shared = replace(rows, positions=rows.positions - rows.positions % 2)
        return sample_rows(logits, shared, params, stages.without_adjusting, *rest)

    sample_with(engine, repeated)


FIRST = (
    Defect("accepts a wrong draft with probability 1 %", accept_wrong_drafts, "greedy parity"),
    Defect("shifts the position of drafts by one", shift_positions, "greedy parity"),
    Defect("leaks the KV entry of a rejected draft", leak_rejected_kv, "greedy parity"),
    Defect("forgets penalties inside a span", forget_penalties, "sampling parameters"),
    Defect(
        "reuses one position's noise for the next", reuse_noise, "distribution", breaks_plain=True
    ),
)
