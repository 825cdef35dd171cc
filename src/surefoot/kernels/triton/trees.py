"""Trees of drafts in a round: masks, rows, the accepted path, what is settled.

Twins: the functions of the same names in ``speculation.trees``. A tree has at most 64 nodes, its
root included, so that everything about one fits one program, and "the row that is my parent" is a
comparison of all with all.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import SPAN_COLUMNS, cdiv, jit, next_power_of_2

TILE = 16


@jit
def at(values, index, width: tl.constexpr):
    """values [WIDTH] at ``index`` [n]."""
    chosen = index[:, None] == tl.arange(0, width)[None, :]
    return tl.sum(tl.where(chosen, values[None, :], 0), axis=1)


@jit(do_not_specialize_on_alignment=["slots_ptr"])
def ancestors_kernel(
    parents_ptr, mask_ptr, depth_ptr, width, slots_ptr, tokens_ptr, own_tokens_ptr, own_parents_ptr,
    JUMPS: tl.constexpr, WIDTH: tl.constexpr, OFFERED: tl.constexpr,
):  # fmt: skip
    """``OFFERED``: the trees of ``slots_ptr``, whose tokens and parents are copied, too."""
    tree = tl.program_id(0).to(tl.int64)
    source = tl.load(slots_ptr + tree) if OFFERED else tree
    node = tl.arange(0, WIDTH)
    inside = (node > 0) & (node < width)
    place, own = source * (width - 1) + node - 1, tree * (width - 1) + node - 1
    up = tl.load(parents_ptr + place, mask=inside, other=-1) + 1
    if OFFERED:
        tl.store(own_parents_ptr + own, up - 1, mask=inside)
        tl.store(own_tokens_ptr + own, tl.load(tokens_ptr + place, mask=inside), mask=inside)
    masks = tl.full([WIDTH], 1, tl.int64) << node
    depth = inside.to(tl.int64)
    for _ in range(JUMPS):
        masks = masks | at(masks, up, WIDTH)
        depth = depth + at(depth, up, WIDTH)
        up = at(up, up, WIDTH)
    tl.store(mask_ptr + tree * width + node, masks, mask=node < width)
    tl.store(depth_ptr + tree * width + node, depth, mask=node < width)


def ancestors(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``parents`` int64 [B, K] -> masks and depths, int64 [B, K + 1] each."""
    batch, width = parents.shape[0], parents.shape[1] + 1
    masks, depths = (parents.new_empty((batch, width)) for _ in range(2))
    parents = parents.contiguous()
    ancestors_kernel[(batch,)](
        parents, masks, depths, width, parents, parents, parents, parents,
        (width - 1).bit_length(), next_power_of_2(width), False, num_warps=4,
    )  # fmt: skip
    return masks, depths


def offered_trees(
    slots: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``tokens`` and ``parents`` int64 [slots, K] -> of the trees of ``slots`` int64 [B] tokens and
    parents, int64 [B, K], and masks and depths, int64 [B, K + 1]."""
    batch, drafts = slots.shape[0], parents.shape[1]
    own = [parents.new_empty((batch, drafts)) for _ in range(2)]
    found = [parents.new_empty((batch, drafts + 1)) for _ in range(2)]
    ancestors_kernel[(batch,)](
        parents, *found, drafts + 1, slots, tokens, *own,
        drafts.bit_length(), next_power_of_2(drafts + 1), True, num_warps=4,
    )  # fmt: skip
    return *own, *found


@jit(do_not_specialize=["spans", "rows"])
def node_rows_kernel(
    first_row_ptr, span_rows_ptr, spans, position_ptr, tree_mask_ptr, tree_depth_ptr, width,
    owner_ptr, offset_ptr, depth_ptr, new_position_ptr, mask_ptr, rows, drafts_ptr,
    SPANS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    entry = tl.arange(0, SPANS)
    first = tl.load(first_row_ptr + entry, mask=entry < spans, other=rows)
    count = tl.load(span_rows_ptr + entry, mask=entry < spans, other=0)
    used = tl.sum(count, axis=0)
    index = tl.maximum(tl.minimum(row, used - 1), 0)
    owner = tl.sum((first[None, :] <= index[:, None]).to(tl.int64), axis=1) - 1
    owner = tl.maximum(tl.minimum(owner, spans - 1), 0)
    offset = index - at(first, owner, SPANS)
    place = owner * width + tl.minimum(offset, width - 1)
    drafts = tl.load(drafts_ptr + owner)
    # Of a chain's last row the mask names all rows before it.
    last = tl.load(tree_mask_ptr + owner * width + tl.minimum(drafts, width - 1))
    in_tree = last != (tl.full([TILE], 2, tl.int64) << drafts) - 1
    depth = tl.where(in_tree, tl.load(tree_depth_ptr + place), offset)
    inside = row < rows
    position = tl.load(position_ptr + row, mask=inside, other=0)
    tl.store(owner_ptr + row, owner, mask=inside)
    tl.store(offset_ptr + row, offset, mask=inside)
    tl.store(depth_ptr + row, depth, mask=inside)
    tl.store(new_position_ptr + row, position - offset + depth, mask=inside)
    mask = tl.where(in_tree, tl.load(tree_mask_ptr + place), -1)
    tl.store(mask_ptr + row, mask, mask=inside)


def node_rows(
    first_row: torch.Tensor,
    span_rows: torch.Tensor,
    positions: torch.Tensor,
    masks: torch.Tensor,
    depths: torch.Tensor,
    drafts: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """``first_row`` and ``span_rows`` int64 [B], ``positions`` int64 [N] of chains, ``masks`` and
    ``depths`` int64 [B, K + 1], ``drafts`` int64 [B]: those verified (none, or a chain: no tree) ->
    (owner, offset, depth, position, mask), int64 [N] each."""
    rows, spans = positions.shape[0], first_row.shape[0]
    out = tuple(positions.new_empty(rows) for _ in range(5))
    node_rows_kernel[(cdiv(rows, TILE),)](
        first_row, span_rows, spans, positions, masks, depths, masks.shape[1],
        *out, rows, drafts, next_power_of_2(spans), TILE, num_warps=1,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["sampled_rows"], do_not_specialize_on_alignment=SPAN_COLUMNS)
def walk_kernel(
    token_ptr, parent_ptr, tree_mask_ptr, tree_depth_ptr, width,
    sampled_ptr, sampled_rows, first_sample_ptr, drafts_ptr,
    length_ptr, path_ptr, path_token_ptr, WIDTH: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, WIDTH)
    inside, draft = node < width, (node > 0) & (node < width)
    first = tl.load(first_sample_ptr + span)
    parent = tl.load(parent_ptr + span * (width - 1) + node - 1, mask=draft, other=-1) + 1
    token = tl.load(token_ptr + span * (width - 1) + node - 1, mask=draft, other=-1)
    above = tl.load(sampled_ptr + tl.minimum(first + parent, sampled_rows - 1))
    own = tl.load(sampled_ptr + tl.minimum(first + node, sampled_rows - 1))
    masks = tl.load(tree_mask_ptr + span * width + node, mask=inside, other=-1)
    depth = tl.load(tree_depth_ptr + span * width + node, mask=inside, other=-1)
    right = draft & (node <= tl.load(drafts_ptr + span)) & (above == token)
    bit = tl.full([WIDTH], 1, tl.int64) << node
    bits = tl.sum(tl.where(right, bit, 0), axis=0) | 1
    reached = inside & ((masks & ~bits) == 0)
    # The deepest, and of equally deep ones the first.
    last = (
        WIDTH - 1 - tl.max(tl.where(reached, depth * WIDTH + WIDTH - 1 - node, -1), axis=0) % WIDTH
    )
    path = tl.sum(tl.where(node == last, masks, 0), axis=0)
    length = tl.sum(tl.where(node == last, depth, 0), axis=0)
    on_path = inside & ((path & bit) != 0)
    place = span * width
    tl.store(length_ptr + span, length)
    tl.store(path_ptr + place + depth, node.to(tl.int64), mask=on_path)
    tl.store(path_token_ptr + place + depth, own, mask=on_path)
    beyond = inside & (node > length)
    tl.store(path_ptr + place + node, tl.zeros([WIDTH], tl.int64), mask=beyond)
    tl.store(path_token_ptr + place + node, tl.zeros([WIDTH], tl.int64), mask=beyond)


def walk(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    masks: torch.Tensor,
    depths: torch.Tensor,
    sampled: torch.Tensor,
    first_sample: torch.Tensor,
    drafts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trees as in ``speculation.trees.Trees``; ``sampled`` int64 [M], ``first_sample`` and
    ``drafts`` int64 [B] -> (lengths [B], rows [B, K + 1], tokens [B, K + 1])."""
    batch, width = masks.shape
    lengths, rows = drafts.new_empty(batch), masks.new_empty((batch, width))
    out = torch.empty_like(rows)
    walk_kernel[(batch,)](
        tokens.contiguous(), parents.contiguous(), masks, depths, width,
        sampled, sampled.shape[0], first_sample, drafts, lengths, rows, out,
        next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return lengths, rows, out


@jit(do_not_specialize_on_alignment=["slots_ptr"])
def write_drafts_kernel(
    slots_ptr, token_ptr, row, columns, history_ptr, history_stride, length_ptr, WIDTH: tl.constexpr
):
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    step = tl.arange(0, WIDTH)
    token = tl.load(token_ptr + span * row + step, mask=step < columns, other=0)
    text = history_ptr + slot * history_stride + tl.load(length_ptr + slot) + step
    tl.store(text, token, mask=step < columns)


def write_drafts(
    slots: torch.Tensor, tokens: torch.Tensor, history: torch.Tensor, length: torch.Tensor
) -> None:
    """Put ``tokens`` int64 [B, K], whose rows may lie apart, behind the committed tokens of
    ``slots`` int64 [B]: ``history`` int64 [slots, width], ``length`` int64 [slots]."""
    batch, columns = tokens.shape
    write_drafts_kernel[(batch,)](
        slots, tokens, tokens.stride(0), columns, history, history.stride(0), length,
        next_power_of_2(columns), num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize=["rows", "spans"])
def follow_paths_kernel(
    owner_ptr, offset_ptr, depth_ptr, parent_ptr, path_ptr, length_ptr, width,
    first_row_ptr, count_ptr, key_index_ptr, row_slot_ptr, rows, spans, drafts_ptr,
    new_key_ptr, new_slot_ptr, before_ptr, last_ptr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of rows, then tiles of spans."""
    tile, row_tiles = tl.program_id(0), tl.cdiv(rows, TILE)
    if tile < row_tiles:
        row = tile * TILE + tl.arange(0, TILE)
        inside = row < rows
        owner = tl.load(owner_ptr + row, mask=inside, other=0)
        offset = tl.load(offset_ptr + row, mask=inside, other=0)
        depth = tl.load(depth_ptr + row, mask=inside, other=0)
        in_tree = tl.load(drafts_ptr + owner) > 0
        on_path = tl.load(path_ptr + owner * width + tl.minimum(depth, width - 1)) == offset
        on_path = on_path & (depth <= tl.load(length_ptr + owner))
        slot = tl.load(row_slot_ptr + row, mask=inside, other=-1)
        key = tl.load(key_index_ptr + row, mask=inside, other=0)
        draft = tl.minimum(tl.maximum(offset, 1), width - 1) - 1
        parent = tl.load(parent_ptr + owner * (width - 1) + draft)
        parent = tl.where(in_tree, parent, offset - 2)
        before = tl.where(offset > 0, tl.load(first_row_ptr + owner) + parent + 1, -1)
        tl.store(new_key_ptr + row, key - offset + depth, mask=inside)
        tl.store(new_slot_ptr + row, tl.where(on_path | ~in_tree, slot, -1), mask=inside)
        tl.store(before_ptr + row, before, mask=inside)
    else:
        span = (tile - row_tiles) * TILE + tl.arange(0, TILE)
        inside = span < spans
        tail = tl.maximum(tl.load(count_ptr + span, mask=inside, other=0) - 1, 0)
        place = span * width + tl.minimum(tail, width - 1)
        end = tl.load(path_ptr + place, mask=inside, other=0)
        nodes = tl.load(drafts_ptr + span, mask=inside, other=0)
        end = tl.where(nodes > 0, end, tail)
        first = tl.load(first_row_ptr + span, mask=inside, other=0)
        tl.store(last_ptr + span, first + end, mask=inside)


def follow_paths(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    parents: torch.Tensor,
    path: tuple[torch.Tensor, torch.Tensor],
    first_row: torch.Tensor,
    counts: torch.Tensor,
    key_index: torch.Tensor,
    row_slot: torch.Tensor,
    drafts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rows``: owner, offset and depth int64 [N]; ``path``: lengths [B] and rows [B, K + 1];
    ``counts`` int64 [B]: positions settled; ``drafts`` int64 [B] as in ``node_rows`` -> (key
    index, slot, row before), int64 [N] each, and the last settled row int64 [B]."""
    total, spans = key_index.shape[0], first_row.shape[0]
    out = [torch.empty_like(key_index) for _ in range(3)]
    last = torch.empty_like(first_row)
    follow_paths_kernel[(cdiv(total, TILE) + cdiv(spans, TILE),)](
        *rows, parents.contiguous(), path[1].contiguous(), path[0], path[1].shape[1],
        first_row, counts, key_index, row_slot, total, spans, drafts,
        *out, last, TILE, num_warps=1,
    )  # fmt: skip
    return out[0], out[1], out[2], last
