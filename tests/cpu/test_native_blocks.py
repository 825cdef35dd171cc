"""Blocks that are drafted at once, and features written at once, against the operations that they
are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dflash_golden
from dflash_golden import Bench, open_aligned
from dflash_reference import Flags, random_checkpoint
from harness import needs_native, random_weights, tiny_config
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.quant import BLOCK, QuantTensor, dense
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.proposer import DraftRequest, Drafts
from surefoot.speculation.proposers.dflash import proposer
from surefoot.speculation.proposers.dflash.checkpoint import DFlashCheckpoint
from surefoot.speculation.proposers.dflash.config import Visibility
from surefoot.speculation.proposers.dflash.proposer import DFlashProposer

pytestmark = needs_native
DSPARK = Flags("dspark", "deepseek")
AT_ONCE: dict[str, tuple[Flags, dict[str, Any]]] = {
    "DSpark": (DSPARK, {}),
    "causal": (DSPARK, {"layers": (Visibility(True),) * 2}),
    "windows": (DSPARK, {"layers": (Visibility(True, 4), Visibility(False))}),
    "windows in both directions": (DSPARK, {"layers": (Visibility(False, 3), Visibility(True))}),
    "windows of the anchor": (DSPARK, {"layers": (Visibility(True, 3, True),) * 2}),
    "rows after the anchor's": (Flags("dspark", "speculators", anchor=False), {}),
    "own mask": (replace(DSPARK, own_mask=True), {}),
    "scaled embedding": (DSPARK, {"embedding_scale": 3.0}),
    "no confidence": (Flags("dspark", "specforge", confidence=False), {}),
    "confidence alone": (Flags("dspark", "specforge", confidence_with_markov=False), {}),
    "draft vocabulary": (Flags("dspark", "speculators", draft_vocab=20), {}),
}
OTHERWISE: dict[str, tuple[Flags, dict[str, Any]]] = {
    "gated": (Flags("dspark", "specforge", markov="gated"), {}),
    "rnn": (replace(DSPARK, markov="rnn"), {}),
    "scaled logits": (DSPARK, {"logit_scale": 0.5}),
    "capped logits": (DSPARK, {"logit_cap": 2.0}),
    "DFlash": (Flags(), {}),
    "DFlash 2": (Flags("dflash2"), {}),
}
SLOTS = torch.tensor([2, 0])


def bench_of(
    kind: tuple[Flags, dict[str, Any]],
    folder: Path,
    threads: int = 1,
    most_rows: int = 256,
    blocks: str | None = None,
) -> Bench:
    """Two requests' texts and keys, of different lengths. ``blocks``: of the matrices whose rows
    these fit."""
    (flags, changes), packed = kind, list[str]()
    random_checkpoint(folder, flags)
    embedding = random_weights(tiny_config())["model.embed_tokens.weight"]
    backend = NativeBackend(torch.float32, threads=threads)
    backend.serial_below = 0

    def changed(path: str) -> DFlashCheckpoint:
        checkpoint = open_aligned(path)
        tensors = dict(checkpoint.tensors)
        for name, tensor in checkpoint.tensors.items():
            if blocks and len(tensor.shape) == 2 and tensor.shape[1] % BLOCK == 0:
                tensors[name] = QuantTensor.of(dense(tensor), blocks)
                packed.append(name)
        config = replace(checkpoint.config, **changes)
        return replace(checkpoint, config=config, tensors=tensors)

    with (
        patch.object(proposer, "MOST_LOGIT_ROWS", most_rows),
        patch.object(dflash_golden, "open_aligned", changed),
    ):
        bench = Bench(folder, backend, {"model.embed_tokens.weight": embedding})
    assert bool(packed) == (blocks is not None)
    generator = torch.Generator().manual_seed(7)
    state = bench.state
    state.history.random_(3, 48, generator=generator)
    state.length[SLOTS] = torch.tensor([9, 14])
    state.block_tables[0] = torch.arange(state.block_tables.shape[1]).int() + 20
    for pool in bench.proposer.pools.kv:
        keys = pool.data.view(torch.float32)
        keys.copy_(torch.randn(keys.shape, generator=generator))
    return bench


def offers(drafter: DFlashProposer) -> tuple[Drafts, list[torch.Tensor]]:
    """And what the pools hold then."""
    before = [pool.data.clone() for pool in drafter.pools.kv]
    drafts = drafter.propose(SLOTS)
    after = [pool.data.clone() for pool in drafter.pools.kv]
    for pool, kept in zip(drafter.pools.kv, before, strict=True):
        pool.data.copy_(kept)
    return drafts, after


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("most_rows", [256, 3], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", [*AT_ONCE, "Q8_0", "Q4_1"])
def test_blocks_at_once(name: str, most_rows: int, threads: int, tmp_path: Path) -> None:
    """The same drafts and keys, to the bit; confidence but for the order of a sum."""
    kind, blocks = (AT_ONCE[name], None) if name in AT_ONCE else (AT_ONCE["DSpark"], name)
    bench = bench_of(kind, tmp_path, threads, most_rows, blocks)
    drafter = bench.proposer
    at_once = drafter.at_once
    assert at_once is not None
    for depth, most in ((0, 0), (1, 20), (2, 30)):
        drafter.expect(DraftRequest(longest=depth, max_keys=most))
        drafter.at_once = at_once
        found, keys = offers(drafter)
        drafter.at_once = None
        expected, others = offers(drafter)
        assert found.tokens.shape == (2, depth or drafter.longest)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.lengths, expected.lengths)
        torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(*pair) for pair in zip(keys, others, strict=True))


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_heads_are_not_drafted_at_once(name: str, tmp_path: Path) -> None:
    assert bench_of(OTHERWISE[name], tmp_path).proposer.at_once is None


def test_drawn_drafts_are_not_those_at_once(tmp_path: Path) -> None:
    """Noise and penalties are the picker's."""
    drafter = bench_of(AT_ONCE["DSpark"], tmp_path).proposer
    drafter.expect(DraftRequest())
    likeliest, _ = offers(drafter)
    drafter.state.params.temperature[SLOTS] = 50.0
    drafter.expect(DraftRequest(SamplingStages(noise=True)))
    drawn, _ = offers(drafter)
    assert not torch.equal(likeliest.tokens, drawn.tokens)


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    bench = bench_of(AT_ONCE["DSpark"], tmp_path)
    bench.state.history[2, 8] = 48
    bench.proposer.expect(DraftRequest())
    with pytest.raises(IndexError, match="vocabulary of 48"):
        bench.proposer.propose(SLOTS)


@pytest.mark.parametrize("threads", [1, 3])
def test_features_at_once(threads: int, tmp_path: Path) -> None:
    """To the bit; rows of padding and of those who are not served write nothing, and positions end
    where rotations do."""
    bench = bench_of(AT_ONCE["DSpark"], tmp_path, threads)
    network, pools = bench.network, bench.proposer.pools
    drafting = network.backend.drafting
    keys, slots = torch.tensor([9, 10, 14, 15, 3, 0]), torch.tensor([2, 2, 0, 0, 1, -1])
    batch = FlatBatch(keys, keys, keys, slots, bench.state.block_tables, keys, 100)
    features = torch.randn(6, network.features.fuse.shape[1])
    clean = [pool.data.clone() for pool in pools.kv]
    for served in (None, torch.tensor([True, False, True])):
        written = []
        for write in (Drafting.write_features, type(drafting).write_features):
            for pool, kept in zip(pools.kv, clean, strict=True):
                pool.data.copy_(kept)
            write(drafting, network.features, features, batch, served, 12, pools.kv, network.rope)
            written.append([pool.data.clone() for pool in pools.kv])
        assert all(torch.equal(*pair) for pair in zip(*written, strict=True))
        changed = [(a != b).any().item() for a, b in zip(written[0], clean, strict=True)]
        assert all(changed)
        block = bench.state.block_tables[1, 0]
        untouched = pools.kv[0].data.view(-1, pools.bytes_per_block // network.layers)[block]
        assert torch.equal(
            untouched, clean[0].view(-1, pools.bytes_per_block // network.layers)[block]
        ) is (served is not None)


def test_features_of_settled_rows(tmp_path: Path) -> None:
    """Of one span, of two, and of none."""
    bench = bench_of(AT_ONCE["DSpark"], tmp_path)
    network, pools = bench.network, bench.proposer.pools
    keys, slots = torch.tensor([9, 10, 11, 14, 15, 16]), torch.tensor([2, 2, 2, 0, 0, 0])
    features = torch.randn(6, network.features.fuse.shape[1])
    clean = [pool.data.clone() for pool in pools.kv]
    for first, counts in (([0, 3], [2, 1]), ([0, 3], [0, 2]), ([0, 3], [0, 0]), ([3], [2])):
        index = [at + j for at, count in zip(first, counts, strict=True) for j in range(count)]
        written = []
        for rows, settled in (
            (range(6), (torch.tensor(first), torch.tensor(counts))),
            (index, None),
        ):
            for pool, kept in zip(pools.kv, clean, strict=True):
                pool.data.copy_(kept)
            here = torch.tensor(rows, dtype=torch.int64)
            batch = FlatBatch(
                keys[here], keys[here], keys[here], slots[here], bench.state.block_tables, keys, 100
            )
            network.write_context(features[here], batch, pools.kv, None, settled)
            written.append([pool.data.clone() for pool in pools.kv])
        assert all(torch.equal(*pair) for pair in zip(*written, strict=True))
        assert torch.equal(written[0][0], clean[0]) is (not index)
