"""Attention over short spans on Hopper, in Gluon: chunks of keys, one warpgroup, a warp that loads.

A program takes work from ``chunk_attention``'s list: up to 64 queries of one
kv head (rows times heads, whose number is padded to a power of two), and either all keys that they
see or a run of chunks of them. All keys give a result; a chunk gives a partial one, which
``combine_chunks_kernel`` adds to the others. The
arithmetic is ``prompt_softmax``'s, so that a row's bits are those it has in a prompt, however the
work was shared out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from surefoot.kernels.triton.prompt_chunks import exp2, pivot_of
from surefoot.kernels.triton.prompt_kernel import load_page, load_queries
from surefoot.kernels.triton.prompt_softmax import attend_partition
from surefoot.kernels.triton.warpgroups import ROWS, await_inputs, jit, release_next

ENTRY = gl.constexpr(32)
"""Numbers of an entry in the list, and of the list's head."""
BLOCKS = gl.constexpr(16)
"""Where an entry has the blocks of its first tile."""
SPLIT = gl.constexpr(8)
"""Numbers of an entry in the list of what is added up."""
NODE = gl.constexpr(4)
"""Numbers of an entry in the list of nodes."""


@jit
def read_item(items_ptr, item):
    """The fields of a list's entry, as ``chunk_attention.ChunkWork`` has them."""
    entry = items_ptr + ENTRY + item * ENTRY
    row, count = gl.load(entry), gl.load(entry + 1)
    key, slot = gl.load(entry + 2), gl.load(entry + 3)
    end, part = gl.load(entry + 4), gl.load(entry + 5)
    low, high = gl.load(entry + 6), gl.load(entry + 7)
    start, within, path = gl.load(entry + 8), gl.load(entry + 9), gl.load(entry + 10)
    return row, count, key, slot, end, part, low, high, start, within, path


@jit
def first_blocks(items_ptr, item, PAGES: gl.constexpr):
    """The blocks of an item's first tile."""
    blocks = ()
    for number in gl.static_range(PAGES):
        place = items_ptr + ENTRY + item * ENTRY + BLOCKS + number
        blocks = blocks + (gl.load(place),)  # noqa: RUF005
    return blocks


@jit
def blocks_of(item, tile, tables_ptr, table_stride, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
              PAGES: gl.constexpr, TREES: gl.constexpr):  # fmt: skip
    """The blocks of the pages of an item's ``tile``; in place of those beyond its last page, that
    page's. Block b of a path is -1 - b."""
    row, count, key, slot, end, part, low, high, start, within, path = item
    last_page = (gl.minimum(key + count, end) - 1) // PAGE
    blocks = ()
    for number in gl.static_range(PAGES):
        page = gl.minimum(tile * PAGES + number, last_page)
        number_of_block = page * PAGE // BLOCK_SIZE
        block = gl.load(tables_ptr + slot * table_stride + number_of_block)
        if TREES:
            beyond = number_of_block - start // BLOCK_SIZE
            block = gl.where((path >= 0) & (beyond >= 0), -1 - path - beyond, block)
        blocks = blocks + (block,)  # noqa: RUF005
    return blocks


@jit
def load_tile(
    descs, blocks, kv_head, offsets, tile, last_page, full, target,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TREES: gl.constexpr,
):  # fmt: skip
    """A tile's keys (or values), from its ``blocks``: those of requests, and of paths."""
    BLOCK_N: gl.constexpr = target.shape[0]
    PAGE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    mbarrier.expect(full, BLOCK_N * target.shape[1] * 2)
    for number in gl.static_range(BLOCK_N // PAGE):
        page = gl.minimum(tile * (BLOCK_N // PAGE) + number, last_page)
        block, part = blocks[number], target.slice(number * PAGE, PAGE)
        if TREES:
            if block < 0:
                load_page(
                    descs[1], -1 - block, page, kv_head, offsets[1], full, part,
                    KV_HEADS, PAGE, BLOCK_SIZE,
                )  # fmt: skip
            else:
                load_page(
                    descs[0], block, page, kv_head, offsets[0], full, part,
                    KV_HEADS, PAGE, BLOCK_SIZE,
                )  # fmt: skip
        else:
            load_page(
                descs[0], block, page, kv_head, offsets[0], full, part, KV_HEADS, PAGE, BLOCK_SIZE
            )


@jit
def load_partition(
    q_desc, descs, buffers, barriers, items_ptr, tables_ptr, table_stride, value_offsets,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PACK: gl.constexpr, USED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TREES: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, info_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[1]
    PAGE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    PAGES: gl.constexpr = BLOCK_N // PAGE
    UNITS: gl.constexpr = HEADS // USED
    field = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [1], [0]))
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    # The list was made before the last product began, and so were all keys but the newest.
    items = gl.load(items_ptr) * UNITS
    own = read_item(items_ptr, program // UNITS)
    blocks = first_blocks(items_ptr, program // UNITS, PAGES)
    item = program
    wave = 0
    step = 0
    number = 0
    while item < items:
        row, count, key, slot, end, part, low, high, start, within, path = own
        unit = item % UNITS
        # To and fro: items get shorter along the list, and programs are to end together.
        wave += 1
        item = wave * programs + gl.where(wave % 2 == 0, program, programs - 1 - program)
        following = read_item(items_ptr, gl.minimum(item, items - 1) // UNITS)
        info = gl.where(field == 0, row, 0) + gl.where(field == 1, count, 0)
        info += gl.where(field == 2, key, 0) + gl.where(field == 3, unit, 0)
        info += gl.where(field == 4, high, 0) + gl.where(field == 5, end, 0)
        info += gl.where(field == 6, low, 0) + gl.where(field == 7, part, 0)
        info += gl.where(field == 8, within, 0)
        kv_head = unit * USED // (HEADS // KV_HEADS)
        last_page = (gl.minimum(key + count, end) - 1) // PAGE
        # Old keys may be on their way while the product before this kernel ends. A path's are new
        # from the block on that its tree begins in.
        if (low + 1) * BLOCK_N > start // BLOCK_SIZE * BLOCK_SIZE:
            await_inputs()
        for tile in range(low, high):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            load_tile(
                descs, blocks, kv_head, (0, 0), tile, last_page,
                k_full.index(stage), k_s.index(stage), KV_HEADS, BLOCK_SIZE, TREES,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            load_tile(
                descs, blocks, kv_head, value_offsets, tile, last_page,
                v_full.index(stage), v_s.index(stage), KV_HEADS, BLOCK_SIZE, TREES,
            )  # fmt: skip
            if tile == low:
                await_inputs()
                load_queries(
                    q_desc, q_s, info_s, q_full, q_empty, 0, number, info, row, unit, PACK, USED
                )
            # A tile's blocks are read before its turn comes, while the one before waits for room.
            blocks = blocks_of(
                own, tile + 1, tables_ptr, table_stride, PAGE, BLOCK_SIZE, PAGES, TREES
            )
            step += 1
        number += 1
        own = following
        blocks = blocks_of(own, own[6], tables_ptr, table_stride, PAGE, BLOCK_SIZE, PAGES, TREES)
    # Where nobody has an item, the kernel is not to end before the one ahead of it.
    await_inputs()
    mbarrier.wait(q_empty.index(0), (number & 1) ^ 1)
    info_s.index(0).store(gl.zeros_like(field))
    mbarrier.arrive(q_full.index(0), count=1)


@gluon.jit(
    do_not_specialize=["table_stride", "value_offset", "path_offset", "first_key", "part_rows"]
)
def chunk_kernel(
    q_desc, kv_desc, path_desc, out_ptr, part_ptr, sums_ptr, items_ptr, tables_ptr, table_stride,
    value_offset, path_offset, scale, first_key, part_rows,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PACK: gl.constexpr, USED: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, TREES: gl.constexpr,
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
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HEAD_DIM], tiled)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], tiled)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], tiled)
    left = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM // 2], half)
    right = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM // 2], half)
    info_s = gl.allocate_shared_memory(gl.int32, [1, 16], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    buffers = (q_s, k_s, v_s, info_s)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize([
        (attend_partition, (buffers, barriers, (left, right), out_ptr, scale, first_key,
                            gl.constexpr(0), HEADS, PACK, USED, CHUNK, part_ptr, sums_ptr,
                            part_rows, True)),
        (load_partition, (q_desc, (kv_desc, path_desc), buffers, barriers, items_ptr, tables_ptr,
                          table_stride, (value_offset, path_offset), HEADS, KV_HEADS, PACK, USED,
                          BLOCK_SIZE, TREES)),
    ], [1], [40])  # fmt: skip


@jit
def add_parts(
    whole, whole_best, whole_total, base, chunks, place, used, step, part_ptr, sums_ptr, column,
    scale, AT_ONCE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """``AT_ONCE`` partial results of ``chunks`` from number ``base`` on join what those before them
    add up to. All are asked for before the first is added."""
    parts = ()
    for number in gl.static_range(AT_ONCE):
        there = used & (base + number < chunks)
        at = place + (base + number) * step
        best = gl.load(sums_ptr + 2 * at, mask=there, other=float("-inf"))
        total = gl.load(sums_ptr + 2 * at + 1, mask=there, other=0.0)
        values = part_ptr + at[:, None] * HEAD_DIM + column[None, :]
        part = gl.load(values, mask=there[:, None], other=0.0)
        parts = parts + ((best, total, part),)  # noqa: RUF005
    for number in gl.static_range(AT_ONCE):
        best, total, part = parts[number]
        there = used & (base + number < chunks)
        highest = gl.maximum(whole_best, best)
        pivot = pivot_of(highest)
        old = exp2((whole_best - pivot) * scale)
        new = exp2((best - pivot) * scale)
        merged = gl.fma(whole, gl.zeros_like(whole) + old[:, None], part * new[:, None])
        # The first chunk is taken as it is.
        merged = gl.where(base + number == 0, part, merged)
        whole = gl.where(there[:, None], merged, whole)
        whole_total = gl.where(there, gl.fma(whole_total, old, total * new), whole_total)
        whole_best = gl.where(there, highest, whole_best)
    return whole, whole_best, whole_total


@gluon.jit
def combine_chunks_kernel(
    part_ptr, sums_ptr, split_ptr, out_ptr, scale,
    HEADS: gl.constexpr, PACK: gl.constexpr, USED: gl.constexpr, HEAD_DIM: gl.constexpr,
    MEMBERS: gl.constexpr, TOGETHER: gl.constexpr, FEW: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """Queries' partial results in ascending order, as ``prompt_chunks`` merges them. A program has
    ``TOGETHER`` queries of a tile's ``MEMBERS``, those of an entry or some of one row's, a warp
    each. ``MANY`` chunks are on their way at a
    time, or ``FEW`` where there are no more."""
    release_next()
    layout: gl.constexpr = gl.BlockedLayout([1, HEAD_DIM // 32], [1, 32], [TOGETHER, 1], [1, 0])
    queries: gl.constexpr = gl.SliceLayout(1, layout)
    pieces: gl.constexpr = PACK // TOGETHER if PACK > TOGETHER else 1
    entry = split_ptr + gl.program_id(0) // pieces * SPLIT
    own = gl.program_id(0) % pieces * TOGETHER
    unit = gl.program_id(1)
    units: gl.constexpr = HEADS // USED
    row, count = gl.load(entry), gl.load(entry + 1)
    first, chunks = gl.load(entry + 2), gl.load(entry + 3)
    within = gl.load(entry + 4)
    await_inputs()
    if own < count * PACK:
        member = own + gl.arange(0, TOGETHER, layout=queries)
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
        used = (member < count * PACK) & (member % PACK < USED)
        place = (first.to(gl.int64) * units + unit) * MEMBERS + within * PACK + member
        step: gl.constexpr = units * MEMBERS
        whole = gl.zeros([TOGETHER, HEAD_DIM], gl.float32, layout)
        whole_best = gl.full([TOGETHER], float("-inf"), gl.float32, queries)
        whole_total = gl.zeros([TOGETHER], gl.float32, queries)
        base = 0
        while chunks - base > FEW:
            whole, whole_best, whole_total = add_parts(
                whole, whole_best, whole_total, base, chunks, place, used, step, part_ptr, sums_ptr,
                column, scale, MANY, HEAD_DIM,
            )  # fmt: skip
            base += MANY
        if base < chunks:
            whole, whole_best, whole_total = add_parts(
                whole, whole_best, whole_total, base, chunks, place, used, step, part_ptr, sums_ptr,
                column, scale, FEW, HEAD_DIM,
            )  # fmt: skip
        share = 1.0 / gl.where(whole_total == 0.0, 1.0, whole_total)
        head = unit * USED + member % PACK
        target = ((row + member // PACK).to(gl.int64) * HEADS + head) * HEAD_DIM
        result = (whole * share[:, None]).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + target[:, None] + column[None, :], result, mask=used[:, None])
