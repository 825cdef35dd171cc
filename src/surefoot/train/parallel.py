"""Several processes, one GPU each, started by torchrun: the same numbers as one process, sooner."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from surefoot.errors import SurefootError


@dataclass(frozen=True)
class Workers:
    """``rank`` of ``count`` processes."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this one measures, writes and speaks."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by the sum over all processes."""
        found = list(tensors)
        if self.count == 1 or not found:
            return
        flat = torch.cat([tensor.flatten() for tensor in found])
        distributed.all_reduce(flat)
        for tensor, piece in zip(found, flat.split([t.numel() for t in found]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def agree(self, stop: bool, device: torch.device) -> bool:
        """Whether any process wants to stop."""
        wish = torch.tensor([float(stop)], device=device)
        self.add_up([wish])
        return bool(wish.item())


def device_of(device: str) -> str:
    """The device of this process: torchrun's n-th takes the n-th GPU."""
    if "WORLD_SIZE" not in os.environ or not device.startswith("cuda"):
        return device
    if device != "cuda":
        raise SurefootError("device", f"{device!r} names a GPU, and torchrun does", "use cuda")
    return f"cuda:{os.environ['LOCAL_RANK']}"


@contextmanager
def workers(device: str) -> Iterator[Workers]:
    """This process among those of torchrun; alone without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Workers()
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Workers(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
