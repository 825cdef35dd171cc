"""Attention over long spans on Hopper, in Gluon: two warpgroups compute, a warp loads.

A program (one a multiprocessor) takes tiles from ``prompt_attention``'s list: 128 rows of a span
with one head each, or fewer with all heads of a kv head, 64 to a warpgroup. Keys and values come
straight from the paged pool, a tensor copy (TMA) a page, into a ring in shared memory that both
warpgroups read. The two take turns by themselves: one multiplies while the other computes
exponentials. A warpgroup's queries have a place of their own, so that neither waits for the other
at the end of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from surefoot.kernels.triton.prompt_softmax import attend_partition
from surefoot.kernels.triton.warpgroups import (
    ROWS,
    await_inputs,
    jit,
    load_box,
    reinterpret,
    release_next,
)


@jit
def load_page(
    desc, block, page, kv_head, offset, full, target,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The keys (or values) of one page, which lies in ``block``."""
    at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + page * PAGE % BLOCK_SIZE
    load_box(desc, [offset + at, 0], full, target)


@jit
def load_pages(
    desc, page_ptr, kv_head, offset, tile, last_page, full, target,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """A tile's keys (or values); in place of those beyond the last page, that page again."""
    BLOCK_N: gl.constexpr = target.shape[0]
    PAGE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    PAGES: gl.constexpr = BLOCK_N // PAGE
    mbarrier.expect(full, BLOCK_N * target.shape[1] * 2)
    for number in gl.static_range(PAGES):
        page = gl.minimum(tile * PAGES + number, last_page)
        block = gl.load(page_ptr + page * PAGE // BLOCK_SIZE)
        load_page(
            desc, block, page, kv_head, offset, full, target.slice(number * PAGE, PAGE),
            KV_HEADS, PAGE, BLOCK_SIZE,
        )  # fmt: skip


@jit
def load_queries(
    desc, q_s, info_s, q_full, q_empty, half: gl.constexpr, number, info, row, unit,
    PACK: gl.constexpr, USED: gl.constexpr,
):  # fmt: skip
    """A warpgroup's queries, and which they are. Of ``PACK`` heads the first ``USED`` are the
    unit's own; the others are its neighbours' or, beyond the last head, zero."""
    HEAD_DIM: gl.constexpr = q_s.shape[2]
    SPANNED: gl.constexpr = ROWS // PACK
    full = q_full.index(half)
    LAYOUT: gl.constexpr = desc.layout
    target = reinterpret(q_s.index(half), gl.bfloat16, [SPANNED, PACK, HEAD_DIM], LAYOUT)
    mbarrier.wait(q_empty.index(half), (number & 1) ^ 1)
    info_s.index(half).store(info)
    mbarrier.expect(full, ROWS * HEAD_DIM * 2)
    load_box(desc, [row + half * SPANNED, unit * USED, 0], full, target)


@jit
def load_partition(
    q_desc, kv_desc, buffers, barriers, tiles_ptr, tables_ptr, table_stride, value_offset,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PACK: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, info_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[1]
    PAGE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    UNITS: gl.constexpr = HEADS // PACK
    field = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [1], [0]))
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    await_inputs()
    items = gl.load(tiles_ptr) * UNITS
    step = 0
    number = 0
    for wave in range(gl.cdiv(items, programs)):
        # To and fro: tiles get shorter along the list, and programs are to end together.
        item = wave * programs + gl.where(wave % 2 == 0, program, programs - 1 - program)
        if item < items:
            entry = tiles_ptr + 8 + item // UNITS * 8
            row, count = gl.load(entry), gl.load(entry + 1)
            key, slot = gl.load(entry + 2), gl.load(entry + 3)
            end = gl.load(entry + 4)
            unit = item % UNITS
            tiles = gl.cdiv(key + count, BLOCK_N)
            info = gl.where(field == 0, row, 0) + gl.where(field == 1, count, 0)
            info += gl.where(field == 2, key, 0) + gl.where(field == 3, unit, 0)
            info += gl.where(field == 4, tiles, 0) + gl.where(field == 5, end, 0)
            pages = tables_ptr + slot * table_stride
            kv_head = unit * PACK // (HEADS // KV_HEADS)
            last_page = (key + count - 1) // PAGE
            for tile in range(tiles):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                load_pages(
                    kv_desc, pages, kv_head, 0, tile, last_page,
                    k_full.index(stage), k_s.index(stage), KV_HEADS, BLOCK_SIZE,
                )  # fmt: skip
                if tile == 0:
                    # After the keys: those need not wait until the tile before is done.
                    for half in gl.static_range(2):
                        load_queries(
                            q_desc, q_s, info_s, q_full, q_empty, half, number, info, row, unit,
                            PACK, PACK,
                        )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                load_pages(
                    kv_desc, pages, kv_head, value_offset, tile, last_page,
                    v_full.index(stage), v_s.index(stage), KV_HEADS, BLOCK_SIZE,
                )  # fmt: skip
                step += 1
            number += 1
    for half in gl.static_range(2):
        mbarrier.wait(q_empty.index(half), (number & 1) ^ 1)
        info_s.index(half).store(gl.zeros_like(field))
        mbarrier.arrive(q_full.index(half), count=1)


@gluon.jit(do_not_specialize=["table_stride", "value_offset", "first_key"])
def prompt_kernel(
    q_desc, kv_desc, out_ptr, tiles_ptr, tables_ptr, table_stride, value_offset, scale, first_key,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PACK: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    release_next()
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # A thread's elements of half an accumulator, four at a time, then those of the next thread.
    half: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0],
         [0, 16], [0, 32]][: 11 + HEAD_DIM // 128]
    )  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, HEAD_DIM], tiled)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], tiled)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], tiled)
    left_0 = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM // 2], half)
    right_0 = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM // 2], half)
    left_1 = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM // 2], half)
    right_1 = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM // 2], half)
    info_s = gl.allocate_shared_memory(gl.int32, [2, 8], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for group in gl.static_range(2):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_empty.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    buffers = (q_s, k_s, v_s, info_s)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    # 240 + 240 + 24 registers a thread are what a multiprocessor has for three warpgroups.
    gl.warp_specialize([
        (attend_partition, (buffers, barriers, (left_0, right_0), out_ptr, scale, first_key,
                            gl.constexpr(0), HEADS, PACK, PACK, CHUNK)),
        (attend_partition, (buffers, barriers, (left_1, right_1), out_ptr, scale, first_key,
                            gl.constexpr(1), HEADS, PACK, PACK, CHUNK)),
        (load_partition, (q_desc, kv_desc, buffers, barriers, tiles_ptr, tables_ptr, table_stride,
                          value_offset, HEADS, KV_HEADS, PACK, BLOCK_SIZE)),
    ], [4, 1], [240, 24])  # fmt: skip
