"""The compiled operations of drafting against their torch twins and plain formulas."""

from __future__ import annotations

import pytest
import torch

from live_inputs import LENGTH, live_inputs
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.drafter_parts import EntryWeights, LiveRows
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.quant import QuantTensor

pytestmark = pytest.mark.skipif(
    native_unavailable() is not None, reason=f"native kernels: {native_unavailable()}"
)
WIDTH = 96
THREADS = pytest.mark.parametrize("threads", [1, 3])


def backend_of(threads: int = 2) -> NativeBackend:
    return NativeBackend(torch.float32, threads=threads)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_live_rows(steps: int) -> None:
    slots, before, history, length, tables, scratch = live_inputs(steps, WIDTH)
    native = backend_of().drafting
    for behind, features in ((0, None), (1, before)):
        rest = slots, features, history, length, tables, scratch, steps, behind, 20
        found, expected = native.live_rows(*rest), Drafting.live_rows(native, *rest)
        for name in ("tokens", "keys", "positions", "tables"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        if features is not None:
            assert found.features is not None
            assert torch.equal(found.features, before[slots])


def test_block_rows() -> None:
    torch.manual_seed(3)
    keys = torch.randint(0, LENGTH, (6, 3))
    tables = torch.zeros((3, 2), dtype=torch.int32)
    live = LiveRows(torch.randint(0, 30, (3,)), None, keys, keys + 100, tables)
    native = backend_of().drafting
    for rows in (1, 3, 5):
        found, expected = (
            native.block_rows(live, rows, 29),
            Drafting.block_rows(native, live, rows, 29),
        )
        for name, tensor in expected._asdict().items():
            assert torch.equal(getattr(found, name), tensor), name


def test_rows_are_kept() -> None:
    """Of spans that settled several rows, one, or none, behind those that are there."""
    torch.manual_seed(4)
    native, features = backend_of().drafting, torch.randn(9, WIDTH)
    tokens, keys, owners = torch.randint(0, 99, (3, 9))
    tables, starts = torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    batch = FlatBatch(tokens, keys, keys, owners, tables, starts, max_keys=1)
    slots, settled = torch.tensor([4, 1, 6]), (torch.tensor([5, 0, 3]), torch.tensor([3, 0, 1]))
    for at, most, end in ((0, 9, 4), (3, 9, 7), (4, 4, 8), (5, 9, -1), (0, 3, -1)):
        found, expected = (
            (torch.zeros(8, WIDTH), torch.zeros((3, 8), dtype=torch.int64)) for _ in range(2)
        )
        assert native.keep_rows(features, batch, slots, settled, *found, at, most) == end
        assert (
            Drafting.keep_rows(native, features, batch, slots, settled, *expected, at, most) == end
        )
        assert all(map(torch.equal, found, expected))
        if end > 0:
            rows = torch.tensor([5, 6, 7, 3])
            assert torch.equal(found[0][at:end], features[rows])
            kept = torch.stack((batch.tokens[rows], batch.key_index[rows]))
            assert torch.equal(found[1][:2, at:end], kept)
            assert found[1][2, at:end].tolist() == [4, 4, 4, 6]


def test_entry_inputs() -> None:
    torch.manual_seed(1)
    backend = backend_of()
    rows, norms = torch.randn(30, WIDTH), [1 + torch.randn(WIDTH) / 5 for _ in range(2)]
    weights = EntryWeights(backend.pack_embedding(rows)[0], norms[0], norms[1], 1e-5)
    tokens, features = torch.randint(0, 30, (7, 3))[:, 1], torch.randn(7, WIDTH)
    found = backend.drafting.entry_inputs(weights, tokens, features)
    halves = [
        torch.nn.functional.rms_norm(x.double(), (WIDTH,), norm.double(), 1e-5)
        for x, norm in ((rows[tokens], norms[0]), (features, norms[1]))
    ]
    torch.testing.assert_close(found.double(), torch.cat(halves, dim=1), rtol=1e-5, atol=1e-6)
    assert torch.equal(backend.rms_norm(features, norms[1], 1e-5), found[:, WIDTH:])
    with pytest.raises(IndexError, match="vocabulary of 30"):
        backend.drafting.entry_inputs(weights, tokens + 30, features)


@pytest.mark.parametrize("width", [7, 48, 5000])
def test_likeliest(width: int) -> None:
    torch.manual_seed(width)
    logits = torch.randn(5, width) * 4
    logits[1, 5] = logits[1, 3] = 20.0
    logits[2, :] = float("-inf")
    logits[2, width - 1] = -3.0
    ids = torch.randperm(width * 2)[:width]
    for mapped in (None, ids):
        tokens, chances = torch.zeros((5, 3), dtype=torch.int64), torch.zeros((5, 3))
        backend_of().drafting.likeliest(logits, mapped, tokens[:, 1], chances[:, 1])
        best = logits.argmax(dim=1)
        assert torch.equal(tokens[:, 1], best if mapped is None else ids[best])
        expected = logits.double().softmax(dim=1).amax(dim=1)
        torch.testing.assert_close(chances[:, 1].double(), expected, rtol=1e-5, atol=1e-7)
        assert not tokens[:, (0, 2)].any() and not chances[:, (0, 2)].any()


@THREADS
@pytest.mark.parametrize("width", [3, 700])
@pytest.mark.parametrize("packed", [False, True])
def test_a_markov_chain(width: int, packed: bool, threads: int) -> None:
    """As a loop of one operation after another, whatever the number of threads; the first of
    equals where a token's row adds nothing."""
    torch.manual_seed(width)
    backend = backend_of(threads)
    embedding, projection = torch.randn(1000, 64), torch.randn(width, 64)
    embedding[4] = 0
    kinds = [QuantTensor.of(each) if packed else each for each in (embedding, projection)]
    before, after = backend.pack_embedding(kinds[0])[0], backend.pack_linear([kinds[1]])
    ids = torch.randperm(1000)[:width]
    current = torch.tensor([7, 4, 999])
    logits = torch.randn(4, 3, width) * 8
    logits[0, 1] = 1.0
    for mapped in (None, ids):
        tokens = torch.empty(4, 3, dtype=torch.int64)
        chances = torch.empty(4, 3)
        again, other = torch.empty_like(tokens), torch.empty_like(chances)
        rest = before, after, current, mapped
        backend.drafting.markov(logits.clone(), *rest, tokens, chances)
        Drafting.markov(backend.drafting, logits.clone(), *rest, again, other)
        assert torch.equal(tokens, again)
        torch.testing.assert_close(chances, other)
        assert tokens[0, 1] == (0 if mapped is None else ids[0])
        backend.drafting.markov(logits.clone(), *rest, again, None)
        assert torch.equal(tokens, again)
    with pytest.raises(IndexError, match="vocabulary of 1000"):
        backend.drafting.markov(logits, before, after, current + 1, None, tokens, None)
