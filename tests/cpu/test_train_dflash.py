"""The DFlash family in training is the one in inference: the same numbers, and no leaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.losses import Objective
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint
from surefoot.speculation.proposers.dflash.heads import ConfidenceHead, MarkovChain
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.train import loss as loss_module
from surefoot.train.corpus import Corpus
from surefoot.train.dflash.attention import block_attention
from surefoot.train.dflash.loss import BlockRows, block_loss
from surefoot.train.dflash.options import DFlashTrainOptions, DSparkTrainOptions
from surefoot.train.dflash.recipe import DFlashRecipe
from surefoot.train.loss import Teacher
from test_train_loss import toy
from train_harness import batch_of, check_work, tiny_target, trainer_of, write_documents

DOCUMENTS = [(1, 12), (37, 12), (5, 3)]
KINDS: dict[str, Any] = {
    "dspark": DSparkTrainOptions(layers=2, block=4, markov_rank=8, max_length=64, held_out=1),
    "dflash": DFlashTrainOptions(layers=2, block=5, max_length=64, held_out=1),
}
KINDS |= {f"{kind}, 20 tokens": replace(KINDS[kind], draft_vocab=20) for kind in list(KINDS)}
LAYOUTS = dict(zip(KINDS, ("deepseek", "z-lab", "speculators", "speculators"), strict=True))


def recipe_of(
    folder: Path, kind: str, lengths: Any = tuple(DOCUMENTS), **options: Any
) -> DFlashRecipe:
    """With random weights, heads included."""
    corpus = Corpus([write_documents(folder, lengths)], 64)
    recipe = DFlashRecipe(replace(KINDS[kind], **options), tiny_target(), corpus)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in recipe.network.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return recipe


def served_block(
    network: DFlashNetwork, ids: torch.Tensor, features: torch.Tensor, anchor: int
) -> torch.Tensor:
    """Hidden states [block, hidden] that the engine's network has behind a document's token."""
    kv = network.backend.allocate_kv(network.layers, 10, 16, network.shape)
    tables = torch.arange(1, 10, dtype=torch.int32).unsqueeze(0)

    def rows(first: int, last: int, tokens: torch.Tensor) -> FlatBatch:
        keys = torch.arange(first, last)
        return FlatBatch(tokens, keys, keys, keys * 0, tables, torch.tensor([first]), last)

    network.write_context(features[:anchor], rows(0, anchor, ids[:anchor]), kv)
    tokens = torch.full((network.block,), network.config.mask_token_id)
    tokens[0] = ids[anchor]
    hidden = network.step(None, rows(anchor, anchor + network.block, tokens), kv)
    return network.normed(hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_drafts_as_in_training(kind: str, tmp_path: Path) -> None:
    recipe, target = recipe_of(tmp_path, kind), tiny_target()
    recipe.export(tmp_path / "out")
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    assert checkpoint.config.layout == LAYOUTS[kind]
    assert checkpoint.target_ids.tolist() == recipe.host_ids.tolist()
    assert len(recipe.host_ids) == (20 if "20" in kind else 48)
    served = DFlashNetwork(checkpoint, target.decoder)
    batch = recipe.corpus.batch([0, 1, 2], "cpu")
    features = target.forward(batch, served.captured_layers).features
    anchors = torch.tensor([1, 2, 9, 51, 56, 64])
    with torch.no_grad():
        blocks = recipe.network.blocks(batch, features, anchors, target)
    for anchor, block in zip(anchors.tolist(), blocks, strict=True):
        document = int(batch.document_of[anchor])
        begin, end = (int(batch.starts[document + step]) for step in (0, 1))
        expected = served_block(served, batch.ids[begin:end], features[begin:end], anchor - begin)
        torch.testing.assert_close(block, expected, atol=2e-4, rtol=1e-3)
    drafted, compared = recipe.draft(batch).tokens, 0
    for anchor, block in zip(anchors.tolist(), blocks, strict=True):
        for draft, row in enumerate(block[checkpoint.config.first_row :]):
            if drafted[anchor - 1, draft] >= 0:
                logits = row @ recipe.head.T
                if "dspark" in kind:
                    read = recipe.network.before(batch.ids[anchor + draft].view(1))
                    after = recipe.network.weight("markov_head.markov_w2.weight")
                    assert read is not None
                    logits = logits + (read @ after.T)[0]
                assert drafted[anchor - 1, draft] == recipe.host_ids[logits.argmax()]
                compared += 1
    assert compared >= 14
    if "dflash" in kind:
        return
    hidden, previous = blocks[:, 1], batch.ids[anchors + 1]
    before = recipe.network.before(previous)
    confidence = ConfidenceHead(checkpoint, target.decoder.backend).scores(hidden, previous)
    torch.testing.assert_close(
        recipe.network.confidence(hidden, before), confidence, atol=1e-5, rtol=1e-4
    )
    chain = MarkovChain(checkpoint, target.decoder.backend)
    logits, _ = chain.conditioned(hidden @ recipe.head.T, previous, hidden, None)
    after = recipe.network.weight("markov_head.markov_w2.weight")
    assert before is not None
    torch.testing.assert_close(
        hidden @ recipe.head.T + before @ after.T, logits, atol=1e-4, rtol=1e-4
    )


def test_layers_and_masks_are_told_as_each_project_counts(tmp_path: Path) -> None:
    for kind in KINDS:
        recipe = recipe_of(tmp_path / "data", kind, captured_layers="1,3", mask_token=5)
        recipe.export(tmp_path / kind)
        config = json.loads((tmp_path / kind / "config.json").read_text())
        own = config["dflash_config"] if kind == "dflash" else config
        assert own["mask_token_id"] == 5
        if LAYOUTS[kind] == "speculators":
            assert own["aux_hidden_state_layer_ids"] == [1, 3]
        else:
            assert own["target_layer_ids"] == [0, 2]
        assert recipe.layers == open_checkpoint(str(tmp_path / kind)).config.layers_of(4) == (1, 3)
    assert DSparkTrainOptions().layers_of(30) == (2, 9, 15, 21, 28)


def test_attention_of_blocks_and_its_gradients(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [(3, 4), (1, 2), (2, 9)])
    anchors, rows = torch.tensor([3, 5, 8, 12, 13]), 3
    generator = torch.Generator().manual_seed(4)

    def made(*shape: int) -> torch.Tensor:
        return (1.5 * torch.randn(*shape, 8, generator=generator)).requires_grad_()

    count, blocks = len(batch), len(anchors)
    q = made(blocks, rows, 4)
    k, v, own_k, own_v = (
        made(count, 2),
        made(count, 2),
        made(blocks, rows, 2),
        made(blocks, rows, 2),
    )
    keys, values = (
        torch.cat((x, y.flatten(0, 1))).repeat_interleave(2, dim=1)
        for x, y in ((k, own_k), (v, own_v))
    )
    place = torch.arange(count)
    same = batch.documents[anchors].unsqueeze(1) == batch.documents
    known = (same & (place < anchors.unsqueeze(1))).repeat_interleave(rows, dim=0)
    own = torch.block_diag(*[torch.ones(rows, rows)] * blocks).bool()
    scores = 0.3 * torch.einsum("qhd,khd->hqk", q.flatten(0, 1), keys)
    scores = scores.masked_fill(~torch.cat((known, own), dim=1), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).view_as(q)
    out = block_attention(q, (k, v), (own_k, own_v), anchors, batch, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    pull, inputs = torch.randn(q.shape, generator=generator), (q, k, v, own_k, own_v)
    wanted = torch.autograd.grad((expected * pull).sum(), inputs)
    found = torch.autograd.grad((out * pull).sum(), inputs)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_a_block_sees_neither_its_anchors_feature_nor_other_blocks(tmp_path: Path) -> None:
    recipe, target = recipe_of(tmp_path, "dspark"), tiny_target()
    batch = recipe.corpus.batch([0, 2], "cpu")
    features = target.forward(batch, recipe.layers).features.requires_grad_()
    few, many = torch.tensor([4, 17]), torch.tensor([3, 4, 5, 6, 17, 18])
    blocks = recipe.network.blocks(batch, features, few, target)
    for index, anchor in enumerate(few.tolist()):
        [gradient] = torch.autograd.grad(blocks[index].sum(), features, retain_graph=True)
        reached, begin = gradient.abs().amax(1), int(batch.starts[batch.document_of[anchor]])
        assert bool((reached[begin:anchor] > 0).all())
        assert not reached[anchor:].any() and not reached[:begin].any()
    again = recipe.network.blocks(batch, features, many, target)
    torch.testing.assert_close(again[[1, 4]], blocks, atol=1e-5, rtol=1e-5)


def test_rows_that_count_and_how_much(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "dspark", anchors=1.0)
    batch = recipe.corpus.batch([2], "cpu")
    anchors, share = recipe.draw(batch, 0)
    # Prompt 0-4, answer 5-7: drafts behind 5 and 6 alone can be judged.
    assert anchors.tolist() == [5, 6] and share.tolist() == [1, 1]
    valid = recipe.valid(batch, anchors)
    assert valid.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert recipe.learnt(batch, anchors).tolist() == valid.tolist()
    rows, _, (block, draft) = recipe._rows(batch, anchors, valid)
    assert rows.labels.tolist() == batch.ids[[6, 7, 7]].tolist()
    assert list(zip(block, draft, strict=True)) == [(0, 0), (0, 1), (1, 0)]
    # Of two turns the second does not go on from the first: behind 5 only 6, not 9.
    assert recipe.valid(toy(), np.array([3, 5, 9])).sum(axis=1).tolist() == [3, 1, 2]
    weights = np.exp(-np.arange(4) / 4)
    assert recipe.decay.tolist() == pytest.approx(weights / weights.sum())


def test_what_cannot_be_drafted_ends_a_block(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "dspark", anchors=1.0, draft_vocab=8)
    batch = recipe.corpus.batch([1], "cpu")
    known = set(recipe.host_ids.tolist())
    anchors, _ = recipe.draw(batch, 0)
    learnt = recipe.learnt(batch, anchors)
    for anchor, row in zip(anchors.tolist(), learnt.tolist(), strict=True):
        text = batch.ids[anchor + 1 : anchor + 5].tolist()
        expected = [j < len(text) and known.issuperset(text[: j + 1]) for j in range(4)]
        assert row == expected
    assert learnt.any() and learnt.sum() < recipe.valid(batch, anchors).sum()
    rows, teacher, (block, draft) = recipe._rows(batch, anchors, learnt)
    assert len(block) == learnt.sum()
    # Labels are draft ids, the teacher's distribution is that of the draft vocabulary.
    told = recipe.host_ids[rows.labels]
    assert told.tolist() == batch.ids[anchors[block] + draft + 1].tolist()
    forward = recipe.target.forward(batch, recipe.layers)
    place = (batch.generated & batch.ahead(batch.generated, 1)).nonzero()[0]
    logits = recipe.target.logits(forward.before_norm[place])
    among = logits[:, recipe.host_ids].log_softmax(-1)
    torch.testing.assert_close(teacher.logprobs, among, atol=1e-5, rtol=1e-5)
    share = logits.softmax(-1)[:, recipe.host_ids].sum(-1)
    torch.testing.assert_close(teacher.share, share, atol=1e-5, rtol=1e-5)
    assert teacher.likeliest.tolist() == logits.argmax(-1).tolist()
    # Held-out texts are drafted for and judged everywhere, with the whole distribution.
    found = recipe.draft(batch)
    assert (found.tokens >= 0).sum() == recipe.valid(batch, anchors).sum() > learnt.sum()
    assert set(found.tokens[found.tokens >= 0].tolist()) <= known
    assert found.overlap[anchors[0] - 1, 0] <= share[0] + 1e-5
    assert 0 < recipe.coverage < 1


def test_anchors_depend_on_step_and_document_alone(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "dspark", anchors=0.4)
    together = recipe.corpus.batch([0, 1], "cpu")
    drawn, _ = recipe.draw(together, 7)
    alone = np.concatenate(
        [recipe.draw(recipe.corpus.batch([index], "cpu"), 7)[0] + 13 * index for index in (0, 1)]
    )
    assert drawn.tolist() == alone.tolist() != recipe.draw(together, 8)[0].tolist()
    # 10 and 11 current tokens: 4.4 and 4.4, the next whole ones.
    assert recipe.divisor([0, 1], "token") == len(drawn)
    alike = recipe_of(tmp_path, "dspark", anchors=0.4, weighting="document")
    _, share = alike.draw(together, 7)
    assert share.sum() == pytest.approx(alike.divisor([0, 1], "document")) == 2


@pytest.mark.parametrize("objective", [(1.0, 0.0), (0.1, 0.9)])
def test_block_loss_and_its_gradients(
    objective: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "SLICE", 4)
    generator = torch.Generator().manual_seed(1)
    hidden, before, after = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in ((11, 8), (11, 3), (20, 3))
    )
    head = torch.randn(20, 8, generator=generator)
    logprobs = torch.randn(6, 20, generator=generator).log_softmax(-1)
    likeliest = logprobs.argmax(-1)
    teacher = Teacher(logprobs, likeliest, likeliest, torch.ones(6))
    places, labels = torch.arange(11) % 6, torch.arange(11) + 3
    weights = torch.rand(11, generator=generator)
    q = (hidden @ head.T + before @ after.T).log_softmax(-1)
    distance = (q.exp() - logprobs[places].exp()).abs().sum(-1)
    right = -q.gather(1, labels.unsqueeze(1)).squeeze(1)
    expected = (weights * (objective[0] * right + objective[1] * distance)).sum()
    wanted = torch.autograd.grad(2 * expected, (hidden, before, after))
    rows = BlockRows(hidden, before, places, labels)
    loss, overlap, counts = block_loss(rows, head, after, teacher, weights, Objective(*objective))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(overlap, 1 - distance.detach() / 2)
    assert counts.tolist() == [11, float((q.argmax(-1) == teacher.best[places]).sum())]
    found = torch.autograd.grad(2 * loss, (hidden, before, after))
    for left, expected_gradient in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, expected_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_splitting_a_step_changes_nothing(kind: str, tmp_path: Path) -> None:
    for weighting in ("token", "document"):
        recipe = recipe_of(tmp_path, kind, weighting=weighting, anchors=0.5)
        divisor = recipe.divisor([0, 1, 2], weighting)
        grads = []
        for packs in ([[0, 1, 2]], [[0], [2, 1]]):
            recipe.network.zero_grad()
            for pack in packs:
                loss, _ = recipe.loss(recipe.corpus.batch(pack, "cpu"), divisor, 3)
                loss.backward()
            grads.append(
                [v.grad.clone() for v in recipe.network.parameters() if v.grad is not None]
            )
        for left, right in zip(*grads, strict=True):
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-3)


def test_it_learns_64_sequences_by_heart(tmp_path: Path) -> None:
    corpus = Corpus([write_documents(tmp_path / "data", [(2, 4)] * 65)], 64)
    options = replace(
        KINDS["dflash"], block=2, layers=1, steps=70, step_tokens=2048, batch_tokens=2048,
        anchors=1.0, learning_rate=1e-2, measure_every=10**9,
    )  # fmt: skip
    recipe = DFlashRecipe(options, tiny_target(), corpus)
    trainer_of(recipe, tmp_path / "run").run()
    documents, _ = corpus.split(1, 0)
    batch = corpus.batch(documents.tolist(), "cpu")
    drafted, rows = recipe.draft(batch), batch.pairs.nonzero()[0]
    # Its objective is the text itself.
    right = drafted.tokens[rows, 0] == batch.ids.numpy()[rows + 2]
    assert len(documents) == 64 and right.mean() > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_a_step_is_that_of_its_products(kind: str, tmp_path: Path) -> None:
    check_work(recipe_of(tmp_path, kind))
