"""Reference operations in plain torch: the twins that every faster kernel is held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from surefoot.kernels.backend import AcceptedPaths, FlatBatch, RopeTable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32 and returned in ``x``'s dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Rotate ``x`` [N, heads, head_dim] by its rows' ``positions`` [N] (half-split pairs)."""
    cos = rope.cos[positions].unsqueeze(1)
    sin = rope.sin[positions].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for ``[N, 2 * intermediate]`` with the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def key_places(
    tables: torch.Tensor, keys: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block ids and places within, int64 [B * n] each, of key indices [B, n] under block tables
    int32 [B, blocks]."""
    blocks = tables.gather(1, keys // block_size)
    return blocks.flatten().long(), (keys % block_size).flatten()


def key_visibility(batch: FlatBatch, keys: int) -> torch.Tensor:
    """bool [N, keys]: which of its request's first ``keys`` keys each row sees (see FlatBatch)."""
    index = torch.arange(keys, device=batch.tokens.device)
    if batch.mask is None:
        return (index <= batch.key_index.unsqueeze(1)) & (index >= batch.first_key)
    start = batch.span_start[batch.row_slot.clamp(min=0)].unsqueeze(1)
    offset = index - start
    in_span = (offset >= 0) & (offset < 64)
    bit = (batch.mask.unsqueeze(1) >> offset.clamp(0, 63)) & 1
    causal = (batch.mask == -1).unsqueeze(1) & (index <= batch.key_index.unsqueeze(1))
    in_tree = (batch.mask != -1).unsqueeze(1) & ((offset < 0) | (in_span & (bit == 1)))
    if batch.oldest is not None:
        in_tree = in_tree & (index >= batch.oldest.unsqueeze(1))
    return (causal | in_tree) & (index >= batch.first_key)


def key_moves(paths: AcceptedPaths) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys ``Backend.move_paths`` copies where, int64 [B, K] each. Entries with nothing to
    move name the root twice."""
    depth = torch.arange(1, paths.rows.shape[1], device=paths.rows.device)
    moved = depth <= paths.lengths.unsqueeze(1)
    root = paths.start[paths.slots].unsqueeze(1)
    return root + torch.where(moved, paths.rows[:, 1:], 0), root + torch.where(moved, depth, 0)
