"""What launches have in common."""

from __future__ import annotations

import functools

import torch
import triton

from surefoot.errors import SurefootError

DTYPES = (torch.float32, torch.bfloat16)
DEFAULT_PROCESSORS = 132  # of an H100 or H200 SXM; what the interpreter pretends to have


def next_power_of_2(number: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(number))


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return _count(device) if device.type == "cuda" else DEFAULT_PROCESSORS


@functools.cache
def _count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def interpreted() -> bool:
    """Whether kernels defined from now on run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


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
