"""Training on a GPU: its flash attention and its head's products against float32 on the CPU, and a
short run in mixed precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from surefoot.kernels.losses import Objective
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.train.attention import chain_attention
from surefoot.train.corpus import Corpus
from surefoot.train.dflash.attention import block_attention
from surefoot.train.dflash.options import DSparkTrainOptions
from surefoot.train.dflash.recipe import DFlashRecipe
from surefoot.train.eagle3.options import Eagle3TrainOptions
from surefoot.train.eagle3.recipe import Eagle3Recipe
from surefoot.train.loss import Teacher, soft_cross_entropy
from test_triton_losses import OBJECTIVES, check_row_losses
from train_harness import batch_of, tiny_target, trainer_of, write_documents

pytestmark = pytest.mark.gpu
ON_DEVICE = False
TOLERANCE = 2e-2
"""bf16 has 8 bits; sums over a softmax of bf16 products."""


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_of_rows(objective: Objective) -> None:
    check_row_losses(objective, 40, 49152)


@pytest.mark.parametrize("steps", [1, 4])
def test_attention_and_gradients(steps: int, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [(3, 40), (1, 2), (20, 130)])
    there = replace(
        batch, documents=batch.documents.cuda(), positions=batch.positions.cuda(),
        offsets=batch.offsets.cuda(),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)

    def made(heads: int) -> torch.Tensor:
        return torch.randn(len(batch), heads, 64, generator=generator).bfloat16().float()

    inputs = [made(9), *(made(3) for _ in range(2 * steps))]
    pull = made(9)
    results = []
    for device, kind, own in (("cpu", torch.float32, batch), ("cuda", torch.bfloat16, there)):
        own_inputs = [x.to(device, kind).requires_grad_() for x in inputs]
        q, keys, values = own_inputs[0], own_inputs[1 : steps + 1], own_inputs[steps + 1 :]
        out = chain_attention(q, list(keys), list(values), own, 0.125)
        grads = torch.autograd.grad((out.float() * pull.to(device)).sum(), own_inputs)
        results.append([x.detach().float().cpu() for x in (out, *grads)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() < TOLERANCE * expected.norm()


def test_attention_of_blocks_and_gradients(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [(3, 40), (1, 2), (20, 130)])
    there = replace(
        batch, documents=batch.documents.cuda(), positions=batch.positions.cuda(),
        offsets=batch.offsets.cuda(), ids=batch.ids.cuda(),
    )  # fmt: skip
    anchors = torch.tensor([3, 4, 20, 44, 70, 150, 190])
    generator = torch.Generator().manual_seed(4)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 64, generator=generator).bfloat16().float()

    inputs = [made(7, 5, 9), *(made(len(batch), 3) for _ in "kv"), *(made(7, 5, 3) for _ in "kv")]
    pull = made(7, 5, 9)
    results = []
    for device, kind, own in (("cpu", torch.float32, batch), ("cuda", torch.bfloat16, there)):
        q, k, v, own_k, own_v = (x.to(device, kind).requires_grad_() for x in inputs)
        out = block_attention(q, (k, v), (own_k, own_v), anchors.to(device), own, 0.125)
        grads = torch.autograd.grad((out.float() * pull.to(device)).sum(), (q, k, v, own_k, own_v))
        results.append([x.detach().float().cpu() for x in (out, *grads)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() < TOLERANCE * expected.norm()


def test_loss_and_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 64, generator=generator).bfloat16().float()
    head = torch.randn(500, 64, generator=generator).bfloat16().float()
    logprobs = torch.randn(300, 500, generator=generator).log_softmax(-1)
    rows, weights = torch.arange(300).flip(0), torch.rand(300, generator=generator)
    results = []
    for device, kind, kept in (
        ("cpu", torch.float32, torch.float32),
        ("cuda", torch.bfloat16, torch.float16),
    ):
        x = hidden.to(device, kind).requires_grad_()
        w = head.to(device).requires_grad_()
        teacher = Teacher(
            logprobs.to(device, kept),
            logprobs.argmax(-1).to(device),
            logprobs.argmax(-1).to(device),
            torch.ones(300, device=device),
        )
        loss, _ = soft_cross_entropy(x, w, teacher, rows.to(device), weights.to(device))
        grads = torch.autograd.grad(loss, (x, w))
        results.append([y.detach().float().cpu() for y in (loss, *grads)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() < TOLERANCE * expected.norm()


def test_a_short_run_learns(tmp_path: Path) -> None:
    backend = TritonBackend("cuda", torch.bfloat16)
    corpus = Corpus([write_documents(tmp_path / "data", [(2, 30)] * 40)], 64)
    options = Eagle3TrainOptions(
        draft_vocab=40, unroll=4, max_length=64, held_out=2, steps=60, step_tokens=2048,
        batch_tokens=2048, learning_rate=5e-3,
    )  # fmt: skip
    recipe = Eagle3Recipe(options, tiny_target(backend=backend), corpus)
    batch = corpus.batch(list(range(20)), "cuda")
    before = float(recipe.loss(batch, 20.0, 0)[0].detach())
    outcome = trainer_of(recipe, tmp_path / "run").run()
    assert float(recipe.loss(batch, 20.0, 0)[0].detach()) < 0.95 * before
    assert outcome.complete
    recipe.export(tmp_path / "out")
    spark = DSparkTrainOptions(
        layers=2, max_length=64, held_out=2, steps=20, step_tokens=2048, batch_tokens=1024
    )
    other = DFlashRecipe(spark, recipe.target, corpus)
    assert trainer_of(other, tmp_path / "spark").run().complete
    other.export(tmp_path / "spark")
