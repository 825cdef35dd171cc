"""The Triton kernel of the losses of drafters' heads against its torch twin, run by Triton's
interpreter; the twin's gradients against autograd's are ``test_train_loss``'s."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels import losses as reference
from surefoot.kernels.losses import Objective
from surefoot.kernels.triton import losses
from triton_interpreter import DEVICE

OBJECTIVES = [Objective(cross_entropy=1.0), Objective(1.0), Objective(0.1, 0.9), Objective(1, 2, 3)]
"""EAGLE-3's, DFlash's, DSpark's, and all at once."""


@pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_row_losses(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_BLOCK", 16)
    check_row_losses(objective, 7, 50)


def check_row_losses(objective: Objective, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(rows, width, generator=generator)
    # The likeliest twice, in two blocks.
    logits[1, 5] = logits[1, width - 2] = 30
    teacher = (3 * torch.randn(4, width, generator=generator)).log_softmax(-1).half()
    places = torch.arange(rows) % 4
    labels = (13 * torch.arange(rows)) % width if objective.label else None
    weights = torch.rand(rows, generator=generator)
    tensors = [
        None if x is None else x.to(DEVICE) for x in (logits, teacher, places, labels, weights)
    ]
    found = losses.row_losses(*tensors, objective, torch.bfloat16)  # type: ignore[arg-type]
    wanted = reference.row_losses(*tensors, objective, torch.float32)  # type: ignore[arg-type]
    assert found.best.tolist() == wanted.best.tolist()
    assert found.best[1] == 5
    torch.testing.assert_close(found.losses, wanted.losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.overlap, wanted.overlap, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.d_logits.float(), wanted.d_logits, atol=1e-5, rtol=1e-2)
