"""Products whose sums are made of shares, for many rows on Hopper, in Gluon: a warp loads, two
warpgroups compute.

A program (one a multiprocessor) takes tiles of 128 rows by ``BLOCK_N`` outputs, 64 rows to a
warpgroup. Steps of 64 inputs come into a ring in shared memory by tensor copies (TMA), which run
ahead over the ends of shares and tiles: the tensor cores need not wait there for what they multiply
next. A share's sum starts from zero and is added to those of the shares before it, as
``large_matmul`` does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from surefoot.kernels.triton.warpgroups import (
    ROWS,
    await_inputs,
    jit,
    load_box,
    reinterpret,
    release_next,
    store_box,
)

BLOCK_M = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
WIDEST = gl.constexpr(64)
"""A second part wider than this has its sums of earlier shares in shared memory."""


@jit
def place_of(unit, rows, outputs, WIDTH: gl.constexpr, GROUP: gl.constexpr):
    """(First row, first output) of a tile: ``GROUP`` tiles of rows share a column's weights before
    the next column's turn."""
    down = gl.cdiv(rows, BLOCK_M)
    across = gl.cdiv(outputs, WIDTH)
    group = unit // (GROUP * across)
    height = gl.minimum(down - group * GROUP, GROUP)
    within = unit % (GROUP * across)
    return (group * GROUP + within % height) * BLOCK_M, within // height * WIDTH


@jit
def load_partition(
    descs, buffers, barriers, rows, outputs, inputs,
    PART: gl.constexpr, REST: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    x_desc, w_desc, rest_desc = descs
    x_s, w_s, rest_s = buffers
    full, empty = barriers
    STAGES: gl.constexpr = x_s.shape[0]
    await_inputs()
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, PART + REST)
    step = 0
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        top, first = place_of(unit, rows, outputs, PART + REST, GROUP)
        for low in range(0, inputs, BLOCK_K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, (BLOCK_M + PART + REST) * BLOCK_K * 2)
            load_box(x_desc, [top, low], bar, x_s.index(stage))
            load_box(w_desc, [first, low], bar, w_s.index(stage))
            if REST:
                load_box(rest_desc, [first + PART, low], bar, rest_s.index(stage))
            step += 1


@jit
def share_sum(buffers, full, empty, step, steps, half: gl.constexpr, REST: gl.constexpr):
    """(A share's sums fp32 [64, PART], those of the tile's second part, the next step)."""
    x_s, w_s, rest_s = buffers
    STAGES: gl.constexpr = x_s.shape[0]
    PART: gl.constexpr = w_s.shape[1]
    SECOND: gl.constexpr = rest_s.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    second: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 16])
    acc = gl.zeros([ROWS, PART], gl.float32, layout)
    rest = gl.zeros([ROWS, SECOND], gl.float32, second)
    for number in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        x = x_s.index(stage).slice(half * ROWS, ROWS)
        w = w_s.index(stage).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, use_acc=number > 0, is_async=True)
        if REST:
            w = rest_s.index(stage).permute((1, 0))
            rest = warpgroup_mma(x, w, rest, use_acc=number > 0, is_async=True)
            acc, rest = warpgroup_mma_wait(2, deps=[acc, rest])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        # The products of the step before are done, of this one perhaps not.
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=number > 0)
        step += 1
    acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, rest, step


@jit
def steps_of(number, share, inputs):
    low = gl.minimum(number * share, inputs)
    return gl.cdiv(gl.minimum(low + share, inputs) - low, BLOCK_K)


@jit
def put(desc, kept, sums, row, column):
    kept.store(sums.to(gl.bfloat16))
    fence_async_shared()
    store_box(desc, [row, column], kept)


@jit
def multiply_partition(
    y_desc, y_rest_desc, buffers, barriers, kept, kept_rest, rows, outputs, inputs, share,
    half: gl.constexpr, PART: gl.constexpr, REST: gl.constexpr, SHARES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of every tile. ``kept`` and ``kept_rest``: its places in shared memory for
    results and, of a second part whose sums registers do not hold twice, for those of the shares
    before."""
    full, empty = barriers
    WIDE: gl.constexpr = REST > WIDEST
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(outputs, PART + REST)
    step = 0
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        top, first = place_of(unit, rows, outputs, PART + REST, GROUP)
        total, rest, step = share_sum(
            buffers, full, empty, step, steps_of(0, share, inputs), half, REST
        )
        # Results of the tile before have left.
        tma.store_wait(0)
        if WIDE:
            kept_rest.store(rest)
        for number in gl.static_range(1, SHARES):
            acc, more, step = share_sum(
                buffers, full, empty, step, steps_of(number, share, inputs), half, REST
            )
            total += acc
            if WIDE:
                rest = kept_rest.load(more.type.layout) + more
                if number < SHARES - 1:
                    kept_rest.store(rest)
            else:
                rest += more
        if WIDE:
            RESULT: gl.constexpr = y_desc.layout
            both = reinterpret(kept_rest, gl.bfloat16, [2, ROWS, PART], RESULT)
            put(y_desc, both.index(0), total, top + half * ROWS, first)
            put(y_rest_desc, both.index(1), rest, top + half * ROWS, first + PART)
        else:
            put(y_desc, kept, total, top + half * ROWS, first)
            if REST:
                put(y_rest_desc, kept_rest, rest, top + half * ROWS, first + PART)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def shares_kernel(
    x_desc, w_desc, w_rest_desc, y_desc, y_rest_desc, rows, outputs, inputs, share,
    PART: gl.constexpr, REST: gl.constexpr, SHARES: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    release_next()
    SECOND: gl.constexpr = REST if REST else 16
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # A thread's elements of an accumulator, four at a time, then those of the next thread.
    thread: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0],
         [0, 16], [0, 32], [0, 64]]
    )  # fmt: skip
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], tiled)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PART, BLOCK_K], tiled)
    rest_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES if REST else 1, SECOND, BLOCK_K], tiled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    if REST > WIDEST:
        kept_0 = gl.allocate_shared_memory(gl.float32, [ROWS, REST], thread)
        kept_1 = gl.allocate_shared_memory(gl.float32, [ROWS, REST], thread)
        rest_0 = kept_0
        rest_1 = kept_1
    else:
        kept_0 = gl.allocate_shared_memory(gl.bfloat16, [ROWS, PART], y_desc.layout)
        kept_1 = gl.allocate_shared_memory(gl.bfloat16, [ROWS, PART], y_desc.layout)
        rest_0 = gl.allocate_shared_memory(gl.bfloat16, [ROWS, SECOND], y_rest_desc.layout)
        rest_1 = gl.allocate_shared_memory(gl.bfloat16, [ROWS, SECOND], y_rest_desc.layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    buffers = (x_s, w_s, rest_s)
    barriers = (full, empty)
    # 240 + 240 + 24 registers a thread are what a multiprocessor has for three warpgroups.
    gl.warp_specialize([
        (multiply_partition, (y_desc, y_rest_desc, buffers, barriers, kept_0, rest_0, rows, outputs,
                              inputs, share, gl.constexpr(0), PART, REST, SHARES, GROUP)),
        (multiply_partition, (y_desc, y_rest_desc, buffers, barriers, kept_1, rest_1, rows, outputs,
                              inputs, share, gl.constexpr(1), PART, REST, SHARES, GROUP)),
        (load_partition, ((x_desc, w_desc, w_rest_desc), buffers, barriers, rows, outputs, inputs,
                          PART, REST, GROUP)),
    ], [4, 1], [240, 24])  # fmt: skip
