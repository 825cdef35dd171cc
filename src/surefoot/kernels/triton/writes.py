"""Numbers that go from the host to places in many tensors: one kernel writes all of them, where a
tensor operation for each would take the host several times as long. Twin: ``Uploads.send``
on a CPU."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit

BLOCK = 256


@jit(
    do_not_specialize=["wide", "narrow"],
    do_not_specialize_on_alignment=[
        "wide_address_ptr",
        "wide_ptr",
        "narrow_address_ptr",
        "narrow_ptr",
    ],
)
def write_kernel(
    wide_address_ptr, wide_ptr, wide, narrow_address_ptr, narrow_ptr, narrow, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < wide
    address = tl.load(wide_address_ptr + at, mask=inside, other=0)
    value = tl.load(wide_ptr + at, mask=inside, other=0)
    tl.store(address.to(tl.pointer_type(tl.int64)), value, mask=inside)
    inside = at < narrow
    address = tl.load(narrow_address_ptr + at, mask=inside, other=0)
    value = tl.load(narrow_ptr + at, mask=inside, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)), value, mask=inside)


def write_all(
    wide_addresses: torch.Tensor,
    wide_values: torch.Tensor,
    narrow_addresses: torch.Tensor,
    narrow_values: torch.Tensor,
) -> None:
    """Store ``wide_values`` int64 [n] and ``narrow_values`` int32 [m], each at its address, int64,
    in the device's memory. No two of them may be the same."""
    wide, narrow = len(wide_addresses), len(narrow_addresses)
    write_kernel[(cdiv(max(wide, narrow, 1), BLOCK),)](
        wide_addresses, wide_values, wide, narrow_addresses, narrow_values, narrow, BLOCK
    )
