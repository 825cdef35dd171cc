"""Known defects, for the certificate to find: each breaks an engine in place, from outside.

Nothing here is reachable from production code. All seams to the engine's insides are in this file:
``Round.replace_sampled``, ``Round.decoder``, and ``Round.sample`` with ``sample_rows`` as it calls
it. What runs inside a round reads nothing on the host and draws its chances from a counter on the
device, so that it can be recorded, and is recorded: rounds recorded before are forgotten.
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
from surefoot.sampling.noise import philox
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, adjust, apply_penalties, sample_rows
from surefoot.speculation import round as round_module

WRONG_ACCEPTANCE = 0.01
LEAK = 0.25
"""Share of the rejections whose KV entry is leaked."""
NOWHERE = 1 << 40
BeforeJudging = Callable[[torch.Tensor, torch.Tensor, RoundLayout, torch.Tensor], torch.Tensor]
"""(slots [B], drafts [B], layout, sampled [M]) -> sampled [M], as the judge will see it."""


@dataclass(frozen=True)
class Defect:
    """``section``: the section that must find it. ``breaks_plain``: plain decoding has it too, so
    that no comparison with plain decoding can see it."""

    name: str
    install: Sabotage
    section: str
    breaks_plain: bool = False


class Chance:
    """Uniform numbers in 0..1, new ones in each replay of a recorded round."""

    def __init__(self, device: torch.device) -> None:
        self.calls = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, size: int) -> torch.Tensor:
        """float32 [size]."""
        self.calls.add_(1)
        index = torch.arange(size, device=self.calls.device)
        zero = torch.zeros_like(index)
        words = philox((index, self.calls.expand(size), zero, zero), (zero, zero))
        return words[0].float() * 2.0**-32


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


def drafts_of(
    engine: Engine, slots: torch.Tensor, drafts: torch.Tensor, layout: RoundLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per sampled row [M]: the token that stands where it samples, and whether that is a draft."""
    history = engine.state.history
    tokens = history[layout.sample_slots, layout.sample_positions]
    ends = engine.state.length[layout.sample_slots]
    by_slot = torch.zeros(engine.state.slots, dtype=torch.int64, device=history.device)
    by_slot[slots] = drafts
    behind = layout.sample_positions - ends
    return tokens, (behind >= 0) & (behind < by_slot[layout.sample_slots])


class DecoderProxy:
    """Stands in for a round's decoder; ``before`` may change a batch, ``after`` runs behind."""

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
        return self._around(lambda changed: self._decoder.forward(changed, kv, capture), batch, kv)

    def install(self, engine: Engine) -> None:
        _override(engine.round, "decoder", self)
        engine.rounds.forget()

    def _around(
        self,
        forward: Callable[[FlatBatch], ForwardResult],
        batch: FlatBatch,
        kv: Sequence[Any],
    ) -> ForwardResult:
        if self._before is not None:
            batch = self._before(batch)
        result = forward(batch)
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
        done = replace(stages, penalties=False, bias=False, min_tokens=False)
        shared = replace(rows, positions=rows.positions - rows.positions % 2)
        return sample_rows(logits, shared, params, done, *rest)

    sample_with(engine, repeated)


# --- seams ------------------------------------------------------------------------------------


def before_judging(engine: Engine, change: BeforeJudging) -> None:
    """Let ``change`` see, and replace, what every round sampled before drafts are held to it."""
    assert engine.round.replace_sampled is None
    engine.round.replace_sampled = lambda spans, layout, sampled: change(
        spans.slots, spans.drafts, layout, sampled
    )
    engine.rounds.forget()


def sample_with(engine: Engine, stand_in: Callable[..., torch.Tensor]) -> None:
    """Replace the sampler while this engine samples, and only then."""
    sample = engine.round.sample

    def broken(*args: Any) -> Any:
        with _replaced(round_module, "sample_rows", stand_in):
            return sample(*args)

    _override(engine.round, "sample", broken)
    engine.rounds.forget()


@contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _override(place: Any, name: str, value: Any) -> None:
    if not hasattr(place, name):
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
