"""The arithmetic of attention over long spans, in Gluon: scores, softmax, and sums in fixed chunks.

A row's keys are taken ``BLOCK_N`` at a time, counted from the request's first key, ``CHUNK`` such
tiles to a chunk. Within a chunk the softmax is the usual running one. A chunk starts afresh, and
chunks are added up in ascending order (``prompt_chunks``): every sum's order follows from the
absolute index of its keys alone. Tiles in which a row sees nothing change no bit of it.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from surefoot.kernels.triton.prompt_chunks import (
    exp2,
    merge,
    merge_totals,
    pivot_of,
    store_part,
    store_result,
)
from surefoot.kernels.triton.warpgroups import ROWS, jit


@jit
def split_rows(x):
    """[M, N] -> [M, N / 8, 4]: pairs added, and a column for each thread that shares a row."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.sum(x.reshape([M, N // 8, 4, 2]), axis=3)


@jit
def soften(scores, prior, best, acc, total, scale):
    """From a tile's scores to its weights in bf16; what came before them in the chunk is scaled
    from its highest score ``prior`` (-inf: nothing did) to ``best``."""
    layout: gl.constexpr = acc.type.layout
    acc_rows: gl.constexpr = gl.SliceLayout(1, layout)
    total_rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    pivot = pivot_of(best)
    decay = exp2((prior - pivot) * scale)
    weights = exp2(gl.fma(scores, gl.to_tensor(scale), (-pivot * scale)[:, None]))
    # By the four threads that share a row: they add up once a chunk.
    sums = gl.sum(split_rows(weights), axis=1)
    total = total * gl.convert_layout(decay, total_rows)[:, None] + sums
    acc = gl.fma(acc, gl.convert_layout(decay, acc_rows)[:, None], 0.0)
    p = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, layout, 2))
    return p, acc, total


@jit
def advance(
    q, buffers, barriers, whole, acc, scores, prior, best, total, whole_best, whole_total,
    step, tile, last_key, column, scale, parts, CHUNK: gl.constexpr, MASKED: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """The weights of tile - 1; then its values are added up beside the scores of ``tile``.

    Exponentials do not run beside the warpgroup's own products, but beside the other's: that is
    faster, and each takes its turn by itself.
    """
    q_s, k_s, v_s, info_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[1]
    score_layout: gl.constexpr = column.type.layout.parent
    p, acc, total = soften(scores, prior, best, acc, total, scale)
    before = step % STAGES
    stage = (step + 1) % STAGES
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    mbarrier.wait(k_full.index(stage), ((step + 1) // STAGES) & 1)
    scores = warpgroup_mma(
        q, k_s.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(before), (step // STAGES) & 1)
    acc = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        visible = (tile * BLOCK_N + column)[None, :] <= last_key[:, None]
        scores = gl.where(visible, scores, float("-inf"))
    opens = tile % CHUNK == 0
    prior = gl.where(opens, float("-inf"), best)
    higher = gl.maximum(prior, gl.max(scores, axis=1))
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_empty.index(before), count=1)
    if opens:
        whole_best, whole_total, old, new = merge_totals(
            best, total, whole_best, whole_total, scale
        )
        if PARTS:
            if parts[0] >= 0:
                store_part(acc, whole_best, whole_total, parts, tile // CHUNK - 1)
                whole_best = gl.full_like(whole_best, float("-inf"))
                whole_total = gl.zeros_like(whole_total)
            else:
                merge(whole, tile == CHUNK, acc, old, new)
        else:
            merge(whole, tile == CHUNK, acc, old, new)
    return acc, scores, prior, higher, total, whole_best, whole_total


@jit
def clear_rows(v, known):
    """Zero the values from row ``known`` on: a weight of zero does not hide a NaN."""
    BLOCK_N: gl.constexpr = v.shape[0]
    HEAD_DIM: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    for first in gl.static_range(0, BLOCK_N, 16):
        if first + 16 > known:
            part = v.slice(first, 16)
            values = part.load(layout)
            part.store(gl.where((first + row < known)[:, None], values, 0.0))
    fence_async_shared()


@jit
def read_field(info_s, number: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(info_s.slice(number, 1).load(one), axis=0)


@jit
def attend_partition(
    buffers, barriers, whole, out_ptr, scale, first_key, half: gl.constexpr,
    HEADS: gl.constexpr, PACK: gl.constexpr, USED: gl.constexpr, CHUNK: gl.constexpr,
    part_ptr=None, sums_ptr=None, part_rows=0, PARTS: gl.constexpr = False,
):  # fmt: skip
    """A warpgroup's half of every tile: 64 rows, or fewer rows with ``PACK`` heads each, of which
    ``USED`` have a result. Where there may be ``PARTS``, some tiles take a run of chunks, and leave
    the softmax of each."""
    q_s, k_s, v_s, info_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[1]
    HEAD_DIM: gl.constexpr = q_s.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    q, info_s = q_s.index(half), info_s.index(half)
    q_full, q_empty = q_full.index(half), q_empty.index(half)
    first = half * (ROWS // PACK)
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
    step = 0
    number = 1
    mbarrier.wait(q_full, 0)
    tiles = read_field(info_s, 4)
    while tiles > 0:
        row = read_field(info_s, 0)
        count = read_field(info_s, 1)
        key = read_field(info_s, 2)
        unit = read_field(info_s, 3)
        end = read_field(info_s, 5)
        known = end - (tiles - 1) * BLOCK_N
        low = read_field(info_s, 6) if PARTS else 0
        part = read_field(info_s, 7) if PARTS else -1
        if PARTS:
            stride = HEADS // USED * part_rows
            base = (part - low // CHUNK).to(gl.int64) * stride + unit * part_rows
            base += read_field(info_s, 8) * PACK
            parts = (part, base, stride, count * PACK, part_ptr, sums_ptr)
        else:
            parts = None
        # Of a block in both directions, every row sees its last key.
        last_key = key + first + gl.arange(0, ROWS, layout=score_rows) // PACK
        last_key = gl.minimum(last_key, end - 1)

        stage = step % STAGES
        no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(
            q, k_s.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        seen = low * BLOCK_N + column
        visible = (seen[None, :] <= last_key[:, None]) & (seen >= first_key)[None, :]
        scores = gl.where(visible, scores, float("-inf"))
        best = gl.max(scores, axis=1)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
        whole_best = gl.full([ROWS], float("-inf"), gl.float32, score_rows)
        whole_total = gl.zeros([ROWS], gl.float32, score_rows)
        prior = whole_best
        # In the layout of such sums.
        total = gl.zeros_like(gl.sum(split_rows(scores), axis=1))
        # Tiles that every row sees whole need no mask.
        clear = gl.maximum(gl.minimum((key + 1) // BLOCK_N, tiles), low + 1)
        for tile in range(low + 1, clear):
            acc, scores, prior, best, total, whole_best, whole_total = advance(
                q, buffers, barriers, whole, acc, scores, prior, best, total, whole_best,
                whole_total, step, tile, last_key, column, scale, parts, CHUNK, False, PARTS,
            )  # fmt: skip
            step += 1
        for tile in range(clear, tiles):
            acc, scores, prior, best, total, whole_best, whole_total = advance(
                q, buffers, barriers, whole, acc, scores, prior, best, total, whole_best,
                whole_total, step, tile, last_key, column, scale, parts, CHUNK, True, PARTS,
            )  # fmt: skip
            step += 1
        mbarrier.arrive(q_empty, count=1)

        p, acc, total = soften(scores, prior, best, acc, total, scale)
        stage = step % STAGES
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        v = v_s.index(stage)
        if known < BLOCK_N:
            clear_rows(v, known)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1

        whole_best, whole_total, old, new = merge_totals(
            best, total, whole_best, whole_total, scale
        )
        if PARTS:
            if part >= 0:
                store_part(acc, whole_best, whole_total, parts, (tiles - 1) // CHUNK)
            if part == -1:
                store_result(
                    acc, whole, whole_total, old, new, tiles > CHUNK, out_ptr, first, row, count,
                    unit, HEADS, PACK, USED,
                )  # fmt: skip
        else:
            store_result(
                acc, whole, whole_total, old, new, tiles > CHUNK, out_ptr, first, row, count,
                unit, HEADS, PACK, USED,
            )  # fmt: skip
        mbarrier.wait(q_full, number & 1)
        number += 1
        tiles = read_field(info_s, 4)
