"""The compiled twins of the round's operations against the torch functions, on random slots."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness import needs_native
from surefoot.kernels.rounds import RoundSpans, judge_and_advance, lay_out_spans
from surefoot.sampling.params import Features
from surefoot.speculation.books import OfferBooks
from surefoot.speculation.controller import Controller
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.round import native_layout
from surefoot.speculation.size import Size
from surefoot.speculation.state import SlotState

K, VOCAB, SLOTS = 3, 6, 5
pytestmark = needs_native
quick = settings(max_examples=150, deadline=None, phases=[Phase.generate])


def twins(generator: torch.Generator) -> tuple[SlotState, SlotState]:
    """The same random slots twice; the second goes without compiled twins."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    every = SLOTS + 1
    history, length = draw(0, VOCAB, every, 40 + K + 1), draw(10, 20, every)
    back, room, stops = draw(1, 10, every), draw(1, 8, every), draw(-1, VOCAB + 20, every, 4)
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


def make_spans(data: Any, state: SlotState) -> tuple[RoundSpans, int, int]:
    """Prompt chunks, last chunks, decoding spans and unused entries in any order, with the rows and
    the sampled rows of a round that holds them, padded at random."""
    slots = list(data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))])
    known, drafts, samples = [], [], []
    for slot in slots:
        missing = int(state.length[slot] - state.computed[slot])
        kind = data.draw(st.sampled_from(["chunk", "end", "decoding", "ended"]))
        if kind == "decoding":
            state.computed[slot] = state.length[slot] - 1
        if kind == "chunk":
            state.computed[slot] -= 1
        known.append({"chunk": missing, "end": missing, "decoding": 1, "ended": 0}[kind])
        drafts.append(data.draw(st.integers(0, K)) if kind == "decoding" else 0)
        samples.append(int(kind in ("end", "decoding")))
    unused = data.draw(st.integers(0, 2))
    columns = slots + [SLOTS] * unused, known + [0] * unused, drafts + [0] * unused
    spans = RoundSpans(*map(torch.tensor, (*columns, samples + [0] * unused)))
    sampled = sum(drafts) + sum(samples)
    rows = max(1, sum(known) + sum(drafts) + data.draw(st.integers(0, 3)))
    return spans, rows, max(1, sampled + data.draw(st.integers(0, 2)))


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()


@quick
@given(st.data(), st.integers(0, 2**31))
def test_a_round_commits_the_same(data: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = twins(generator)
    spans, rows, sampled_rows = make_spans(data, states[0])
    states[1].computed[:] = states[0].computed
    sampled = torch.randint(0, VOCAB, (sampled_rows,), generator=generator)
    offers = torch.randint(0, VOCAB, (len(spans.slots), K), generator=generator)
    if data.draw(st.booleans()):
        # Mostly right drafts, so that whole spans are accepted too.
        first = 0
        for count, samples, row in zip(spans.drafts, spans.samples, offers, strict=True):
            row[:count] = sampled[first : first + count]
            first += int(count + samples)
    outcomes = []
    for state in states:
        OfferBooks(state, Controller(state, ["a"]), SLOTS).write(spans.slots, offers)
        size = Size(len(spans.slots), rows, sampled_rows, Features(), ())
        if state.native is not None:
            layout = native_layout(state, spans, size, 40)
            found = state.native.judge(spans, layout.first_sample, sampled, state.params.stop_ids)
        else:
            layout = lay_out_spans(
                spans, state.history, state.computed, state.block_tables, rows, sampled_rows, 40, 40
            )
            found = judge_and_advance(
                spans, layout.first_sample, sampled, state.history, state.length, state.computed,
                state.limit, state.params.stop_ids, K,
            )  # fmt: skip
        used, batch = spans.known > 0, layout.batch
        own = int((spans.known + spans.drafts)[used].sum())
        taken = int((spans.drafts + spans.samples)[used].sum())
        lines = (batch.tokens, batch.positions, batch.key_index)
        sampling = (layout.sample_index, layout.sample_slots, layout.sample_positions)
        verdict = found.accepted, found.counts, found.ends, found.settled, found.going
        kept = [row[:count] for row, count in zip(found.tokens, found.counts, strict=True)]
        texts = [state.history[slot, : state.length[slot]] for slot in range(SLOTS)]
        outcomes.append(
            (
                batch.row_slot,
                *(line[:own] for line in lines),
                *(line[:taken] for line in sampling),
                layout.first_row[used],
                layout.first_sample[used],
                *verdict,
                *kept,
                found.first,
                *texts,
                state.length[:SLOTS],
                state.computed[:SLOTS],
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
    allowed = torch.rand(SLOTS + 1, generator=generator) < 0.8
    limit = torch.randint(0, K + 1, (SLOTS + 1,), generator=generator)
    for state in twins(generator):
        controller = Controller(state, ["a"])
        controller.allowed[0], controller.draft_limit[:] = allowed, limit
        cut = controller.sanitise(0, slots, Drafts(tokens, lengths, confidence))
        outcomes.append((cut.tokens, cut.lengths, cut.confidence))
    same(outcomes[0], outcomes[1])


@quick
@given(st.integers(0, 2**31))
def test_chances_are_the_same(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = twins(generator)[0]
    estimator = Controller(state, ["a"]).estimators[0]
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
