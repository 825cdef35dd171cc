"""From slots to the rows of one forward, and from sampled rows back to slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.rounds import RoundLayout, RoundSpans, lay_out_spans
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class RoundPlan:
    """What the host decided about a round. B spans, in this order: prefill chunks that end short
    of the current token, those that reach it, spans of requests with a current token."""

    slots: torch.Tensor
    """int64 [B]."""
    known: torch.Tensor
    """int64 [B]: rows of known tokens: the chunk, or 1 for the current token."""
    drafts: torch.Tensor
    """int64 [B]: drafts to verify after them."""
    rows: int
    """Rows of the flat batch: at least the sum of ``known`` and ``drafts``."""
    sampled_rows: int
    """Rows to sample: at least one, plus the drafts, for each span that samples."""
    first_sampling: int
    """Spans before this one sample nothing."""
    first_decoding: int
    """Spans before this one are prefill chunks."""
    max_keys: int
    every_row_samples: bool = False
    """The rows to sample are all rows of the flat batch, in its order."""


def lay_out(
    state: SlotState, plan: RoundPlan, lay_out_spans: Callable[..., RoundLayout] = lay_out_spans
) -> RoundLayout:
    """Build the flat batch from the slots; drafts already stand in ``state.history``.
    ``lay_out_spans``: a backend's."""
    if state.native is None:
        return lay_out_reference(state, plan, lay_out_spans)
    tensors = state.native.lay_out(
        plan.slots, plan.known, plan.drafts, plan.first_sampling, plan.rows, plan.sampled_rows
    )
    tokens, positions, row_slot, first_row, index, sample_slots, sample_positions, first = tensors
    batch = FlatBatch(
        tokens=tokens,
        positions=positions,
        key_index=positions,
        row_slot=row_slot,
        block_tables=state.block_tables,
        span_start=state.computed,
        max_keys=plan.max_keys,
    )
    return RoundLayout(batch, first_row, index, sample_slots, sample_positions, first)


def lay_out_reference(
    state: SlotState, plan: RoundPlan, lay_out_spans: Callable[..., RoundLayout] = lay_out_spans
) -> RoundLayout:
    """``lay_out`` on any device."""
    samples = torch.arange(len(plan.slots), device=state.device) >= plan.first_sampling
    return lay_out_spans(
        RoundSpans(plan.slots, plan.known, plan.drafts, samples.long()),
        state.history,
        state.computed,
        state.block_tables,
        plan.rows,
        plan.sampled_rows,
        plan.max_keys,
        plan.rows,
    )
