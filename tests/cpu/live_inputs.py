"""Made-up requests whose live rows drafters ask for, for every backend's test."""

from __future__ import annotations

import torch

from surefoot.kernels.drafter_parts import Scratch

SLOTS, BLOCK, BLOCKS, LENGTH = 6, 4, 60, 50
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Scratch]


def live_inputs(steps: int, width: int) -> Inputs:
    """(slots, features before by slot [SLOTS, width], history, length, block tables, scratch) for
    drafts of ``steps``; lengths at the ends of blocks among them."""
    torch.manual_seed(steps)
    length = torch.randint(2, LENGTH - 9, (SLOTS,))
    length[0], length[1], length[2] = 1, BLOCK, BLOCK + 1
    history = torch.randint(0, 99, (SLOTS, LENGTH))
    before = torch.randn(SLOTS, width)
    tables = torch.randint(1, BLOCKS, (SLOTS, LENGTH // BLOCK)).int()
    size = -(-steps // BLOCK)
    scratch = Scratch(BLOCKS, size, BLOCK, LENGTH // BLOCK + size)
    slots = torch.tensor([3, 0, 1, 5, 2])
    return slots, before, history, length, tables, scratch
