"""How the chunks of a row's attention are added up on Hopper, in Gluon, and results written.

A chunk's softmax joins that of the chunks before it by ``merge_totals`` and ``merged``, in
ascending order; ``prompt_softmax`` says what a chunk is.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from surefoot.kernels.triton.warpgroups import ROWS, jit, reinterpret


@jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@jit
def pivot_of(best):
    """What scores are compared with; a row may have seen no key, and -inf less -inf is NaN."""
    return gl.where(best == float("-inf"), 0.0, best)


@jit
def merge_totals(best, total, whole_best, whole_total, scale):
    """A chunk's softmax joins that of the chunks before it: (highest score, sum of weights, and
    what the values of the chunks before and of this one are multiplied by)."""
    highest = gl.maximum(whole_best, best)
    pivot = pivot_of(highest)
    old = exp2((whole_best - pivot) * scale)
    new = exp2((best - pivot) * scale)
    sums = gl.convert_layout(gl.sum(total, axis=1), best.type.layout)
    return highest, gl.fma(whole_total, old, sums * new), old, new


@jit
def halves(x):
    """[M, N] -> twice [M, N / 2]."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()


@jit
def merged(whole_s, part, old, new):
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    old_row = gl.convert_layout(old, rows)[:, None]
    new_row = gl.convert_layout(new, rows)[:, None]
    return gl.fma(whole_s.load(part.type.layout), old_row, part * new_row)


@jit
def merge(whole, first, acc, old, new):
    """Add a chunk's values to those of the chunks before, half by half to save registers."""
    left, right = halves(acc)
    left_s, right_s = whole
    if first:
        left_s.store(left)
        right_s.store(right)
    else:
        left_s.store(merged(left_s, left, old, new))
        right_s.store(merged(right_s, right, old, new))


@jit
def store_half(
    half_s, values, share, number: gl.constexpr, out_ptr, first, row, count, unit,
    HEADS: gl.constexpr, PACK: gl.constexpr, USED: gl.constexpr,
):  # fmt: skip
    """Half of the columns times ``share``, rounded, by way of shared memory: 16 bytes a store."""
    N: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    tiled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, N], gl.bfloat16)
    rows: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    values = values * gl.convert_layout(share, rows)[:, None]
    stage_s = reinterpret(half_s, gl.bfloat16, [ROWS, N], tiled)
    stage_s.store(values.to(gl.bfloat16))
    result = stage_s.load(layout)
    member = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = number * N + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    within = first + member // PACK
    place = (row + within) * HEADS + unit * USED + member % PACK
    at = place.to(gl.int64)[:, None] * (2 * N) + column[None, :]
    stored = within < count
    if USED < PACK:
        stored = stored & (member % PACK < USED)
    gl.store(out_ptr + at, result, mask=stored[:, None])


@jit
def store_result(
    acc, whole, total, old, new, joins, out_ptr, first, row, count, unit,
    HEADS: gl.constexpr, PACK: gl.constexpr, USED: gl.constexpr,
):  # fmt: skip
    """A tile's rows, its last chunk joined to those before if there are any."""
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    left, right = halves(acc)
    left_s, right_s = whole
    if joins:
        left = merged(left_s, left, old, new)
        right = merged(right_s, right, old, new)
    store_half(left_s, left, share, 0, out_ptr, first, row, count, unit, HEADS, PACK, USED)
    store_half(right_s, right, share, 1, out_ptr, first, row, count, unit, HEADS, PACK, USED)


@jit
def store_part(acc, best, total, parts, chunk):
    """What a chunk adds up to, before it is divided: values, highest score and sum of weights."""
    number, base, stride, members, part_ptr, sums_ptr = parts
    HEAD_DIM: gl.constexpr = acc.shape[1]
    place = base + chunk.to(gl.int64) * stride
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    member = gl.arange(0, ROWS, layout=rows)
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, acc.type.layout))
    at = (place + member)[:, None] * HEAD_DIM + column[None, :]
    gl.store(part_ptr + at, acc, mask=(member < members)[:, None])
    member = gl.arange(0, ROWS, layout=best.type.layout)
    at = 2 * (place + member)
    gl.store(sums_ptr + at, best, mask=member < members)
    gl.store(sums_ptr + at + 1, total, mask=member < members)
