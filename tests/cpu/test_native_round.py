"""The compiled twins of the round's operations against the torch functions, on random slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness import needs_native
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.speculation.controller import Choice, Controller, split_rows, split_rows_reference
from surefoot.speculation.cost import CostModel
from surefoot.speculation.layout import RoundPlan, lay_out, lay_out_reference
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.round import SpeculativeRound, write_drafts
from surefoot.speculation.state import SlotState

K, VOCAB, SLOTS = 3, 6, 5
pytestmark = needs_native
quick = settings(max_examples=150, deadline=None, phases=[Phase.generate])


def twins(generator: torch.Generator) -> tuple[SlotState, SlotState]:
    """The same random slots twice; the second goes without compiled twins."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    history, length = draw(0, VOCAB, SLOTS, 40 + K + 1), draw(10, 20, SLOTS)
    back, room, stops = draw(1, 10, SLOTS), draw(1, 8, SLOTS), draw(-1, VOCAB + 20, SLOTS, 4)
    pair = []
    for _ in range(2):
        state = SlotState(SLOTS, 40, K, 4, VOCAB, torch.device("cpu"))
        state.history[:], state.length[:] = history, length
        state.computed[:], state.limit[:] = length - back, length + room
        state.params.stop_ids[:] = stops
        pair.append(state)
    assert pair[0].native is not None
    pair[1].native = None
    return pair[0], pair[1]


def make_plan(data: Any, state: SlotState) -> tuple[RoundPlan, Choice | None]:
    """A plan of prefill chunks, last chunks and decoding spans, padded at random."""
    slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
    first_sampling = data.draw(st.integers(0, len(slots)))
    first_decoding = data.draw(st.integers(first_sampling, len(slots)))
    back = [int(state.length[slot] - state.computed[slot]) for slot in slots]
    known, drafts = [], []
    for index, slot in enumerate(slots):
        if index >= first_decoding:
            state.computed[slot] = state.length[slot] - 1
            known.append(1)
        elif index >= first_sampling:
            known.append(back[index])
        else:
            state.computed[slot] -= 1
            known.append(data.draw(st.integers(1, back[index])))
        drafts.append(data.draw(st.integers(0, K)) if index >= first_decoding else 0)
    sampled = sum(drafts[first_sampling:]) + len(slots) - first_sampling
    plan = RoundPlan(
        slots=torch.tensor(slots),
        known=torch.tensor(known),
        drafts=torch.tensor(drafts),
        rows=sum(known) + sum(drafts) + data.draw(st.integers(0, 3)),
        sampled_rows=sampled + data.draw(st.integers(0, 2)) if sampled else 0,
        first_sampling=first_sampling,
        first_decoding=first_decoding,
        max_keys=40,
    )
    if not any(drafts):
        return plan, None
    count = len(slots) - first_decoding
    offers = torch.tensor(
        data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=K * count, max_size=K * count))
    ).view(count, K)
    lengths = torch.tensor(drafts[first_decoding:])
    return plan, Choice(torch.zeros_like(lengths), offers, lengths, torch.ones(count, K))


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()


@quick
@given(st.data(), st.integers(0, 2**31))
def test_a_round_commits_the_same(data: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = twins(generator)
    plan, choice = make_plan(data, states[0])
    states[1].computed[:] = states[0].computed
    sampled = torch.randint(0, VOCAB, (max(plan.sampled_rows, 1),), generator=generator)
    if choice is not None and data.draw(st.booleans()):
        # Mostly right drafts, so that whole spans are accepted too.
        first = plan.first_decoding - plan.first_sampling
        for count, row in zip(plan.drafts[plan.first_decoding :], choice.tokens, strict=True):
            row[:count] = sampled[first : first + count]
            first += int(count) + 1
    outcomes = []
    for state, function in zip(states, (lay_out, lay_out_reference), strict=True):
        if choice is not None:
            write_drafts(state, plan.slots[plan.first_decoding :], choice.tokens)
        layout = function(state, plan)
        round_ = SpeculativeRound.__new__(SpeculativeRound)
        round_.state = state
        round_.decoder = cast(Any, SimpleNamespace(backend=TorchBackend("cpu", torch.float32)))
        found, _ = round_.judge(plan, layout, sampled)
        verdict = found.tokens, found.accepted, found.counts, found.ends
        settled = found.first, found.settled
        batch = layout.batch
        rows = (batch.tokens, batch.positions, batch.key_index, batch.row_slot)
        outcomes.append(
            (
                *rows,
                layout.first_row,
                layout.sample_index,
                layout.sample_slots,
                layout.sample_positions,
                layout.first_sample,
                *verdict,
                *settled,
                state.history,
                state.length,
                state.computed,
            )
        )
    same(*outcomes)


@quick
@given(st.integers(1, 5), st.integers(0, 2**31))
def test_offers_are_cut_to_the_same(width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    tokens = torch.randint(-1, VOCAB + 1, (4, width), generator=generator)
    lengths = torch.randint(0, width + 2, (4,), generator=generator)
    confidence = torch.rand(4, width, generator=generator)
    slots = torch.randperm(SLOTS, generator=generator)[:4]
    allowed = torch.rand(SLOTS, generator=generator) < 0.8
    limit = torch.randint(0, K + 1, (SLOTS,), generator=generator)
    for state in twins(generator):
        controller = Controller(state, ["a"], CostModel([1], [1.0], 64))
        controller.allowed[0], controller.draft_limit[:] = allowed, limit
        cut = controller.sanitise(0, slots, Drafts(tokens, lengths, confidence))
        outcomes.append((cut.tokens, cut.lengths, cut.confidence))
    same(outcomes[0], outcomes[1])


@quick
@given(st.integers(0, 2**31))
def test_chances_are_the_same(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = twins(generator)[0]
    estimator = Controller(state, ["a"], CostModel([1], [1.0], 64)).estimators[0]
    estimator.trials.copy_(torch.rand(estimator.trials.shape, generator=generator) * 9)
    estimator.hits.copy_(estimator.trials * torch.rand(estimator.hits.shape, generator=generator))
    offers = Drafts(
        torch.zeros(4, K, dtype=torch.int64),
        torch.randint(0, K + 1, (4,), generator=generator),
        torch.rand(4, K, generator=generator) * 1.2,
    )
    slots = torch.randperm(SLOTS, generator=generator)[:4]
    ours, theirs = estimator.chances(slots, offers), estimator.chances_reference(slots, offers)
    assert torch.allclose(ours, theirs, atol=1e-6)


@quick
@given(st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([0.0, 0.95]))
def test_rows_are_split_the_same(batch: int, seed: int, min_pace: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(batch, K, generator=generator).cumprod(dim=1)
    chances[torch.rand(batch, generator=generator) < 0.3] = 0
    entries = int(torch.randint(1, batch * K + 3, (1,), generator=generator))
    table = 1 + (0.2 * torch.rand(entries, generator=generator)).cumsum(0)
    ours = split_rows(chances, table, 1.02, min_pace)
    theirs = split_rows_reference(chances, table, 1.02, min_pace)
    assert ours.tolist() == theirs.tolist()
