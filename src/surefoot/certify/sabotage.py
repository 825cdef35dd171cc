"""Known defects, for the certificate to find: each breaks an engine in place, from outside.

Nothing here is reachable from production code. All seams to the engine's insides are in this file:
``SpeculativeRound.sample``, ``judge`` and ``decoder``, and ``sample_rows`` as the round calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.certify.subject import Sabotage
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.rounds import RoundLayout
from surefoot.models.decoder import Decoder, ForwardResult
from surefoot.sampling.params import Features, SlotParams
from surefoot.sampling.sampler import SampleRows, adjust, apply_penalties, sample_rows
from surefoot.speculation import round as round_module
from surefoot.speculation.controller import Choice
from surefoot.speculation.layout import RoundPlan

WRONG_ACCEPTANCE = 0.01
LEAK = 0.25
"""Share of the rejections whose KV entry is leaked."""


@dataclass(frozen=True)
class Defect:
    """``section``: the section that must find it. ``breaks_plain``: plain decoding has it too, so
    that no comparison with plain decoding can see it."""

    name: str
    install: Sabotage
    section: str
    breaks_plain: bool = False


def accept_wrong_drafts(engine: Engine, speculative: bool) -> None:
    """A draft that is wrong is accepted with probability 1 %."""
    if not speculative:
        return
    judge = engine.round.judge
    generator = torch.Generator().manual_seed(0)

    def lenient(
        plan: RoundPlan, layout: RoundLayout, choice: Choice | None, sampled: torch.Tensor
    ) -> Any:
        if choice is not None:
            draft, is_draft = drafts_of(engine, plan, layout)
            lucky = torch.rand(len(draft), generator=generator) < WRONG_ACCEPTANCE
            sampled = torch.where(is_draft & lucky.to(draft.device), draft, sampled)
        return judge(plan, layout, choice, sampled)

    _override(engine.round, "judge", lenient)


def drafts_of(
    engine: Engine, plan: RoundPlan, layout: RoundLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per sampled row [M]: the token that stands where it samples, and whether that is a draft."""
    history = engine.state.history
    tokens = history[layout.sample_slots, layout.sample_positions]
    ends = engine.state.length[layout.sample_slots]
    by_slot = torch.zeros(engine.state.slots, dtype=torch.int64, device=history.device)
    by_slot[plan.slots] = plan.drafts
    behind = layout.sample_positions - ends
    return tokens, (behind >= 0) & (behind < by_slot[layout.sample_slots])


class DecoderProxy:
    """Stands in for the round's decoder; ``before`` may change a batch, ``after`` runs behind."""

    def __init__(
        self,
        decoder: Decoder,
        before: Callable[[FlatBatch], FlatBatch] | None = None,
        after: Callable[[FlatBatch, Sequence[Any]], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(
        self, batch: FlatBatch, kv: Sequence[Any], capture: Sequence[int] = ()
    ) -> ForwardResult:
        if self._before is not None:
            batch = self._before(batch)
        result = self._decoder.forward(batch, kv, capture)
        if self._after is not None:
            self._after(batch, kv)
        return result


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

    engine.round.decoder = DecoderProxy(engine.decoder, before=shifted)  # type: ignore[assignment]


def leak_rejected_kv(engine: Engine, speculative: bool) -> None:
    """The KV entry of a rejected draft comes back after the right one was written."""
    if not speculative:
        return
    judge = engine.round.judge
    leaks: dict[int, tuple[int, int]] = {}
    """Position and rejected token by slot."""
    generator = torch.Generator().manual_seed(0)

    def watching(
        plan: RoundPlan, layout: RoundLayout, choice: Choice | None, sampled: torch.Tensor
    ) -> Any:
        tokens, accepted, counts, ends = judge(plan, layout, choice, sampled)
        for slot, right, drafted in zip(
            plan.slots.tolist(), accepted.tolist(), plan.drafts.tolist(), strict=True
        ):
            leaks.pop(slot, None)
            if right < drafted and float(torch.rand(1, generator=generator)) < LEAK:
                position = int(engine.state.length[slot]) + right
                leaks[slot] = position, int(engine.state.history[slot, position])
        return tokens, accepted, counts, ends

    def restore(batch: FlatBatch, kv: Sequence[Any]) -> None:
        written = set(zip(batch.row_slot.tolist(), batch.key_index.tolist(), strict=True))
        for slot, (position, token) in list(leaks.items()):
            if (slot, position) in written:
                del leaks[slot]
                _write_one(engine.decoder, batch, kv, slot, position, token)

    _override(engine.round, "judge", watching)
    engine.round.decoder = DecoderProxy(engine.decoder, after=restore)  # type: ignore[assignment]


def _write_one(
    decoder: Decoder, batch: FlatBatch, kv: Sequence[Any], slot: int, position: int, token: int
) -> None:
    device = batch.tokens.device
    where = torch.tensor([position], device=device)
    start = batch.span_start.clone()
    start[slot] = position
    row = FlatBatch(
        tokens=torch.tensor([token], device=device),
        positions=where,
        key_index=where,
        row_slot=torch.tensor([slot], device=device),
        block_tables=batch.block_tables,
        span_start=start,
        max_keys=position + 1,
    )
    decoder.forward(row, kv)


def forget_penalties(engine: Engine, speculative: bool) -> None:
    """Penalties see the committed text only, not the drafts before a row."""
    if not speculative:
        return

    def forgetful(
        logits: torch.Tensor, rows: SampleRows, params: SlotParams, features: Features, *rest: Any
    ) -> torch.Tensor:
        if features.penalties:
            committed = torch.minimum(rows.positions, engine.state.length[rows.slots])
            logits = apply_penalties(logits, replace(rows, positions=committed), params)
        return sample_rows(logits, rows, params, replace(features, penalties=False), *rest)

    sample_with(engine, forgetful)


def reuse_noise(engine: Engine, speculative: bool) -> None:
    """Every other position gets the noise of the position before it, in plain decoding too."""

    def repeated(
        logits: torch.Tensor, rows: SampleRows, params: SlotParams, features: Features, *rest: Any
    ) -> torch.Tensor:
        logits = adjust(logits, rows, params, features)
        done = replace(features, penalties=False, bias=False, min_tokens=False)
        shared = replace(rows, positions=rows.positions - rows.positions % 2)
        return sample_rows(logits, shared, params, done, *rest)

    sample_with(engine, repeated)


def sample_with(engine: Engine, stand_in: Callable[..., torch.Tensor]) -> None:
    """Replace the sampler while this engine samples, and only then."""
    sample = engine.round.sample

    def broken(*args: Any) -> Any:
        with _replaced(round_module, "sample_rows", stand_in):
            return sample(*args)

    _override(engine.round, "sample", broken)


@contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _override(place: Any, name: str, value: Any) -> None:
    if not callable(getattr(place, name)):
        raise AttributeError(name)
    setattr(place, name, value)


DEFECTS = (
    Defect("accepts a wrong draft with probability 1 %", accept_wrong_drafts, "greedy parity"),
    Defect("shifts the position of drafts by one", shift_positions, "greedy parity"),
    Defect("leaks the KV entry of a rejected draft", leak_rejected_kv, "greedy parity"),
    Defect("forgets penalties inside a span", forget_penalties, "sampling parameters"),
    Defect(
        "reuses one position's noise for the next", reuse_noise, "distribution", breaks_plain=True
    ),
)
