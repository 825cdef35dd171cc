"""The Triton kernels around a forward (layout, verdict, lookup) against their torch twins."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels import rounds
from surefoot.kernels.lookup import ngram_lookup as ngram_lookup_reference
from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.kernels.triton.lookup import ngram_lookup
from surefoot.kernels.triton.slots import lay_out
from surefoot.kernels.triton.verdict import judge_and_advance
from surefoot.speculation.state import SlotState
from triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)
DRAFTS = 5


def make_state(seed: int) -> SlotState:
    torch.manual_seed(seed)
    state = SlotState(7, 100, DRAFTS, 4, 9, DEVICE)
    state.history = torch.randint(0, 3, state.history.shape)
    state.length = torch.randint(30, 80, (8,))
    state.computed = state.length - 1
    state.limit = state.length + torch.tensor([1, 2, 3, 50, 50, 50, 4, 50])
    state.params.stop_ids = torch.tensor([[-1, -1], [2, -1], [7, 2], [1, 0]] * 2)
    return state


@dataclass(frozen=True)
class Plan:
    """Spans in this order: prompt chunks that end short of the current token, those that reach it,
    requests with a current token."""

    slots: torch.Tensor
    known: torch.Tensor
    drafts: torch.Tensor
    rows: int
    sampled_rows: int
    first_sampling: int
    first_decoding: int
    max_keys: int = 99


def lay_out_reference(state: SlotState, plan: Plan) -> RoundLayout:
    return rounds.lay_out_spans(
        spans_of(plan), state.history, state.computed, state.block_tables,
        plan.rows, plan.sampled_rows, plan.max_keys, 80,
    )  # fmt: skip


def make_plan(state: SlotState, chunks: int, ending: int, decoding: int) -> Plan:
    """Spans: chunks that sample nothing, those that do, decoding ones with 0 to all drafts."""
    slots = torch.randperm(8)[: chunks + ending + decoding]
    known = torch.ones_like(slots)
    drafts = torch.randint(0, DRAFTS + 1, slots.shape)
    drafts[: chunks + ending] = 0
    for span in range(chunks + ending):
        slot = slots[span]
        state.computed[slot] = torch.randint(0, 25, ())
        left = state.length[slot] - state.computed[slot]
        known[span] = left if span >= chunks else torch.randint(1, int(left), ())
    sampled = int((drafts[chunks:] + 1).sum())
    return Plan(
        slots=slots,
        known=known,
        drafts=drafts,
        rows=int((known + drafts).sum()) + 3,
        sampled_rows=sampled + 2 if sampled else 0,
        first_sampling=chunks,
        first_decoding=chunks + ending,
    )


def spans_of(plan: Plan, unused: int = 0) -> RoundSpans:
    """The plan on the device, perhaps with entries that are not used."""
    samples = (torch.arange(len(plan.slots)) >= plan.first_sampling).long()
    filler = torch.zeros(unused, dtype=torch.int64)
    return RoundSpans(
        torch.cat((plan.slots, filler - 1)),
        torch.cat((plan.known, filler)),
        torch.cat((plan.drafts, filler + 2)),
        torch.cat((samples, filler + 1)),
    )


PLANS = [(0, 0, 1), (0, 0, 6), (1, 0, 0), (2, 1, 0), (1, 2, 4), (0, 3, 2)]


@pytest.mark.parametrize("unused", [0, 2])
@pytest.mark.parametrize("shape", PLANS)
def test_layouts_are_equal(shape: tuple[int, int, int], unused: int) -> None:
    state = make_state(sum(shape))
    plan = make_plan(state, *shape)
    expected = lay_out_reference(state, plan)
    found = lay_out(
        spans_of(plan, unused), state.history, state.computed, state.block_tables,
        plan.rows, plan.sampled_rows, plan.max_keys, 80,
    )  # fmt: skip
    count = len(plan.slots)
    assert torch.equal(found.first_row[:count], expected.first_row)
    assert torch.equal(found.first_sample[:count], expected.first_sample)
    for name in ("sample_index", "sample_slots", "sample_positions"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("tokens", "positions", "key_index", "row_slot"):
        assert torch.equal(getattr(found.batch, name), getattr(expected.batch, name)), name
    spans = found.batch.spans
    assert spans is not None
    assert torch.equal(spans.rows[:count], plan.known + plan.drafts)
    assert not spans.rows[count:].any()


@pytest.mark.parametrize("unused", [0, 2])
@pytest.mark.parametrize("shape", PLANS * 3)
def test_verdicts_are_equal(shape: tuple[int, int, int], unused: int) -> None:
    state = make_state(sum(shape) + 1)
    plan = make_plan(state, *shape)
    layout = lay_out_reference(state, plan)
    sampled = torch.randint(0, 3, (max(plan.sampled_rows, 1),))
    for span in range(plan.first_decoding, len(plan.slots)):
        # Half of the drafts are right as far as they go.
        if span % 2:
            first, slot = int(layout.first_sample[span]), plan.slots[span]
            at = int(state.length[slot])
            many = int(plan.drafts[span])
            sampled[first : first + many] = state.history[slot, at : at + many]
    history, length, computed = (x.clone() for x in (state.history, state.length, state.computed))
    spans = spans_of(plan, unused)
    filler = torch.zeros(unused, dtype=torch.int64)
    found = judge_and_advance(
        spans, torch.cat((layout.first_sample, filler)), sampled,
        history, length, computed, state.limit, state.params.stop_ids, DRAFTS,
    )  # fmt: skip

    before = state.computed[plan.slots]
    verdict = rounds.judge_and_advance(
        spans_of(plan), layout.first_sample, sampled, state.history, state.length,
        state.computed, state.limit, state.params.stop_ids, DRAFTS,
    )  # fmt: skip
    expected = verdict.tokens, verdict.accepted, verdict.counts, verdict.ends
    count = len(plan.slots)
    expected = *expected, verdict.going
    names = ("tokens", "accepted", "counts", "ends", "going")
    for name, value in zip(names, expected, strict=True):
        assert torch.equal(getattr(found, name)[:count], value), name
    assert torch.equal(found.settled[:count], state.computed[plan.slots] - before)
    for name in ("accepted", "counts", "settled"):
        assert not getattr(found, name)[count:].any(), "an unused entry did something"
    assert (found.going[count:] == state.padding_slot).all()
    assert torch.equal(history, state.history)
    assert torch.equal(length, state.length)
    assert torch.equal(computed, state.computed)


def test_a_verdict_has_every_outcome() -> None:
    """The comparison above is of use only if accepting, stopping and limits occur in it."""
    seen: dict[str, set[int]] = {}
    for seed in range(12):
        state = make_state(seed)
        plan = make_plan(state, 0, 1, 6)
        layout = lay_out_reference(state, plan)
        verdict = judge_and_advance(
            spans_of(plan), layout.first_sample, torch.randint(0, 3, (plan.sampled_rows,)),
            state.history, state.length, state.computed, state.limit, state.params.stop_ids, DRAFTS,
        )  # fmt: skip
        for item in fields(verdict):
            seen.setdefault(item.name, set()).update(getattr(verdict, item.name).flatten().tolist())
    assert seen["ends"] == {0, 1, 2} and {0, 1, 2} <= seen["accepted"]


# --- lookup -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "window"), [(2, 5, 2048), (1, 3, 20), (3, 3, 4), (1, 9, 3)]
)
def test_lookups_are_equal(
    low: int, high: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.kernels.triton.lookup.TILE", 16)
    generator = torch.Generator().manual_seed(window)
    history = torch.randint(0, 3, (40, 70), generator=generator)
    history[::3] = torch.randint(0, 9, (14, 70), generator=generator)
    length = torch.randint(1, 65, (40,), generator=generator)
    length[:4] = torch.tensor([1, 2, 3, 4])
    slots = torch.randperm(40)
    found = ngram_lookup(history, length, slots, low, high, window, DRAFTS)
    expected = ngram_lookup_reference(history, length, slots, low, high, window, DRAFTS)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.confidence, expected.confidence)
    some = found.lengths > 0
    assert torch.equal(found.tokens[some], expected.tokens[some])
    assert 0 < some.sum() < len(slots) and len(found.confidence.unique()) > 1
    none = ngram_lookup(history, length, torch.tensor([-1]), low, high, window, DRAFTS)
    assert none.lengths.tolist() == [0]
