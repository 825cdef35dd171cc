"""The Triton sampler against the torch one, run by Triton's interpreter."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

import triton.language as tl

from surefoot.kernels.draws import CHANGED, READ, UNREAD, Maxima, TokenMasks
from surefoot.kernels.draws import mask_tokens as mask_tokens_reference
from surefoot.kernels.logprobs import ScoredSpans
from surefoot.kernels.logprobs import row_logprobs as row_logprobs_reference
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import sampling
from surefoot.kernels.triton.argmax import argmax
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.filters import depth_of, limit_of
from surefoot.kernels.triton.launch import jit
from surefoot.kernels.triton.logprobs import mask_tokens, row_logprobs
from surefoot.kernels.triton.noise import gumbel, noise_words
from surefoot.kernels.triton.penalties import Adjuster
from surefoot.kernels.triton.sampling import draw
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling import noise as reference
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import (
    SampleRows,
    adjust,
    adjustments_of,
    draws_of,
    filtered_scores,
    sample_rows,
)
from triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    # numpy warns where -inf is meant.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
VOCAB = 2500  # two parts, the second not full


@jit
def noise_kernel(seed_ptr, choice_ptr, position_ptr, words_ptr, noise_ptr, BLOCK: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    words = noise_words(
        tl.load(seed_ptr + row),
        tl.load(choice_ptr + row),
        tl.load(position_ptr + row),
        first,
        BLOCK,
    )
    place = row * tl.num_programs(1) * BLOCK + first + tl.arange(0, BLOCK)
    tl.store(words_ptr + place, words.to(tl.int64))
    tl.store(noise_ptr + place, gumbel(words))


def test_noise_is_the_sampler_s() -> None:
    mask = 2**32 - 1
    seeds, choices, positions = (
        torch.tensor(values)
        for values in ([5, 2**62 + 3, 2**33 + 1, -1], [0, 1, 7, 2**31], [0, 9, 2**20, 3])
    )
    words = torch.zeros((4, 512), dtype=torch.int64)
    noise = torch.zeros((4, 512))
    noise_kernel[(4, 2)](seeds, choices, positions, words, noise, 256)
    quads = torch.arange(128)
    column = [x.unsqueeze(1) & mask for x in (positions, choices, seeds, seeds >> 32)]
    counter = (quads, column[0], column[1], torch.zeros_like(quads))
    expected = torch.stack(reference.philox(counter, (column[2], column[3])), dim=-1).flatten(1)
    assert torch.equal(words, expected)
    close = reference.gumbel(seeds, choices, positions, 512)
    torch.testing.assert_close(noise, close, rtol=2e-6, atol=2e-6)


@jit
def variate_kernel(words_ptr, noise_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(noise_ptr + index, gumbel(tl.load(words_ptr + index).to(tl.uint32)))


def test_noise_is_exact_in_its_tails() -> None:
    words = torch.tensor([0, 1, 2, 255, 2**16, 2**31, 2**32 - 2, 2**32 - 1])
    noise = torch.zeros(8)
    variate_kernel[(1,)](words, noise, 8)
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    torch.testing.assert_close(noise.double(), -torch.log(-torch.log1p(-v)), rtol=1e-6, atol=1e-6)


# --- parameters ---------------------------------------------------------------------------------

KINDS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=40),
    dict(temperature=1.3, top_p=0.9),
    dict(temperature=0.9, min_p=0.05),
    dict(temperature=2.0, top_k=100, top_p=0.5, min_p=0.001),
    dict(temperature=1e-3, top_p=0.3),
    dict(temperature=1.0, top_k=1),
    dict(temperature=1.0, top_p=1e-6),
    dict(temperature=5.0, top_k=VOCAB - 1, top_p=0.99999),
)


def tables(*kinds: dict[str, Any], stop: tuple[int, ...] = ()) -> tuple[SlotParams, SamplingStages]:
    params = SlotParams(len(kinds), VOCAB, DEVICE)
    requests = []
    for slot, kind in enumerate(kinds):
        seed = slot * 77 + 2**40
        chosen = SamplingParams(**kind)
        request = Request(str(slot), (3, 4, 5, 4), chosen, SpeculationParams(), seed, 999, stop)
        request.choice, request.slot = slot % 3, slot
        requests.append(request)
    params.write(requests)
    return params, SamplingStages.of(request.params for request in requests)


def rows_of(count: int, slots: int) -> SampleRows:
    history = torch.randint(0, VOCAB, (slots, 40))
    history[:, 4:] = history[:, 4:] % 9
    index = torch.arange(count)
    return SampleRows(index % slots, 6 + index % 30, history, 38)


def sample(
    logits: torch.Tensor, rows: SampleRows, params: SlotParams, features: SamplingStages
) -> Any:
    adjuster = Adjuster(logits.device)
    if features.adjusts:
        logits = logits.clone()
        assert adjuster(logits, adjustments_of(rows, params, features))
        assert all(table.count_nonzero() == 0 for table in adjuster._tables)
    return draw(logits, draws_of(rows, params)) if features.noise else argmax(logits)


def test_samples_are_those_of_the_torch_sampler() -> None:
    torch.manual_seed(5)
    params, features = tables(*KINDS)
    rows = rows_of(len(KINDS), len(KINDS))
    logits = 3 * torch.randn(len(KINDS), VOCAB)
    expected = sample_rows(logits, rows, params, features)
    assert torch.equal(sample(logits, rows, params, features), expected)


def test_greedy_rows_take_the_lowest_of_equals() -> None:
    params, features = tables(dict(temperature=0.0))
    logits = torch.randint(0, 3, (3, VOCAB)).float()
    logits[2, :] = 1.0
    found = sample(logits, rows_of(3, 1), params, features)
    assert torch.equal(found, logits.argmax(dim=1)) and found[2] == 0


@pytest.mark.parametrize("noise", [False, True])
def test_penalties_bias_and_ends(noise: bool) -> None:
    torch.manual_seed(6)
    drawn = 0.8 if noise else 0.0
    kinds = (
        dict(repetition_penalty=2.5, presence_penalty=1.4, frequency_penalty=0.6),
        dict(logit_bias={3: 30.0, 8: 29.0, 2499: 28.0}, min_tokens=20),
        dict(frequency_penalty=-2.0, logit_bias={7: -100.0}),
        dict(repetition_penalty=0.5, min_tokens=3),
        dict(),
    )
    params, features = tables(*(dict(temperature=drawn, **kind) for kind in kinds), stop=(3, 7))
    rows = rows_of(25, len(kinds))
    # Few tokens compete, so that every stage decides some row.
    logits = torch.randn(25, VOCAB)
    logits[:, :9] += 4
    expected = sample_rows(logits, rows, params, features)
    assert torch.equal(sample(logits, rows, params, features), expected)
    plain = sample_rows(logits, rows, *tables(*(dict(temperature=drawn) for _ in kinds)))
    changed = (plain != expected).view(5, 5).any(dim=0)
    assert changed[:4].all() and not changed[4]


def test_penalised_logits_are_equal_to_the_bit() -> None:
    kind = dict(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7)
    params, features = tables(kind, dict(temperature=0.0, presence_penalty=1.1))
    rows = rows_of(6, 2)
    logits = torch.randn(6, VOCAB)
    expected = adjust(logits, rows, params, features)
    Adjuster(logits.device)(logits, adjustments_of(rows, params, features))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("tile", [192, 2496])
def test_what_the_product_told_is_not_looked_for_again(noise: bool, tile: int) -> None:
    """Rows whose logits nobody reads hold NaN here, and the largest of others that nothing changes
    are not those of what is in their logits: whoever looks again finds another token."""
    torch.manual_seed(9)
    penalty = dict(repetition_penalty=2.5, presence_penalty=1.4)
    kinds: list[dict[str, Any]] = [dict(temperature=0.0), dict(temperature=0.0, **penalty)]
    kinds += [dict(temperature=0.0, logprobs=2), dict(temperature=0.0, logit_bias={7: 40.0})]
    if noise:
        kinds += [*KINDS[1:], dict(temperature=0.8, **penalty), dict(temperature=0.8, top_k=5)]
    params, features = tables(*kinds)
    rows = rows_of(3 * len(kinds), len(kinds))
    logits = torch.randn(len(rows.slots), VOCAB)
    logits[:, :9] += 4
    logits = 8 * (logits / 8).round() if tile == 192 else logits
    expected = sample_rows(logits, rows, params, features)
    tiles = [part.max(dim=1) for part in logits.split(tile, dim=1)]
    first = tile * torch.arange(len(tiles))
    values = torch.stack([part.values for part in tiles], dim=1)
    columns = (first + torch.stack([part.indices for part in tiles], dim=1)).int()
    use = params.use[rows.slots]
    assert set(use.tolist()) == {UNREAD, READ, CHANGED}
    told = Maxima(values.contiguous(), columns.contiguous())
    given = logits.clone()
    given[use == UNREAD] = torch.nan
    likeliest = (use == READ) & (params.temperature[rows.slots] == 0)
    given[likeliest, 2000] = 100.0
    Adjuster(given.device)(given, adjustments_of(rows, params, features))
    assert torch.equal(draw(given, draws_of(rows, params, noise, told)), expected)
    masked = params.use.clone()
    masked[0] = CHANGED
    given[rows.slots == 0] = 0.0
    given[rows.slots == 0, 77] = 1.0
    draws = replace(draws_of(rows, params, noise, told), use=masked)
    found = draw(given, draws)
    assert (found[rows.slots == 0] == 77).all(), "of masked logits the largest is not known"
    assert torch.equal(found[rows.slots > 0], expected[rows.slots > 0])


# --- filters ------------------------------------------------------------------------------------

FILTERS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.7, top_k=40),
    dict(temperature=1.0, top_k=1),
    dict(temperature=1.0, top_k=300),
    dict(temperature=1.0, top_k=2000),
    dict(temperature=1.0, top_k=VOCAB - 1),
    dict(temperature=0.5, top_p=0.9),
    dict(temperature=1.3, top_p=0.9),
    dict(temperature=5.0, top_p=0.97),
    dict(temperature=1e-3, top_p=0.3),
    dict(temperature=1.0, top_p=1e-6),
    dict(temperature=1.0, top_p=0.95, min_p=0.01),
    dict(temperature=0.6, top_k=20, top_p=0.95),
    dict(temperature=2.0, top_k=100, top_p=0.5, min_p=0.001),
    dict(temperature=5.0, top_k=1500, top_p=0.99, min_p=0.02),
    dict(temperature=5.0, top_k=VOCAB - 1, top_p=0.99999),
)


@jit
def limit_kernel(
    scores_ptr, width, min_p_ptr, top_k_ptr, top_p_ptr, limit_ptr, SIZE: tl.constexpr
):  # fmt: skip
    row, index = tl.program_id(0), tl.arange(0, SIZE)
    inside = index < width
    scores = tl.load(scores_ptr + row * width + index, mask=inside, other=float("-inf"))
    floor = tl.log(tl.load(min_p_ptr + row))
    limit = limit_of(
        depth_of(scores), scores, inside, floor, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row),
        SIZE,
    )  # fmt: skip
    tl.store(limit_ptr + row, limit)


@pytest.mark.parametrize("size", [64, 4096])
@pytest.mark.parametrize("ties", [False, True])
def test_borders_are_those_of_sorting(ties: bool, size: int) -> None:
    """Whichever way they are looked for."""
    torch.manual_seed(7)
    kinds = [kind for kind in (*KINDS[2:], *FILTERS) if "top_k" in kind or "top_p" in kind]
    params, features = tables(*kinds)
    count, width = len(kinds), min(VOCAB, size - 14)
    logits = 2 * torch.randn(count, width)
    logits = logits.round() if ties else logits
    logits[:, 1900:2100] = float("-inf")
    slots = torch.arange(count)
    everything = filtered_scores(logits, slots, params, SamplingStages())
    limits = torch.zeros(count, dtype=torch.int32)
    limit_kernel[(count,)](
        everything, width, params.min_p, params.top_k, params.top_p, limits, size
    )
    kept = everything.view(torch.int32).bitwise_and(0x7FFFFFFF) <= limits.unsqueeze(1)
    kept &= everything >= params.min_p.log().unsqueeze(1)
    expected = filtered_scores(logits, slots, params, features) > float("-inf")
    for row in range(count):
        differs = (kept[row] != expected[row]) & (everything[row] > float("-inf"))
        # Only where the cumulated mass meets top_p up to rounding may a border move.
        values = everything[row].masked_fill(~(kept[row] | expected[row]), float("-inf"))
        ordered = values.double().sort(descending=True)
        mass = torch.softmax(ordered.values, 0)
        before = torch.empty_like(mass).scatter_(0, ordered.indices, mass.cumsum(0) - mass)
        distance = (before[differs] - params.top_p[row].double()).abs()
        assert (distance < 1e-5).all(), f"row {row}: {kinds[row]}"
        assert differs.sum() <= 2 or ties


@pytest.mark.parametrize("shape", ["peaked", "flat", "equals", "few", "alone"])
def test_what_filters_keep_is_drawn(shape: str) -> None:
    """Each filter's row many times over, drawn at other positions."""
    torch.manual_seed(7)
    params, features = tables(*FILTERS)
    logits = (4 if shape == "peaked" else 1) * torch.randn(len(FILTERS), VOCAB)
    if shape == "equals":
        logits = logits.round()
    if shape in ("few", "alone"):
        # All others are forbidden, by a grammar, say.
        logits[:, 9 if shape == "few" else 1 :] = float("-inf")
    logits[:, 1900:2100] = float("-inf")
    times = 12
    rows = rows_of(times * len(FILTERS), len(FILTERS))
    logits = logits.repeat(times, 1)
    found = sample(logits, rows, params, features)
    expected = sample_rows(logits, rows, params, features)
    everything = filtered_scores(logits, rows.slots, params, SamplingStages())
    for row in (found != expected).nonzero().flatten().tolist():
        # Only where the cumulated mass meets top_p up to rounding may a border move.
        one = dict(FILTERS[int(rows.slots[row])])
        wanted = one.pop("top_p")
        params_of_one, features_of_one = tables(one)
        before = filtered_scores(
            logits[row : row + 1], torch.zeros(1, dtype=torch.int64), params_of_one, features_of_one
        )[0]
        mass = torch.softmax(before.double(), 0)
        least = min(everything[row, found[row]], everything[row, expected[row]])
        assert abs(mass[everything[row] > least].sum() - wanted) < 1e-5, one


def test_rows_that_hold_no_numbers_end() -> None:
    """Such a model's text is nobody's; but others are in the same round."""
    torch.manual_seed(8)
    params, features = tables(*FILTERS)
    rows = rows_of(2 * len(FILTERS), len(FILTERS))
    logits = 2 * torch.randn(len(rows.slots), VOCAB)
    expected = sample(logits, rows, params, features)
    logits[len(FILTERS) :, 5:] = torch.nan
    found = sample(logits, rows, params, features)
    assert torch.equal(found[: len(FILTERS)], expected[: len(FILTERS)])
    assert ((found >= 0) & (found < VOCAB)).all()


@pytest.mark.parametrize("room", [1, 8, 64])
def test_rows_with_more_candidates_than_fit_draw_the_same(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(8)
    params, features = tables(*FILTERS)
    rows = rows_of(4 * len(FILTERS), len(FILTERS))
    logits = 2 * torch.randn(len(rows.slots), VOCAB)
    expected = sample(logits, rows, params, features)
    monkeypatch.setattr(sampling, "ROOM", room)
    monkeypatch.setattr(sampling, "FEW", min(sampling.FEW, room))
    assert torch.equal(sample(logits, rows, params, features), expected)


def test_a_table_that_was_outgrown_is_kept() -> None:
    """Recorded rounds go on with the memory that they were recorded with."""
    adjuster = Adjuster(DEVICE)
    first = weakref.ref(adjuster._table(3, VOCAB))
    places = {rows: adjuster._table(rows, VOCAB).data_ptr() for rows in (3, 4, 2, 5, 40, 33)}
    gc.collect()
    assert first() is not None
    assert places[3] == places[4] == places[2] and places[40] == places[33]
    assert len({places[3], places[5], places[40]}) == 3


@pytest.mark.parametrize("width", [0, 1, 5, 50])
@pytest.mark.parametrize("vocab", [50, 4096, 9000])
def test_logprobs_are_the_twin_s(vocab: int, width: int) -> None:
    generator = torch.Generator().manual_seed(vocab + width)
    logits = 4 * torch.randn(5, vocab, generator=generator)
    logits[1, : vocab // 2] -= 1e4  # no part of a sum
    logits[2, 7:19] = 30.0  # equals, the best of all
    tokens = torch.randint(vocab // 2, vocab, (5,), generator=generator)
    logits, tokens = logits.to(DEVICE), tokens.to(DEVICE)
    found, expected = (
        kernel(logits, tokens, width).cpu() for kernel in (row_logprobs, row_logprobs_reference)
    )
    assert found.shape == expected.shape
    floats, ids = [0, *range(2 + width, 2 + 2 * width)], [1, *range(2, 2 + width)]
    torch.testing.assert_close(
        found[:, floats].view(torch.float32), expected[:, floats].view(torch.float32)
    )
    for row in (0, 1, 3, 4):
        assert torch.equal(found[row, ids], expected[row, ids])
    # Of equals the first; torch promises no order.
    assert found[2, 2 : 2 + min(width, 12)].tolist() == list(range(7, 19))[:width]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_logprobs_of_spans_are_those_of_their_rows(steps: bool, few: bool) -> None:
    """Of chains and of accepted paths; a span that has fewer rows ends with others'."""
    torch.manual_seed(4)
    logits, tokens = 3 * torch.randn(12, 5000), torch.randint(0, 5000, (12,))
    if few:
        logits[[4, 7]] = torch.nan
    first, places = torch.tensor([0, 5, 6, 9]), torch.tensor([3, 1] if few else [3, 1, 0])
    behind = torch.tensor([[0, 2, 4], [0, 3, 0], [0, 1, 2], [0, 2, 1]])
    behind = torch.cat([behind, behind + 1], dim=1)[:, :3]  # strided
    rows = [[9, 11, 10], [5, 8, 5], [0, 2, 4]] if steps else [[9, 10, 11], [5, 6, 7], [0, 1, 2]]
    spans = ScoredSpans(first, places, 3, behind if steps else None)
    if not steps:
        spans = replace(spans, count=4)
        rows = [[9, 10, 11, 11], [5, 6, 7, 8], [0, 1, 2, 3]]
    index = torch.tensor(rows[: len(places)]).flatten()
    assert torch.equal(spans.rows(12), index)
    found = TritonBackend(DEVICE, torch.float32).span_logprobs(logits, tokens, spans, 4)
    expected = row_logprobs(logits[index], tokens[index], 4)
    torch_one = TorchBackend("cpu", torch.float32).span_logprobs(logits, tokens, spans, 4)
    sane = ~logits[index].isnan().any(dim=1)
    assert torch.equal(found[sane], expected[sane]) and sane.sum() >= 5
    assert torch.equal(torch_one[sane][:, 1:6], expected[sane][:, 1:6])


@pytest.mark.parametrize("vocab", [1, 33, 5000])
def test_masks_are_the_twin_s(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(7, vocab, generator=generator).to(DEVICE)
    shape = 4 * 2, -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    # The second span has no rows, the last one more than masks.
    slots, first, masked = (
        torch.tensor(values, device=DEVICE)
        for values in ([3, 0, 0, 1, 1, 1, 1], [0, 1, 1, 3], [0, 1, 1, 1])
    )
    bits = bits.to(torch.int32)
    if logits.is_cuda:
        # The host goes on writing there.
        bits = bits.cpu().pin_memory()
    masks = TokenMasks(bits, 2, slots, first, masked)
    found, expected = logits.clone(), logits.clone()
    mask_tokens(found, masks)
    mask_tokens_reference(expected, masks)
    assert torch.equal(found, expected)
    assert torch.equal(found[1], logits[1]) and not torch.equal(found[0], logits[0])
