"""Programmatic dependent launch: a kernel's blocks start while the kernel before it still ends.

Every kernel launched this way calls ``await_inputs`` on all of its paths, before it writes anything
and before it reads what the kernels just ahead of it write. A kernel that has passed it knows every
earlier one to be complete, so buffers may be reused as on an ordinary stream. ``release_next`` lets
the next kernel's blocks in once all of this kernel's blocks have called it or ended. Products call
it after ``await_inputs``: whatever was launched before a product is complete for the kernels behind
it, which may read that much before they wait (a batch's positions and block tables, say). Products
of more than 128 rows (``shares_kernel``) call it first: behind these, what is read before waiting
has to be older than the product before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from surefoot.kernels.triton.launch import jit


@jit
def await_inputs(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@jit
def release_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@jit
def prefetch(pointers, size):
    """Ask for ``size`` bytes (a multiple of 16) behind each of the aligned ``pointers`` to be
    brought to the L2 cache. Only on devices that ``overlaps`` is true for."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [pointers.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on ``device`` are launched so: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel on ``device``, its constexpr ``PDL`` among them."""
    on = overlaps(device)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}
