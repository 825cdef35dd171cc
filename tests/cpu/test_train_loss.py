"""What is learned from which row: the loss, its weights, the draft vocabulary, and the measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot import SurefootError
from surefoot.kernels.reference import rms_norm
from surefoot.train import loss as loss_module
from surefoot.train.corpus import Batch, Corpus
from surefoot.train.eagle3.options import Eagle3TrainOptions
from surefoot.train.loss import Teacher, compare, soft_cross_entropy, teach
from surefoot.train.measure import Measurement, Walk, score
from surefoot.train.recipe import Drafted
from surefoot.train.shards import Document, shard_path, write_shard
from surefoot.train.vocabulary import choose_vocabulary
from train_harness import LAYERS, VOCAB, batch_of, recipe_of, tiny_target, write_documents

DOCUMENTS = [(3, 6), (5, 2), (2, 9)]


def test_the_teacher_is_the_target_with_its_final_norm(tmp_path: Path) -> None:
    batch, target = batch_of(tmp_path, DOCUMENTS), tiny_target()
    before = target.forward(batch, ()).before_norm
    decoder = target.decoder
    normed = rms_norm(before, decoder.norm, target.config.norm_eps)
    logits = normed @ decoder.table.T
    torch.testing.assert_close(target.logits(before), logits, atol=1e-5, rtol=1e-5)
    # Leaving the norm out would not go unnoticed here.
    assert (logits - before @ decoder.table.T).abs().max() > 0.1
    ids = torch.arange(1, VOCAB, 2)
    teacher = teach(target, before, ids, torch.float32)
    p = logits.softmax(-1)
    torch.testing.assert_close(teacher.share, p[:, ids].sum(-1), atol=1e-5, rtol=1e-5)
    expected = (p[:, ids] / p[:, ids].sum(-1, keepdim=True)).log()
    torch.testing.assert_close(teacher.logprobs, expected, atol=1e-4, rtol=1e-4)
    for row, best in enumerate(logits.argmax(-1).tolist()):
        assert teacher.best[row] == (best // 2 if best % 2 else -1)


def test_captured_layers_are_what_enters_them(tmp_path: Path) -> None:
    batch, target = batch_of(tmp_path, DOCUMENTS), tiny_target()
    seen: list[torch.Tensor] = []
    backend = target.decoder.backend
    original = type(backend).layer

    def watched(weights, x, *rest, **others):  # type: ignore[no-untyped-def]
        seen.append(x.clone())
        return original(backend, weights, x, *rest, **others)

    backend.layer = watched  # type: ignore[method-assign]
    try:
        features = target.forward(batch, (1, 2, 3)).features
    finally:
        del backend.layer
    assert len(seen) == LAYERS
    assert torch.equal(features, torch.cat(seen[1:], dim=1))


def test_documents_do_not_touch_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or alone, in one forward or in several: the same features."""
    target, whole = tiny_target(), batch_of(tmp_path, DOCUMENTS)
    together = target.forward(whole, (1,))
    monkeypatch.setattr("surefoot.train.target._ROWS", 10)
    parts = target.forward(whole, (1,))
    torch.testing.assert_close(parts.features, together.features, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts.before_norm, together.before_norm, atol=1e-5, rtol=1e-5)
    corpus = Corpus([write_documents(tmp_path, DOCUMENTS)], 160)
    for index in range(3):
        alone = target.forward(corpus.batch([index], "cpu"), (1,))
        piece = slice(int(whole.starts[index]), int(whole.starts[index + 1]))
        torch.testing.assert_close(
            alone.before_norm, together.before_norm[piece], atol=1e-5, rtol=1e-5
        )


def toy() -> Batch:
    """12 tokens, two turns: prompt 0-2, answer 3-6, prompt 7-8, answer 9-11."""
    ids = torch.arange(12)
    generated = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    return Batch(
        ids, ids, ids * 0, torch.tensor([0, 12], dtype=torch.int32), generated,
        ids.numpy(), np.array([0, 12]), np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64),
    )  # fmt: skip


def test_rows_that_count_are_the_chains_that_the_engine_drafts(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, DOCUMENTS)
    found = [
        (row, step, row + 1 + step, row + 2 + step)
        for step, valid in enumerate(recipe.valid(toy()))
        for row in valid.nonzero()[0].tolist()
    ]
    expected = []
    for first, last in ((3, 6), (9, 11)):
        # The engine's current token is any generated one but the last: its chain begins at the
        # slot before, and stands for what follows it up to the end of the turn.
        for current in range(first, last):
            for step in range(3):
                if current + 1 + step <= last:
                    expected.append((current - 1, step, current + step, current + 1 + step))
    assert sorted(found) == sorted(expected)
    assert (2, 0, 3, 4) in found and (5, 0, 6, 7) not in found


def naive(
    hidden: torch.Tensor, head: torch.Tensor, teacher: Teacher, rows: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    q = (hidden @ head.T).log_softmax(-1)
    loss = -(teacher.logprobs[rows].exp() * q).sum(-1)
    return (loss * w * (teacher.best[rows] >= 0)).sum()


def test_loss_in_slices_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "SLICE", 4)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 8, generator=generator, requires_grad=True)
    head = torch.randn(20, 8, generator=generator, requires_grad=True)
    logprobs = torch.randn(6, 20, generator=generator).log_softmax(-1)
    best = logprobs.argmax(-1)
    best[2] = -1
    teacher = Teacher(logprobs, best, best, torch.full((6,), 0.5))
    rows = torch.arange(11) % 6
    weights = torch.rand(11, generator=generator)
    expected = naive(hidden, head, teacher, rows, weights)
    wanted = torch.autograd.grad(3 * expected, (hidden, head))
    loss, counts = soft_cross_entropy(hidden, head, teacher, rows, weights)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(3 * loss, (hidden, head))
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    assert not found[0][2].any(), "its best token cannot be drafted"
    q = (hidden @ head.T).softmax(-1)
    assert counts.tolist() == [9, float((q.argmax(-1) == best[rows]).sum())]
    drafted, overlap = compare(hidden.detach(), head.detach(), teacher, rows)
    assert torch.equal(drafted, q.argmax(-1))
    torch.testing.assert_close(overlap, torch.minimum(q, logprobs[rows].exp() / 2).sum(-1))


@pytest.mark.parametrize("weighting", ["document", "token"])
def test_packing_changes_neither_loss_nor_gradients(weighting: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, DOCUMENTS, weighting=weighting)
    corpus, documents = recipe.corpus, [0, 1, 2]
    divisor = recipe.divisor(documents, weighting)
    assert divisor == (3 if weighting == "document" else 5 + 1 + 8)

    batch = corpus.batch(documents, "cpu")
    weights = recipe.row_weights(batch, weighting)[batch.pairs]
    assert weights.sum() == pytest.approx(divisor), "a step's weights add up to 1"

    def gradients(packs: list[list[int]]) -> tuple[float, list[torch.Tensor]]:
        recipe.network.zero_grad()
        total = 0.0
        for pack in packs:
            loss, _ = recipe.loss(corpus.batch(pack, "cpu"), divisor, 0)
            loss.backward()
            total += float(loss.detach())
        return total, [v.grad.clone() for v in recipe.network.parameters() if v.grad is not None]

    whole, wanted = gradients([[0, 1, 2]])
    for packs in ([[0], [1], [2]], [[2, 0], [1]]):
        total, found = gradients(packs)
        assert total == pytest.approx(whole, abs=1e-5)
        for left, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_draft_vocabulary_by_frequency(tmp_path: Path) -> None:
    corpus = Corpus([write_documents(tmp_path, [(2, 5), (2, 5), (2, 5)])], 160)
    corpus.ids[:] = [9, 9, 3, 3, 5, 7, 3, 9, 9, 5, 5, 3, 3, 3, 9, 9, 6, 6, 6, 6, 6]
    ids, coverage = choose_vocabulary(corpus, np.array([0, 1]), VOCAB, 3)
    assert ids.tolist() == [3, 5, 7], "neither prompts nor what is held out counts"
    assert coverage == 1
    ids, coverage = choose_vocabulary(corpus, np.array([0, 1]), VOCAB, 1)
    assert ids.tolist() == [3] and coverage == pytest.approx(6 / 10)
    ids, _ = choose_vocabulary(corpus, np.array([0, 1]), VOCAB, 5)
    assert ids.tolist() == [0, 1, 3, 5, 7], "unused ones fill it up"


def test_documents_are_cut_and_packed(tmp_path: Path) -> None:
    corpus = Corpus([write_documents(tmp_path, [(3, 10), (7, 9), (2, 3)])], 8)
    assert len(corpus) == 2, "of the second one generated token is left"
    assert [corpus.length(index) for index in (0, 1)] == [8, 5]
    assert corpus.pairs.tolist() == [4, 2]
    assert corpus.pack([0, 1, 0], 13) == [[0, 1], [0]]
    batch = corpus.batch([1, 0], "cpu")
    assert batch.pairs.sum() == 6 and batch.longest == 8
    # Where texts begin without a prompt, too, chains end with the document.
    bare = Corpus([write_documents(tmp_path, [(0, 4), (0, 5), (2, 3)])], 8)
    assert bare.pairs.tolist() == [2, 3, 2]
    pairs = bare.batch([0, 1, 2], "cpu").pairs
    assert pairs.nonzero()[0].tolist() == [0, 1, 4, 5, 6, 10, 11]
    train, held_out = corpus.split(5, 0)
    assert sorted([*train, *held_out]) == [0, 1] and len(held_out) == 1


def test_documents_of_several_folders_count_once(tmp_path: Path) -> None:
    first = write_documents(tmp_path / "a", [(3, 10), (7, 9)])
    second = write_documents(tmp_path / "b", [(3, 5), (3, 6), (2, 8)], seed=1)
    # Documents 0 and 1 have the prompts' keys of the first folder's.
    assert Corpus([first, second], 99).pairs.tolist() == [9, 8, 7]
    with pytest.raises(SurefootError, match="nothing"):
        Corpus([first, tmp_path / "nothing"], 99)


def test_captured_layers_that_cannot_be_told_apart_are_refused() -> None:
    assert Eagle3TrainOptions().layers_of(30) == (2, 15, 27)
    assert Eagle3TrainOptions().layers_of(4) == (1, 2, 3)
    assert Eagle3TrainOptions(captured_layers="1,8,20").layers_of(30) == (1, 8, 20)
    # The output of the last layer is normed elsewhere, and the embedding has no output index.
    for wrong in ("2,30", "0,2", "3,2", "2,x"):
        with pytest.raises(SurefootError, match="captured_layers"):
            Eagle3TrainOptions(captured_layers=wrong).layers_of(30)


def test_rounds_are_walked_as_the_engine_runs_them() -> None:
    text = np.array([5, 6, 7, 8, 9, 4])
    drafts = np.array([[6, 7, 0], [0, 0, 0], [0, 0, 0], [9, 4, -1], [4, -1, -1], [-1, -1, -1]])
    walk = Walk(3)
    walk.span(drafts, text)
    # 6 7 accepted, 8 the target's; then 9 4 accepted, and the text is over.
    assert (walk.rounds, walk.tokens) == (2, 5)
    assert walk.accepted_length == 2.5
    assert walk.possible == [2, 2, 1] and walk.reached == [2, 2, 0]
    assert walk.survival == [1, 1, 0] and walk.conditional == [1, 1, 0]
    short = Walk(1)
    short.span(drafts, text)
    # 6 and 7; 8, refused; 9 and 4.
    assert (short.rounds, short.tokens) == (3, 5)


def test_a_table_of_successors_is_walked_too(tmp_path: Path) -> None:
    from surefoot.train.baseline import frequent_successors, successor_length

    folder = tmp_path / "data"
    folder.mkdir()
    texts = [[9, 1, 2, 3, 1, 2, 3, 1, 4], [9, 1, 2, 3, 1, 4], [1, 5, 1, 2, 3, 1, 2, 6]]
    documents = [Document(ids, [(1, len(ids))], 0.0, (n, n)) for n, ids in enumerate(texts)]
    write_shard(shard_path(folder, 0), documents, VOCAB, {"dropped": {}})
    corpus = Corpus([folder], 99)
    table = frequent_successors(corpus, np.array([0, 1]), VOCAB)
    # 1 leads to 2 three times and to 4 twice; the last document is not counted.
    assert table[[9, 1, 2, 3]].tolist() == [1, 2, 3, 1] and table[[4, 5, 6]].tolist() == [-1] * 3
    # 5: nothing known; 1: 2, 3 right; 1: 2 right, 3 wrong.
    length = successor_length(corpus, np.array([0, 1]), np.array([2]), VOCAB, 2)
    assert length == (1 + 3 + 2) / 3
    corpus.temperature[:] = 1
    assert successor_length(corpus, np.array([0]), np.array([2]), VOCAB, 2) is None


def test_measures_of_a_batch() -> None:
    batch = replace(toy(), temperature=np.zeros(1, dtype=np.float32))
    tokens = np.full((12, 2), -1)
    tokens[2], tokens[3], tokens[4], tokens[8] = [4, 5], [0, 0], [6, -1], [10, 0]
    tokens[9] = [0, -1]
    overlap = np.where(tokens >= 0, 0.5, 0).astype(np.float32)
    best = np.full(12, -1)
    best[3:6], best[9:11] = [4, 5, 0], [10, 11]
    found = Measurement(2)
    found.add(batch, Drafted(tokens, overlap, best))
    results = found.results()
    # Answer 3-6: [4 5] accepted and 6. Answer 9-11: [10] accepted and 11.
    assert results["accepted_length"] == {"2": 2.5} and results["without_markov"] is None
    apart = Measurement(2)
    apart.add(batch, Drafted(tokens, overlap, best, alone=np.full_like(tokens, -1)))
    assert apart.results()["without_markov"] == 1
    assert results["agreement"] == pytest.approx(2 / 5)
    assert results["on_policy"]["greedy"] == pytest.approx(4 / 5)
    assert results["sampled_length"] == pytest.approx(1 + (3 * 0.75 + 2 * 0.5) / 5)
    assert results["marginal"] == [0.5, 0.5] and results["confidence"] is None
    warm = Measurement(2)
    warm.add(replace(batch, temperature=np.ones(1)), Drafted(tokens, overlap, best))
    other = warm.results()
    assert other["accepted_length"] == {} and other["survival"] == [] and score(other) > 1
    assert other["on_policy"] == {"greedy": None, "all": results["on_policy"]["all"]}
    told = np.where(tokens >= 0, 0.75, 9.0).astype(np.float32)
    told[2, 0] = 0.25
    sure = Measurement(2)
    sure.add(batch, Drafted(tokens, overlap, best, confidence=told))
    # Eight drafts can be judged.
    expected = {"told": (0.25 + 7 * 0.75) / 8, "found": 0.5, "apart": 0.25}
    assert sure.results()["confidence"] == pytest.approx(expected)
