"""What trees and networks that draft ask of the Triton kernels, against the torch twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.attention import torch_paged
from surefoot.kernels.backend import AcceptedPaths, AttentionShape, FlatBatch
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import attention
from surefoot.kernels.triton.attention import AttentionPlan
from surefoot.kernels.triton.backend import TritonBackend
from test_triton_kernels import attention_case, close_attention
from triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SHAPE = AttentionShape(4, 2, 16, 0.25)


def check(q: torch.Tensor, kv: torch.Tensor, batch: FlatBatch, plan: AttentionPlan | None) -> None:
    own = kv.transpose(2, 3).contiguous()
    found = attention.span_attention(q, own, batch, SHAPE, plan)
    close_attention(found[:-2], torch_paged.span_attention(q, kv, batch, SHAPE)[:-2])


@pytest.mark.parametrize(("splits", "first_key"), [(1, 0), (1, 1), (2, 1)])
def test_trees_beside_causal_chunks(splits: int, first_key: int) -> None:
    """A mask of -1 is causal however long the span is."""
    torch.manual_seed(splits)
    q, kv, batch = attention_case([(1, 70), (20, 9), (4, 1)], SHAPE, torch.float32, True)
    assert batch.mask is not None
    mask = torch.where(batch.row_slot == 1, batch.mask, -1)
    batch = replace(batch, mask=mask, first_key=first_key)
    tiles = -(-70 // 8) + 9 + 1
    check(q, kv, batch, AttentionPlan(16, 32, splits, 0, tiles, 4, 2))


def test_a_tree_that_grows_over_several_passes() -> None:
    """Rows see keys of the tree that earlier passes wrote, and none of their siblings'."""
    torch.manual_seed(5)
    q, kv, batch = attention_case([(40, 4), (33, 4)], SHAPE, torch.float32, True)
    # The tree began 8 and 12 keys before these rows.
    start = torch.tensor([32, 21])
    own = torch.ones_like(batch.key_index) << (batch.key_index - start[batch.row_slot])
    before = torch.randint(0, 255, own.shape)
    grown = replace(batch, span_start=start, mask=own | before)
    check(q, kv, grown, None)
    check(q, kv, replace(grown, all_masked=True), None)


def test_an_empty_first_key_is_seen_by_nobody() -> None:
    q, kv, batch = attention_case([(3, 5), (80, 1)], SHAPE, torch.float32, False)
    batch = replace(batch, first_key=1)
    check(q, kv, batch, None)
    loud = kv.clone()
    loud[:, batch.block_tables[:, 0].long(), 0] = 50.0
    own = loud.transpose(2, 3).contiguous()
    found = attention.span_attention(q, own, batch, SHAPE)
    close_attention(found[:-2], torch_paged.span_attention(q, kv, batch, SHAPE)[:-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("moves", "head_dim"), [(4, 16), (7, 24), (63, 8)])
def test_keys_move_as_on_torch(moves: int, head_dim: int, dtype: torch.dtype) -> None:
    """Of all layers at once. A place may be moved from and to; some requests move nothing."""
    torch.manual_seed(moves)
    pages = (moves + 20) // 4 + 1
    kvs = [torch.randn(2, 5 * pages + 1, 4, 3, head_dim).to(dtype) for _ in range(3)]
    before = [kv.clone() for kv in kvs]
    own = [kv.transpose(2, 3).contiguous() for kv in kvs]
    tables = (1 + torch.randperm(5 * pages)).view(5, pages).int()
    start, slots = torch.randint(0, 18, (5,)), torch.randperm(5)
    lengths = torch.tensor([moves // 2, 0, moves // 2, moves // 2, 0])
    rows = torch.randint(0, moves + 1, (5, moves + 1))
    for row in rows:
        row[1 : 1 + moves // 2] = torch.randperm(moves)[: moves // 2].sort().values + 1
    # Each key moves to where the next one was.
    rows[0, 1 : 1 + moves // 2] = torch.arange(2, 2 + moves // 2)
    paths = AcceptedPaths(tables, slots, start, rows, lengths)
    TorchBackend(DEVICE, torch.float32).move_paths(kvs, paths)
    TritonBackend(DEVICE, torch.float32).move_paths(own, paths)
    for kv, found, old in zip(kvs, own, before, strict=True):
        assert torch.equal(found.transpose(2, 3), kv) and not torch.equal(kv, old)
