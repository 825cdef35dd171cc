"""The Triton kernels of drafting against their torch twins, run by Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from live_inputs import BLOCK, BLOCKS, LENGTH, SLOTS, live_inputs
from surefoot.bench.synthetic import ALWAYS, conditional_thresholds, tokens_at
from surefoot.kernels.backend import AttentionShape, RopeTable
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.drafter_parts import ContextWeights, EntryWeights, FeatureWeights, LiveRows
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import markov
from surefoot.kernels.triton.acceptance import tokens_at as kernel
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.drafting import TritonDrafting
from surefoot.kernels.triton.products import TritonLinear
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, draws_of, sample_rows
from triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)
WIDTH = 40
BACKEND = TorchBackend(DEVICE, torch.float32)
TORCH, TRITON = BACKEND.drafting, TritonDrafting(BACKEND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entry_inputs(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    table = torch.randn(30, WIDTH).to(dtype)
    norms = [(1 + torch.randn(WIDTH) / 5).to(dtype) for _ in range(2)]
    weights = EntryWeights(table, norms[0], norms[1], 1e-5)
    tokens = torch.randint(0, 30, (7, 3))[:, 1]
    features = torch.randn(7, WIDTH).to(dtype)
    found = TRITON.entry_inputs(weights, tokens, features)
    halves = [
        torch.nn.functional.rms_norm(x.double(), (WIDTH,), norm.double(), 1e-5)
        for x, norm in ((table[tokens], norms[0]), (features, norms[1]))
    ]
    close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.double(), torch.cat(halves, dim=1), **close)


def spans(counts: list[int], padding: int) -> tuple[FlatBatch, torch.Tensor, torch.Tensor]:
    """A batch of spans with so many rows each (0: unused, on a slot that another span has), with
    padding behind; the slots and the first rows."""
    order = torch.randperm(SLOTS - 1)[: len(counts)]
    order = torch.where(torch.tensor(counts) > 0, order, order[0])
    first = torch.tensor([sum(counts[:i]) for i in range(len(counts))])
    start = torch.randint(0, LENGTH - 12, (SLOTS,))
    keys = [start[slot] + i for slot, n in zip(order, counts, strict=True) for i in range(n)]
    owner = [slot for slot, n in zip(order, counts, strict=True) for _ in range(n)]
    # The last one of a block: nothing may be kept of it.
    key = torch.stack(keys + [torch.tensor(BLOCK - 1)] * padding)
    slot = torch.stack(owner + [torch.tensor(-1)] * padding)
    tables = (1 + torch.randperm(BLOCKS - 1)[: SLOTS * 9].view(SLOTS, 9)).int()
    tables = torch.cat((tables, tables[:, :4] * 0), dim=1)
    return FlatBatch(key, key, key, slot, tables, start, LENGTH), order, first


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_shift_features(seed: int, masked: bool) -> None:
    torch.manual_seed(seed)
    counts = [[1, 5, 0, 3], [4], [0, 2, 9, 1, 0], [3, 3]][seed]
    batch, slots, first = spans(counts, padding=seed)
    settled = torch.tensor([min(n, 1 + (i + seed) % 4) if n else 0 for i, n in enumerate(counts)])
    features = torch.randn(len(batch.tokens), WIDTH)
    before, ends = torch.randn(SLOTS, WIDTH), torch.randn(BLOCKS, WIDTH)
    at = counts.index(max(counts))
    row, slot, count = int(first[at]), int(slots[at]), int(settled[at])
    served = torch.ones(SLOTS, dtype=torch.bool)
    if masked:
        served = torch.rand(SLOTS) < 0.5
        served[slot] = True
    valid = (batch.row_slot >= 0) & served[batch.row_slot.clamp(min=0)]
    results = []
    for module in (TORCH, TRITON):
        own = before.clone(), ends.clone()
        shifted, positions, row_slot = module.shift_features(
            features, *own, slots, first, settled, batch, BLOCK, 30, served if masked else None
        )
        assert torch.equal(row_slot, torch.where(valid, batch.row_slot, -1))
        results.append((shifted[valid], positions[valid], own[0][served], own[1][1:]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    # And by hand, for one span; nothing is kept of rows that are not served.
    place = int(valid[:row].sum())
    assert torch.equal(results[1][0][place], before[slot])
    assert torch.equal(results[1][0][place + 1], features[row])
    assert torch.equal(own[0][slot], features[row + count - 1])
    last = valid & (batch.key_index % BLOCK == BLOCK - 1)
    blocks = batch.block_tables[batch.row_slot, batch.key_index // BLOCK][last]
    untouched = torch.ones(BLOCKS, dtype=torch.bool).index_fill(0, blocks.long(), False)
    assert torch.equal(own[1][untouched][1:], ends[untouched][1:])


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_live_rows(steps: int) -> None:
    slots, before, history, length, tables, scratch = live_inputs(steps, WIDTH)
    size = scratch.blocks
    for behind in (0, 1):
        rest = history, length, tables, scratch, steps, behind, 20
        bare = [module.live_rows(slots, None, *rest) for module in (TORCH, TRITON)]
        assert bare[0].features is None and bare[1].features is None
        assert torch.equal(bare[0].positions, bare[1].positions)
    found, expected = (m.live_rows(slots, before, *rest) for m in (TRITON, TORCH))
    for name in ("tokens", "features", "keys", "positions", "tables"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for row, slot in enumerate(slots.tolist()):
        for key in range(max(1, int(length[slot]) - 1), int(length[slot]) - 1 + steps):
            block = int(found.tables[row, key // BLOCK])
            settled = max(0, int(length[slot]) - 2) // BLOCK
            own = key // BLOCK <= settled
            mine = range(BLOCKS + slot * size, BLOCKS + (slot + 1) * size)
            assert block == tables[slot, key // BLOCK] if own else block in mine


def test_block_rows() -> None:
    torch.manual_seed(3)
    keys = torch.randint(0, LENGTH, (6, 3))
    tables = torch.zeros((3, 2), dtype=torch.int32)
    live = LiveRows(torch.randint(0, 30, (3,)), None, keys, keys + 100, tables)
    for rows in (1, 3, 5):
        found, expected = (each.block_rows(live, rows, 29) for each in (TRITON, TORCH))
        for name, tensor in expected._asdict().items():
            assert torch.equal(getattr(found, name), tensor), name
        assert expected.tokens.view(3, rows)[:, 0].tolist() == live.tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_write_features(normed: bool, dtype: torch.dtype) -> None:
    """Rows of padding and of slots that are not served write nothing; positions end early."""
    torch.manual_seed(6)
    layers, rows, inputs, hidden = 3, 7, 24, 16
    shape = AttentionShape(4, 2, 8, 1.0)
    backend = TritonBackend(DEVICE, dtype)
    norms = [torch.randn(8).to(dtype) if normed else None for _ in range(layers)]
    context = ContextWeights(
        backend.pack_linear([torch.randn(2 * 8, hidden) for _ in range(2 * layers)]),
        norms, 1e-3, shape,
    )  # fmt: skip
    weights = FeatureWeights(
        backend.pack_linear([torch.randn(hidden, inputs)]), torch.randn(hidden).to(dtype), context
    )
    one = torch.zeros(rows, dtype=torch.int64)
    batch = FlatBatch(
        tokens=one,
        positions=one,
        key_index=torch.tensor([3, 4, 5, 9, 0, 0, 1]),
        row_slot=torch.tensor([1, 1, 1, 0, -1, 2, 2]),
        block_tables=torch.tensor([[3, 4, 5], [1, 6, 0], [2, 0, 0]], dtype=torch.int32),
        span_start=torch.zeros(3, dtype=torch.int64),
        max_keys=12,
    )
    angles = torch.randn(6, 4)
    rope = RopeTable(angles.cos(), angles.sin())
    features = torch.randn(rows, inputs).to(dtype)
    for served in (None, torch.tensor([True, True, False])):
        pools = [backend.allocate_kv(layers, 7, 4, shape) for _ in range(2)]
        parts = weights, features, batch, served, 4
        TritonDrafting(backend).write_features(*parts, pools[0], rope)
        Drafting.write_features(TritonDrafting(backend), *parts, pools[1], rope)
        for found, expected in zip(*pools, strict=True):
            assert torch.equal(found, expected) and expected.any()
        written = torch.stack(pools[0]).abs().sum(dim=(0, 1, 3, 5)) > 0
        assert written[:, [1, 2]].any() and written[2].any() == (served is None)


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolutions(taps: int) -> None:
    """Blocks do not see each other; coefficients may lie apart."""
    torch.manual_seed(4)
    y, base = torch.randn(3 * 5, WIDTH), torch.randn(taps, WIDTH)
    both = torch.randn(3 * 5, 2, taps, WIDTH // 8)
    for dynamic in both.unbind(1):
        found, expected = (each.convolve(y, base, dynamic, 5) for each in (TRITON, TORCH))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        alone = TORCH.convolve(y[5:10], base, dynamic[5:10], 5)
        torch.testing.assert_close(expected[5:10], alone)


@pytest.mark.parametrize("width", [7, 48, 5000])
def test_likeliest(width: int) -> None:
    torch.manual_seed(width)
    logits = torch.randn(5, width) * 4
    logits[1, 5] = logits[1, 3] = 20.0
    logits[2, :] = float("-inf")
    logits[2, width - 1] = -3.0
    ids = torch.randperm(width * 2)[:width]
    for mapped in (None, ids):
        tokens = torch.zeros((5, 3), dtype=torch.int64)
        chances = torch.zeros((5, 3))
        TRITON.likeliest(logits, mapped, tokens[:, 1], chances[:, 1])
        best = logits.argmax(dim=1)
        assert torch.equal(tokens[:, 1], best if mapped is None else ids[best])
        expected = logits.double().softmax(dim=1).amax(dim=1)
        torch.testing.assert_close(chances[:, 1].double(), expected, rtol=1e-5, atol=1e-7)
        assert not tokens[:, (0, 2)].any() and not chances[:, (0, 2)].any()
        again = torch.zeros((5, 3), dtype=torch.int64), torch.zeros((5, 3))
        TORCH.likeliest(logits, mapped, again[0][:, 1], again[1][:, 1])
        assert torch.equal(again[0], tokens)
        torch.testing.assert_close(again[1], chances, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns where -inf is meant.
@pytest.mark.parametrize("mapped", [False, True])
def test_draws_are_the_sampler_s(mapped: bool) -> None:
    """Of the same request from the same logits, spread over the target's vocabulary."""
    torch.manual_seed(7 + mapped)
    vocab, width = 3000, 2300 if mapped else 3000
    params = SlotParams(6, vocab, DEVICE)
    for slot, values in enumerate(
        (
            dict(temperature=0),
            dict(temperature=1.0),
            dict(temperature=0.7, top_k=20),
            dict(temperature=0.9, top_p=0.6, min_p=0.01),
            dict(temperature=2.0),
        )
    ):
        request = Request(
            f"{slot}",
            (1,),
            SamplingParams(**values),
            SpeculationParams(),
            5 + 2**33 * slot,
            90,
            slot=slot,
        )
        params.write([request])
    slots, positions = torch.tensor([3, 0, 1, 4, 2]), torch.tensor([11, 7, 30, 8, 9])
    ids = torch.randperm(vocab)[:width].sort().values if mapped else None
    logits = torch.randn(5, width) * 3
    wide = logits
    if ids is not None:
        wide = torch.full((5, vocab), float("-inf"))
        wide[:, ids] = logits
    history = torch.zeros((6, LENGTH), dtype=torch.int64)
    rows = SampleRows(slots, positions, history, LENGTH)
    features = SamplingStages(noise=True, min_p=True, top_k=vocab, top_p=True)
    expected = sample_rows(wide, rows, params, features)
    tokens, chances = torch.zeros((5, 2), dtype=torch.int64), torch.zeros((5, 2))
    draws = draws_of(rows, params)
    assert TRITON.draw(logits, ids, draws, history, tokens[:, 1], chances[:, 1])
    assert torch.equal(tokens[:, 1], expected)
    assert torch.equal(history[slots, positions], expected)
    assert history.count_nonzero() <= 5
    temperature = params.temperature[slots].unsqueeze(1)
    scaled = wide / torch.where(temperature > 0, temperature, 1.0)
    chance = scaled.softmax(dim=1).gather(1, expected.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chances[:, 1], chance, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns where -inf is meant.
@pytest.mark.parametrize(
    "values",
    [dict(top_p=0.8), dict(top_k=6), dict(min_p=0.1), dict(top_k=40, top_p=0.5, min_p=0.02)],
    ids=str,
)
def test_drawn_drafts_are_filtered(values: dict[str, Any]) -> None:
    """As the sampler does it, but for a few; without filters many would be others. The
    likely tokens are neighbours, and a part of the vocabulary is ruled out."""
    torch.manual_seed(5)
    count, vocab = 64, 4600
    params = SlotParams(count, vocab, DEVICE)
    made = SamplingParams(temperature=0.9, **values)
    params.write(
        [
            Request(f"{slot}", (1,), made, SpeculationParams(), 977 * slot, 90, slot=slot)
            for slot in range(count)
        ]
    )
    logits = 2 * torch.randn(count, vocab) - 2 * torch.log1p(torch.arange(vocab) / 8.0)
    logits[:, 2048:4096] = float("-inf")
    slots, positions = torch.arange(count), torch.arange(count) % LENGTH
    history = torch.zeros((count, LENGTH), dtype=torch.int64)
    rows = SampleRows(slots, positions, history, LENGTH)
    features = SamplingStages(noise=True, min_p=True, top_k=vocab, top_p=True)
    expected = sample_rows(logits, rows, params, features)
    unfiltered = sample_rows(logits, rows, params, SamplingStages(noise=True))
    tokens, chances = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    assert TRITON.draw(logits, None, draws_of(rows, params), history, tokens, chances)
    assert (unfiltered == expected).double().mean() < 0.9
    assert (tokens == expected).double().mean() >= 0.95
    chance = (logits / 0.9).softmax(dim=1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chances, chance, rtol=1e-4, atol=1e-7)


def test_synthetic_acceptance() -> None:
    torch.manual_seed(3)
    vocab = 50
    state: Any = SimpleNamespace(
        device=torch.device(DEVICE), max_drafts=3, vocab_size=vocab,
        params=SimpleNamespace(seed=torch.tensor([0, 1, 2, 7, 2**62, 5])),
    )  # fmt: skip
    thresholds = conditional_thresholds([0.8, 0.5, 0.1], state)[:4]
    slots = torch.arange(SLOTS).repeat_interleave(70)
    first = torch.randint(0, 5000, slots.shape)
    expected = tokens_at(state, slots, first, thresholds)
    found = kernel(
        slots.to(DEVICE), first.to(DEVICE), state.params.seed.to(DEVICE), thresholds.to(DEVICE),
        vocab,
    )  # fmt: skip
    assert torch.equal(found.cpu(), expected.cpu())
    text = tokens_at(state, slots, first, torch.full((4,), ALWAYS))
    right = (expected == text).double().mean(dim=0)
    torch.testing.assert_close(
        right, torch.tensor([0.8, 0.625, 0.2, 0.0]).double(), atol=0.07, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("requests", "most_rank"), [(1, 16), (5, 16), (70, 128), (70, 16)])
@pytest.mark.parametrize("mapped", [False, True])
def test_markov_chains(
    requests: int, most_rank: int, mapped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank and logits that fill no tile, and a part of the vocabulary is ruled out."""
    monkeypatch.setattr(markov, "MOST_RANK", most_rank)
    drafting = TritonDrafting(TritonBackend(DEVICE, dtype))
    torch.manual_seed(requests + mapped)
    steps, width, rank, vocab = 3, 300, 20, 310 if mapped else 300
    ids = torch.randperm(vocab)[:width] if mapped else None
    before, weight = torch.randn(vocab, rank).to(dtype), torch.randn(width, rank).to(dtype)
    after = TritonLinear(weight, None)
    logits = torch.randint(-3, 4, (steps, requests, width)).float() * 8
    logits[:, :, 128:256] = float("-inf")
    first = current = torch.randint(0, vocab, (requests,))
    tokens = torch.zeros((steps, requests), dtype=torch.int64)
    chances = torch.zeros((steps, requests))
    drafting.markov(logits.clone(), before, after, first, ids, tokens, chances)
    for step in range(steps):
        sums = logits[step].double() + before[current].double() @ weight.double().T
        found = drafting.add_looked_up(logits[step].clone(), after, before, current)
        torch.testing.assert_close(found.double(), sums, rtol=1e-5, atol=1e-4)
        best = sums.argmax(dim=1)
        current = best if ids is None else ids[best]
        assert torch.equal(tokens[step], current)
        expected = sums.softmax(dim=1).amax(dim=1)
        torch.testing.assert_close(chances[step].double(), expected, rtol=1e-3, atol=1e-6)
    drafting.markov(logits.clone(), before, after, first, ids, again := tokens.clone(), None)
    assert torch.equal(again, tokens)
