"""Runs the interpreter's checks on the device: they are imported from tests/cpu.

A module with ``ON_DEVICE = False`` gets tensors where it asks for them: whole engines keep some on
the host.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

sys.path.append(str(Path(__file__).parents[1] / "cpu"))


class OnDevice(TorchFunctionMode):
    """New tensors are made on the GPU; those drawn with a generator on the CPU are moved there, so
    that numbers are the same as without a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs).cuda()
        return func(*args, **kwargs, device="cuda")


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    with OnDevice() if getattr(request.module, "ON_DEVICE", True) else nullcontext():
        yield
    torch.cuda.synchronize()


@pytest.fixture
def fresh_numbers() -> None:
    """Random numbers that are new in every run; the seed is printed when a test fails."""
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    random.seed(seed)
