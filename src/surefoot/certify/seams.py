"""The places at which known defects are put into an engine, from outside.

Nothing here is reachable from production code. All that a certificate changes of an engine's
insides is named here: ``Round.replace_sampled``, ``Round.decoder``, ``Round.sample`` with
``sample_rows`` as it calls it, ``Round.judge``, ``Round.rows_to_sample``,
``TokenScores.of_tokens``, ``BookKeeping.walk``, ``SlotState.admit`` and ``SlotParams.write``. What
runs inside a round reads nothing on the host and draws its chances from a counter on the device, so
that it can be recorded, and is recorded: rounds recorded before are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from surefoot.engine.engine import Engine
from surefoot.kernels.batch import FlatBatch, OutputRows
from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.models.decoder import Decoder, ForwardResult
from surefoot.sampling.noise import philox
from surefoot.sampling.params import SlotParams
from surefoot.sampling.sampler import SampleRows, sample_rows
from surefoot.speculation import round as round_module

BeforeJudging = Callable[[torch.Tensor, torch.Tensor, RoundLayout, torch.Tensor], torch.Tensor]
"""(slots [B], drafts [B], layout, sampled [M]) -> sampled [M], as the judge will see it."""
OfDrafts = Callable[[torch.Tensor, SlotParams], None]
"""(whether each row [M] is a draft's, the rows' parameters, one entry each): changes them."""


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
        self,
        batch: FlatBatch,
        kv: Sequence[Any],
        capture: Sequence[int] = (),
        outputs: OutputRows | None = None,
        likeliest: bool = False,
    ) -> ForwardResult:
        def forward(changed: FlatBatch) -> ForwardResult:
            return self._decoder.forward(changed, kv, capture, outputs, likeliest)

        return self._around(forward, batch, kv)

    def install(self, engine: Engine) -> None:
        override(engine.round, "decoder", self)
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


def before_judging(engine: Engine, change: BeforeJudging) -> None:
    """Let ``change`` see, and replace, what every round sampled before drafts are held to it."""
    assert engine.round.replace_sampled is None

    def replaced(spans: RoundSpans, layout: RoundLayout, sampled: torch.Tensor) -> torch.Tensor:
        if not len(layout.sample_slots):
            return sampled  # A prompt chunk alone samples nothing.
        return change(spans.slots, spans.drafts, layout, sampled)

    engine.round.replace_sampled = replaced
    engine.rounds.forget()


def sample_with(engine: Engine, stand_in: Callable[..., torch.Tensor]) -> None:
    """Replace the sampler while this engine samples, and only then."""
    sample = engine.round.sample

    def broken(*args: Any) -> Any:
        with _replaced(round_module, "sample_rows", stand_in):
            return sample(*args)

    override(engine.round, "sample", broken)
    engine.rounds.forget()


@contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def override(place: Any, name: str, value: Any) -> None:
    if not hasattr(place, name):
        raise AttributeError(name)
    setattr(place, name, value)


def wrap(place: Any, name: str, change: Callable[..., Any]) -> None:
    """Put ``change`` before a method; it is called with the method itself and its arguments."""
    method = getattr(place, name)
    override(place, name, lambda *args, **named: change(method, *args, **named))


def wrap_in_rounds(engine: Engine, place: Any, name: str, change: Callable[..., Any]) -> None:
    """``wrap`` for what rounds call, and recorded rounds hold."""
    wrap(place, name, change)
    engine.rounds.forget()


def rows_of_drafts(engine: Engine, rows: SampleRows) -> torch.Tensor:
    """Bool [M]: whether a row samples behind a draft, not behind the current token."""
    return rows.positions > engine.state.length[rows.slots]


def with_parameters(engine: Engine, change: OfDrafts) -> None:
    """Sample with other parameters, row by row."""

    def changed(
        logits: torch.Tensor,
        rows: SampleRows,
        params: SlotParams,
        *rest: Any,
    ) -> torch.Tensor:
        of_drafts, rows, params = by_row(engine, rows, params)
        change(of_drafts, params)
        return sample_rows(logits, rows, params, *rest)

    sample_with(engine, changed)


def by_row(
    engine: Engine, rows: SampleRows, params: SlotParams
) -> tuple[torch.Tensor, SampleRows, SlotParams]:
    """(whether each row is a draft's, the same rows, their parameters), one entry a row each."""
    of_drafts, slots = rows_of_drafts(engine, rows), rows.slots
    texts = rows.history if rows.history_by_row else rows.history[slots]
    index = torch.arange(len(slots), device=slots.device)
    rows = replace(rows, slots=index, history=texts, history_by_row=True)
    return of_drafts, rows, params.spread(slots)
