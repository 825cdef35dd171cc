"""Numbers that go from the host to places in many tensors: one kernel writes all of them, where a
tensor operation for each would take the host several times as long. Twin: ``Uploads.send``
on a CPU."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit

BLOCK = 256


@jit(do_not_specialize=["wide", "narrow"])
def write_kernel(buffer_ptr, wide, narrow, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words_ptr = buffer_ptr.to(tl.pointer_type(tl.int64))
    inside = at < wide
    address = tl.load(words_ptr + at, mask=inside, other=0)
    value = tl.load(words_ptr + wide + at, mask=inside, other=0)
    tl.store(address.to(tl.pointer_type(tl.int64)), value, mask=inside)
    words_ptr += 2 * wide
    inside = at < narrow
    address = tl.load(words_ptr + at, mask=inside, other=0)
    halves_ptr = (words_ptr + narrow).to(tl.pointer_type(tl.int32))
    value = tl.load(halves_ptr + at, mask=inside, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)), value, mask=inside)


def write_all(buffer: torch.Tensor, wide: int, narrow: int) -> None:
    """Store numbers at addresses in the device's memory, no two at the same. ``buffer`` uint8
    begins with addresses and values, int64 both, of ``wide`` int64 numbers; then the addresses of
    ``narrow`` numbers of 32 bits, and these."""
    write_kernel[(cdiv(max(wide, narrow, 1), BLOCK),)](buffer, wide, narrow, BLOCK)
