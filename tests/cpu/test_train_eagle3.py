"""EAGLE-3 in training is EAGLE-3 in inference: the same numbers, and nothing that leaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_reference import Flags, random_checkpoint
from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.quant import dense
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter
from surefoot.train.attention import chain_attention
from surefoot.train.corpus import Batch
from surefoot.train.eagle3.network import Eagle3Network
from train_harness import batch_of, tiny_target

STEPS = 4
DOCUMENTS = [(1, 9), (37, 12), (5, 3)]
ORDINARY = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
VARIANTS = {
    "plain": Flags(draft_vocab=40, theta=5000.0, extra=ORDINARY),
    "3.1": Flags(
        fc_norm=True, norm_output=True, norm_before_residual=True, qk_norm=True, extra=ORDINARY
    ),
    "biases": Flags(norm_before_fc=True, attention_bias=True, extra=ORDINARY),
}


def network_of(folder: Path, flags: Flags) -> tuple[Eagle3Network, Eagle3Drafter]:
    """The network to be trained, with the weights of a checkpoint, and the drafter from it."""
    random_checkpoint(folder, flags)
    checkpoint = open_checkpoint(str(folder))
    network = Eagle3Network(
        checkpoint.config, dense(checkpoint.tensors["lm_head.weight"]), 200, torch.float32
    )
    own = dict(network.named_parameters())
    names = {name: dense(checkpoint.tensors[name]) for name in network.tensors()}
    with torch.no_grad():
        for name, tensor in names.items():
            own[name.replace(".", "/")].copy_(tensor)
    return network, Eagle3Drafter(checkpoint, tiny_target().decoder)


def chain(
    drafter: Eagle3Drafter, ids: torch.Tensor, features: torch.Tensor, start: int
) -> torch.Tensor:
    """Logits [STEPS, draft vocabulary] of the engine's network with its cache: the chain that
    begins at slot ``start``, whose drafts are the document's own tokens."""
    kv = drafter.backend.allocate_kv(1, 10, 16, drafter.shape)
    tables = torch.arange(1, 10, dtype=torch.int32).unsqueeze(0)

    def rows(first: int, last: int) -> FlatBatch:
        keys = torch.arange(first, last)
        slots = torch.zeros_like(keys)
        return FlatBatch(
            ids[keys], keys - 1, keys, slots, tables, torch.tensor([first]), last, first_key=1
        )

    fused = drafter.fuse(features)
    if start:
        drafter.write_keys(fused[:start], rows(1, start + 1), kv)
    found, hidden = [], fused[start : start + 1]
    for step in range(STEPS):
        entry = start + 1 + step
        hidden = drafter.step(hidden, rows(entry, entry + 1), kv)
        found.append(drafter.logits(hidden)[0])
        hidden = drafter.fed_back(hidden)
    return torch.stack(found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_inference_equals_training_rows(variant: str, tmp_path: Path) -> None:
    network, drafter = network_of(tmp_path / "draft", VARIANTS[variant])
    batch, target = batch_of(tmp_path, DOCUMENTS), tiny_target()
    features = target.forward(batch, drafter.captured_layers).features
    with torch.no_grad():
        steps = network.unroll(batch, features, target, STEPS)
        logits = torch.stack([hidden @ network.head.T for hidden in steps], dim=1)
    compared = 0
    for document, begin in enumerate(batch.starts[:-1]):
        end = batch.starts[document + 1]
        ids, own = batch.ids[begin:end], features[begin:end]
        for start in (0, 1, end - begin - 1 - STEPS, 36):
            if 0 <= start <= end - begin - 1 - STEPS:
                expected = chain(drafter, ids, own, int(start))
                torch.testing.assert_close(logits[begin + start], expected, atol=2e-4, rtol=1e-4)
                compared += 1
    assert compared >= 6


def dense_attention(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], batch: Batch
) -> torch.Tensor:
    """The same by one dense mask over all steps' keys."""
    count, heads = q.shape[0], q.shape[1]
    row, key = torch.arange(count).unsqueeze(1), torch.arange(count * len(keys))
    same = batch.documents[row] == batch.documents[key % count]
    visible = torch.where(key < count, (key <= row) & same, key % count == row)
    group = heads // keys[0].shape[1]
    k, v = (torch.cat(list(x)).repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("steps", [1, 3])
def test_attention_and_its_gradients(steps: int, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [(3, 4), (1, 2), (2, 9)])
    generator = torch.Generator().manual_seed(4)

    def made(heads: int) -> torch.Tensor:
        return (1.5 * torch.randn(len(batch), heads, 8, generator=generator)).requires_grad_()

    q, keys, values = made(4), [made(2) for _ in range(steps)], [made(2) for _ in range(steps)]
    inputs = [q, *keys, *values]
    pull = torch.randn(len(batch), 4, 8, generator=generator)
    expected = dense_attention(q, keys, values, batch)
    wanted = torch.autograd.grad((expected * pull).sum(), inputs)
    out = chain_attention(q, keys, values, batch, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad((out * pull).sum(), inputs)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_no_row_learns_from_what_it_could_not_see(tmp_path: Path) -> None:
    network, drafter = network_of(tmp_path / "draft", VARIANTS["plain"])
    batch, target = batch_of(tmp_path, [(4, 6), (5, 7)]), tiny_target()
    features = target.forward(batch, drafter.captured_layers).features.requires_grad_()
    steps = network.unroll(batch, features, target, STEPS)
    for row in (3, 14):
        begin = int(batch.starts[batch.document_of[row]])
        for hidden in steps:
            [gradient] = torch.autograd.grad(hidden[row].sum(), features, retain_graph=True)
            reached = gradient.abs().amax(1)
            assert bool((reached[begin : row + 1] > 0).all()), "it reads all features up to its own"
            assert not reached[row + 1 :].any() and not reached[:begin].any()


def test_tokens_ahead_matter_only_once_drafted(tmp_path: Path) -> None:
    network, drafter = network_of(tmp_path / "draft", VARIANTS["plain"])
    batch, target = batch_of(tmp_path, [(4, 8)]), tiny_target()
    features = target.forward(batch, drafter.captured_layers).features
    ids = batch.ids.clone()
    ids[7] = (ids[7] + 1) % 40
    with torch.no_grad():
        before = network.unroll(batch, features, target, STEPS)
        after = network.unroll(replace(batch, ids=ids), features, target, STEPS)
    # Row 4 reads token 5 + k at step k, so that token 7 enters at step 2.
    changed = [bool((left[4] != right[4]).any()) for left, right in zip(before, after, strict=True)]
    assert changed == [False, False, True, True]
