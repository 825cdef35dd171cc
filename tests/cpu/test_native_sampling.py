"""The compiled sampling kernels against the torch functions, on vocabularies that fill no vector,
and their independence of threads, neighbours and order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.logprobs import ScoredSpans, row_logprobs
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.noise import gumbel
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import (
    SampleRows,
    adjust,
    adjustments_of,
    draws_of,
    filtered_scores,
    sample_rows,
)

pytestmark = pytest.mark.skipif(
    native_unavailable() is not None, reason=f"native kernels: {native_unavailable()}"
)

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.999},
    {"temperature": 0.7, "top_p": 1e-6},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 0.9, "top_k": 40},
    {"temperature": 5.0, "top_k": 3000},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 100.0, "top_p": 0.5},
    {"temperature": 0.0},
]


def build(vocab: int, sets: list[dict[str, Any]]) -> tuple[SlotParams, SampleRows, SamplingStages]:
    """One slot and one row for each of the settings."""
    params = SlotParams(len(sets), vocab, torch.device("cpu"))
    every = [SamplingParams(**values) for values in sets]
    for slot, one in enumerate(every):
        seed = (slot + 1) * 0x9E3779B97F4A7C1 % 2**63
        request = Request("r", (1, 2), one, SpeculationParams(), seed, 999, (0,), slot=slot)
        params.write([request])
    history = torch.randint(0, vocab, (len(sets), 40), generator=torch.Generator().manual_seed(1))
    slots = torch.arange(len(sets))
    return params, SampleRows(slots, slots + 3, history, 40), SamplingStages.of(every)


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    flat = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        return flat
    if kind == "ties":
        return (flat * 2).round()
    if kind == "masked":
        return flat.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.9, -math.inf)
    return flat * 3 + 30 * torch.rand(rows, vocab, generator=generator) ** 20


def noised(
    logits: torch.Tensor, params: SlotParams, rows: SampleRows, features: SamplingStages
) -> Any:
    """Scores plus noise in torch; greedy rows keep their logits."""
    slots = rows.slots
    noise = gumbel(params.seed[slots], params.choice[slots], rows.positions, logits.shape[1])
    scores = filtered_scores(logits, slots, params, features) + noise
    return torch.where((params.temperature[slots] == 0).unsqueeze(1), logits, scores)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "masked"])
@pytest.mark.parametrize("vocab", [1, 3, 17, 63, 64, 65, 1000, 16385, 50001])
def test_draws_equal_the_torch_functions(vocab: int, kind: str) -> None:
    params, rows, features = build(vocab, SETTINGS)
    logits = logits_of(kind, len(SETTINGS), vocab)
    logits[:, -1] = logits[:, -1].clamp(min=-3)  # a row has at least one token
    tokens = sample_rows(logits, rows, params, features, NativeBackend(threads=2))
    scores = noised(logits, params, rows, features)
    best = scores.amax(dim=1)
    drawn = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # The variates may differ by roundings of two logarithms, the nucleus by those of its sum.
    assert (drawn >= best - 1e-5).all(), (drawn - best, SETTINGS)


@pytest.mark.parametrize("threads", [1, 3])
def test_draws_do_not_depend_on_threads_or_neighbours(threads: int) -> None:
    vocab = 40_003
    sets = SETTINGS * 2
    params, rows, _ = build(vocab, sets)
    logits = logits_of("flat", len(sets), vocab)
    tokens = NativeBackend(threads=2).draw(logits, draws_of(rows, params))
    backend = NativeBackend(threads=threads)
    assert torch.equal(backend.draw(logits, draws_of(rows, params)), tokens)
    for row in range(len(sets)):
        one = replace(
            rows, slots=rows.slots[row : row + 1], positions=rows.positions[row : row + 1]
        )
        alone = backend.draw(logits[row : row + 1], draws_of(one, params))
        assert alone.item() == tokens[row]


@pytest.mark.parametrize("kind", ["flat", "ties"])
@pytest.mark.parametrize("top_k", [1, 2, 15, 64, 300, 301])
def test_top_k_keeps_all_that_tie_with_the_last(top_k: int, kind: str) -> None:
    vocab, count = 301, 6000
    params, _, _ = build(vocab, [{"temperature": 50.0, "top_k": top_k}])
    logits = logits_of(kind, 1, vocab)
    allowed = set((logits[0] >= logits[0].sort().values[-top_k]).nonzero().flatten().tolist())
    rows = SampleRows(
        torch.zeros(count, dtype=torch.int64), torch.arange(count), torch.zeros(1, 1).long(), 0
    )
    drawn = NativeBackend().draw(logits.expand(count, -1), draws_of(rows, params))
    assert set(drawn.tolist()) == allowed


def test_top_p_ends_at_the_token_that_fills_it() -> None:
    # Masses 1/2, 1/4, 1/8, ... and a tie at the border.
    masses = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    for top_p, allowed in [(0.45, 1), (0.55, 2), (0.8, 3), (0.876, 5), (0.93, 5)]:
        params, _, _ = build(5, [{"temperature": 1.0, "top_p": top_p}])
        count = 3000
        rows = SampleRows(
            torch.zeros(count, dtype=torch.int64), torch.arange(count), torch.zeros(1, 1).long(), 0
        )
        logits = masses.log().expand(count, -1)
        drawn = NativeBackend().draw(logits, draws_of(rows, params))
        assert set(drawn.tolist()) == set(range(allowed)), top_p


def test_variates_are_those_of_torch_up_to_rounding() -> None:
    # With two tokens the winner tells on which side of the gap the difference of the noise lies:
    # bracket it within 4e-6 around torch's.
    count, vocab = 2000, 2
    seeds, zero = torch.arange(count) * 104729 + 2**40, torch.zeros(count, dtype=torch.int64)
    noise = gumbel(seeds, zero, zero + 5, vocab).double()
    gap = noise[:, 0] - noise[:, 1]
    params, _, _ = build(vocab, [{"temperature": 1.0}] * count)
    params.seed = seeds
    rows = SampleRows(torch.arange(count), zero + 5, torch.zeros(1, 1).long(), 0)
    for sign in (-1, 1):
        logits = torch.stack([torch.zeros(count), (gap + sign * 8e-6).float()], dim=1)
        tokens = NativeBackend().draw(logits, draws_of(rows, params))
        assert (tokens == (sign > 0)).all()


@pytest.mark.parametrize("vocab", [5, 64, 20_001])
def test_adjusted_logits_equal_the_torch_functions_bit_for_bit(vocab: int) -> None:
    sets: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7},
        {"repetition_penalty": 0.8, "min_tokens": 9, "stop_token_ids": [1, 4, 2]},
        {"frequency_penalty": -1.1, "logit_bias": {0: 2.5, 3: -100.0}},
        {"min_tokens": 1, "logit_bias": {4: 1e-3}},
        {},
    ]
    params, rows, features = build(vocab, sets)
    rows.history[0, ::3] = 1
    rows = replace(
        rows,
        slots=torch.tensor([0, 0, 1, 2, 3, 4, 2]),
        positions=torch.tensor([2, 39, 10, 25, 3, 7, 40]),
        max_history=40,
    )
    logits = logits_of("flat", 7, vocab) * 3
    before = logits.clone()
    for off in ({}, {"penalties": False}, {"bias": False}, {"min_tokens": False}):
        wanted = replace(features, **off)
        expected = adjust(logits, rows, params, wanted)
        for threads in (1, 2):
            backend = NativeBackend(threads=threads)
            # Twice: what one call leaves in scratch memory must not reach the next.
            for _ in range(2):
                found = logits.clone()
                assert backend.adjust(found, adjustments_of(rows, params, wanted))
                assert torch.equal(found, expected)
    assert torch.equal(logits, before)


def test_rows_of_nothing_but_minus_infinity_take_the_first_token() -> None:
    params, rows, _ = build(100, [{"temperature": 1.0, "top_p": 0.5, "top_k": 3}])
    tokens = NativeBackend().draw(torch.full((1, 100), -math.inf), draws_of(rows, params))
    assert tokens.tolist() == [0]


def test_slots_and_ids_out_of_range_are_errors() -> None:
    backend = NativeBackend()
    params, rows, features = build(10, [{"logit_bias": {3: 1.0}, "temperature": 1.0}])
    logits = torch.zeros(1, 10)
    for slot in (-1, 1):
        wrong = replace(rows, slots=torch.tensor([slot]))
        with pytest.raises(IndexError, match="out of range"):
            backend.draw(logits, draws_of(wrong, params))
        with pytest.raises(IndexError, match="out of range"):
            backend.adjust(logits, adjustments_of(wrong, params, features))
    params.bias_ids[0, 0] = 10
    with pytest.raises(IndexError, match="out of range"):
        backend.adjust(logits, adjustments_of(rows, params, features))
    with pytest.raises(ValueError, match="contiguous"):
        backend.draw(logits, replace(draws_of(rows, params), seed=torch.zeros(1)))


def test_a_large_vocabulary_follows_its_distribution() -> None:
    # The draws of tokens in 16 classes, by mass: skipping must not favour any of them.
    vocab, count = 5003, 8000
    params, _, _ = build(vocab, [{"temperature": 0.7}])
    logits = logits_of("flat", 1, vocab) * 1.5
    rows = SampleRows(
        torch.zeros(count, dtype=torch.int64), torch.arange(count), torch.zeros(1, 1).long(), 0
    )
    tokens = NativeBackend().draw(logits.expand(count, -1), draws_of(rows, params))
    mass = torch.softmax(logits[0].double() / 0.7, dim=0).numpy()
    classes = np.searchsorted(np.quantile(mass, np.arange(1, 16) / 16), mass)
    expected = np.bincount(classes, weights=mass, minlength=16) * count
    observed = np.bincount(classes[tokens.numpy()], minlength=16)
    chi = ((observed - expected) ** 2 / expected).sum()
    assert chi < 37.7  # 0.1 % of 15 degrees of freedom


@pytest.mark.parametrize("width", [0, 1, 5, 50])
@pytest.mark.parametrize("vocab", [7, 16, 40, 1061, 20_000])
def test_logprobs_are_those_of_a_softmax(vocab: int, width: int) -> None:
    logits = 3.0 * torch.randn((9, vocab), generator=torch.Generator().manual_seed(vocab))
    logits[0, ::3] = -torch.inf
    logits[1] = torch.arange(vocab) / vocab
    logits[2] = logits[2].round()
    logits[3] += 1e4
    tokens = torch.arange(9) * 5 % vocab
    packed = NativeBackend(threads=2).row_logprobs(logits, tokens, width)
    assert packed.shape == row_logprobs(logits, tokens, width).shape
    exact, kept = logits.double().log_softmax(-1), min(width, vocab)
    values, chosen = packed.view(torch.float32), exact.gather(1, tokens.unsqueeze(1))
    torch.testing.assert_close(values[:, :1].double(), chosen, atol=2e-5, rtol=2e-7)
    greater = logits > logits.gather(1, tokens.unsqueeze(1))
    assert packed[:, 1].tolist() == (1 + greater.sum(dim=1)).tolist()
    # Of tokens that are as likely, the first ones.
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    assert packed[:, 2 : 2 + kept].tolist() == order.tolist()
    best = exact.gather(1, order)
    torch.testing.assert_close(values[:, 2 + kept :].double(), best, atol=2e-5, rtol=2e-7)
    for row in range(9):
        alone = NativeBackend(threads=1).row_logprobs(
            logits[row : row + 1], tokens[row : row + 1], width
        )
        assert alone.equal(packed[row : row + 1])


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("scored", [[3, 1], [2], [3, 1, 0, 2]])
def test_logprobs_of_spans_are_those_of_their_rows(scored: list[int], steps: bool) -> None:
    """Of chains and of accepted paths; a span that has fewer rows ends with others', and the last
    one with its own last row. Nobody reads the rows that are not scored."""
    logits = 3.0 * torch.randn((12, 20_000), generator=torch.Generator().manual_seed(4))
    tokens = torch.arange(12) * 1_601
    behind = torch.tensor([[0, 2, 4, 0], [0, 3, 0, 0], [0, 1, 2, 0], [0, 2, 1, 5]])
    behind = torch.cat([behind, behind + 1], dim=1)[:, :4]  # strided
    places, first = torch.tensor(scored), torch.tensor([0, 5, 6, 9])
    spans = ScoredSpans(first, places, 4, behind if steps else None)
    index = first[places][:, None] + (behind[places] if steps else torch.arange(4))
    index = index.clamp(max=11).flatten()
    backend = NativeBackend(threads=2)
    expected = backend.row_logprobs(logits[index], tokens[index], 5)
    given = torch.full_like(logits, torch.nan)
    given[index] = logits[index]
    assert torch.equal(backend.span_logprobs(given, tokens, spans, 5), expected)


def test_logprobs_of_a_token_that_does_not_exist_are_refused() -> None:
    for token in (-1, 40):
        with pytest.raises(IndexError):
            NativeBackend(threads=1).row_logprobs(torch.zeros(1, 40), torch.tensor([token]), 2)
