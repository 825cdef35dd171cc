"""What launches have in common."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton import knobs

from surefoot.errors import SurefootError

jit: Any = triton.jit
"""The decorator, untyped: parameters of kernels are pointers and launch options come on top.

Triton compiles a kernel anew for integers that are 1 or divisible by 16 and for pointers that are
not aligned to 16 bytes. Called rounds come in all sizes, and a compilation in the
middle of serving holds up everybody for half a second, so parameters that differ between rounds are
named in ``do_not_specialize`` and ``do_not_specialize_on_alignment``.
"""
SPAN_COLUMNS = ["slots_ptr", "known_ptr", "drafts_ptr", "samples_ptr"]
"""Columns of a round's plan, which lie packed: ``do_not_specialize_on_alignment``."""
DTYPES = (torch.float32, torch.bfloat16)
DEFAULT_PROCESSORS = 132  # of an H100 or H200 SXM; what the interpreter pretends to have
DEFAULT_SHARED_MEMORY = 232_448


def next_power_of_2(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return _count(device) if device.type == "cuda" else DEFAULT_PROCESSORS


def shared_memory(device: torch.device) -> int:
    """Bytes of it that one program may have at most."""
    return _shared(device) if device.type == "cuda" else DEFAULT_SHARED_MEMORY


@functools.cache
def _shared(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def _count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether ``device`` has the matrix instructions of warpgroups (``wgmma``), which neither older
    nor younger ones have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def interpreted() -> bool:
    """Whether kernels defined from now on run in Triton's interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """SurefootError unless kernels can run on ``device`` with ``dtype``."""
    if device.type != "cuda" and not interpreted():
        raise SurefootError(
            "device", f"the triton backend does not run on {device}", "use an NVIDIA GPU"
        )
    if dtype not in DTYPES:
        raise SurefootError(
            "dtype", f"{dtype} is not supported on this backend", "use bfloat16 or float32"
        )
