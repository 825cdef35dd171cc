"""Drafters of the DFlash family, every variant: offers equal the formulas; and the parts of their
networks equal what the official implementations gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_golden import GOLDEN, SLOT, Bench, Rounds
from dflash_reference import (
    FULL,
    SLIDING,
    Flags,
    Reference,
    random_checkpoint,
    random_tensors,
)
from harness import needs_native, random_weights, tiny_config
from surefoot.kernels.reference import key_visibility
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.proposer import DraftRequest
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint
from surefoot.speculation.proposers.dflash.heads import (
    ConfidenceHead,
    MarkovChain,
    PathSelector,
    Rows,
)
from test_eagle3_drafter import backend_of, near

BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
MIXED = (SLIDING, FULL)
VARIANTS = {
    "plain": Flags(),
    "prefixed": Flags(prefix="model."),
    "DeepSeek's plain one": Flags(layout="deepseek"),
    "one layer": Flags(layers=1, types=(FULL,), taps=(1,)),
    "biases": Flags(attention_bias=True),
    "own embedding": Flags(own_embedding=True),
    "own head": Flags(own_head=True),
    "own mask": Flags(own_mask=True),
    "narrower": Flags(hidden=16, own_embedding=True, own_head=True, heads=2, kv_heads=1),
    "other theta": Flags(theta=1e6),
    "scaled and capped": Flags(scale=3.0, multiplier=0.5, cap=2.0),
    "windows": Flags(types=MIXED, window=4),
    "windows in both directions": Flags(types=MIXED, window=3, causal=False),
    "causal": Flags(causal=True),
    "sliding without a window": Flags(types=MIXED),
    "windows of speculators": Flags(layout="speculators", types=MIXED, window=3),
    "and in both directions": Flags(layout="speculators", types=MIXED, window=3, causal=False),
    "DSpark": Flags("dspark", "deepseek"),
    "gated": Flags("dspark", "specforge", markov="gated"),
    "rnn": Flags("dspark", "deepseek", markov="rnn"),
    "rnn on the anchor's token": Flags("dspark", "speculators", markov="rnn", anchor=False),
    "confidence alone": Flags("dspark", "specforge", confidence_with_markov=False),
    "no confidence": Flags("dspark", "specforge", confidence=False),
    "draft vocabulary": Flags("dspark", "speculators", draft_vocab=20),
    "plain draft vocabulary": Flags(layout="speculators", draft_vocab=20),
    "speculators' plain one predicts": Flags(layout="speculators", anchor=True),
    "DFlash 2": Flags("dflash2", types=MIXED, window=4, causal=False),
    "DFlash 2 of speculators": Flags("dflash2", "speculators", types=MIXED, window=6, causal=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fewer", [None, 2], ids=["all drafts", "two drafts"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_their_formulas(
    name: str, fewer: int | None, backend: str, tmp_path: Path
) -> None:
    """Two rounds: a prompt, then a few rows of which not all are settled. Fewer drafts are those of
    a shorter block."""
    flags = VARIANTS[name]
    tensors = random_checkpoint(tmp_path, flags)
    weights = random_weights(tiny_config())
    embedding = weights["model.embed_tokens.weight"]
    bench = Bench(tmp_path, backend_of(backend), {"model.embed_tokens.weight": embedding})
    shorter = replace(flags, block=flags.block - flags.drafts + (fewer or flags.drafts))
    reference = Reference(shorter, tensors, embedding)
    bench.proposer.expect(DraftRequest(longest=shorter.drafts))
    generator = torch.Generator().manual_seed(4)
    captured = torch.randn(14, len(flags.taps) * flags.target_hidden, generator=generator)
    text = torch.randint(3, 48, (16,), generator=generator).tolist()
    for first, count, settled in ((0, 9, 9), (9, 5, 3)):
        rows = captured[first : first + count].clone()
        bench.enter(text[: first + settled + 1])
        bench.catch_up(first, rows, settled)
        drafts = bench.propose()
        found = captured[: first + settled]
        expected, chances = reference.draft(found, text[first + settled])
        assert drafts.tokens[0].tolist() == expected
        assert drafts.lengths.tolist() == [shorter.drafts]
        assert bench.proposer.longest == flags.drafts
        near(drafts.confidence[0], torch.tensor(chances))


def test_rows_that_say_the_same_draft_other_tokens_under_penalties(tmp_path: Path) -> None:
    """Each draft counts as text for the ones behind it."""
    tensors = random_tensors(Flags())
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    random_checkpoint(tmp_path, Flags(), tensors)
    embedding = random_weights(tiny_config())["model.embed_tokens.weight"]
    bench = Bench(tmp_path, backend_of("torch"), {"model.embed_tokens.weight": embedding})
    bench.enter([5, 6, 7])
    bench.catch_up(0, torch.randn(2, 64), 2)
    assert len(set(bench.propose().tokens[0].tolist())) == 1
    bench.state.params.frequency[SLOT] = 50.0
    bench.proposer.expect(DraftRequest(SamplingStages(penalties=True)))
    assert len(set(bench.propose().tokens[0].tolist())) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_the_likeliest_of_a_head_are_those_of_its_logits(backend: str, most: int) -> None:
    """However many rows of logits there may be at a time."""
    used, width, vocab = backend_of(backend), 32, 97
    # Rows of blocks, without the first of each.
    hidden, weight = torch.randn(3, 3, width)[:, 1:], torch.randn(vocab, width)
    norm, ids = torch.rand(width) + 0.5, torch.randperm(1000)[:vocab]
    tokens, chances = torch.full((6,), -1), torch.full((6,), torch.nan)
    used.drafting.likeliest_by_head(
        used.pack_norm(norm), 1e-6, used.pack_linear([weight]), hidden, ids, tokens, chances, most
    )
    rows = hidden.flatten(0, 1)
    normed = rows * norm * rows.square().mean(dim=1, keepdim=True).add(1e-6).rsqrt()
    expected, column = (normed @ weight.T).softmax(dim=1).max(dim=1)
    assert tokens.tolist() == ids[column].tolist()
    torch.testing.assert_close(chances, expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_blocks_equal_the_official_ones(name: str) -> None:
    """Hidden states and logits of whole blocks; what the rows of each layer see."""
    rounds = Rounds(name, backend_of("torch"))
    network, seen = rounds.bench.network, []
    step, layers = network.step, network._visible

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(step(*arguments))
        return seen[-1]

    def visible(*arguments: Any) -> Any:
        batch = layers(*arguments)
        seen.append((arguments[1], key_visibility(batch, batch.max_keys)))
        return batch

    network.step, network._visible = watched, visible  # type: ignore[method-assign]
    for number in range(len(rounds)):
        seen.clear()
        rounds.begin(number)
        *masks, hidden = seen
        near(network.normed(hidden), rounds.array(number, "final_hidden"))
        logits = {"dflash": "logits", "dspark": "base_logits", "dflash2": "unary_logits"}[name]
        expected = rounds.array(number, logits)
        near(network.logits(hidden)[-len(expected) :], expected)
        for layer, kind in enumerate(network.config.layers if name == "dflash2" else ()):
            expected = rounds.array(number, f"visible{layer}")
            [found] = [mask for each, mask in masks if each == kind]
            assert torch.equal(found[:, : expected.shape[1]], expected)
            assert not found[:, expected.shape[1] :].any()
        rounds.end(number)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_equal_the_official_ones(kind: str, backend: str) -> None:
    """On a fixed path and on the greedy one."""
    golden = load_file(GOLDEN / "dspark" / "rounds.safetensors")
    checkpoint = open_checkpoint(str(GOLDEN / "dspark" / "draft"))
    heads = load_file(GOLDEN / "dspark" / "other_heads.safetensors")
    own = {key.removeprefix(f"{kind}."): value.clone() for key, value in heads.items()}
    object.__setattr__(checkpoint, "tensors", {**checkpoint.tensors, **own})
    object.__setattr__(checkpoint.config.markov, "kind", kind)
    chain = MarkovChain(checkpoint, backend_of(backend))
    hidden, base = golden["r1.final_hidden"], golden["r1.base_logits"]
    current = torch.tensor([239])
    for path in ("forced", "greedy"):
        tokens, state, previous = golden.get(f"heads.{kind}.{path}_tokens"), None, current
        tokens = golden["heads.forced_tokens"] if tokens is None else tokens
        for row, token in enumerate(tokens):
            part = slice(row, row + 1)
            logits, state = chain.conditioned(base[part], previous, hidden[part], state)
            near(logits, golden[f"heads.{kind}.{path}_logits"][part])
            assert path == "forced" or int(logits.argmax()) == int(token)
            previous = token[None]


def test_confidence_heads_equal_the_official_ones() -> None:
    golden = load_file(GOLDEN / "dspark" / "rounds.safetensors")
    checkpoint = open_checkpoint(str(GOLDEN / "dspark" / "draft"))
    hidden, backend = golden["r1.final_hidden"].unsqueeze(1), backend_of("torch")
    before = torch.cat((torch.tensor([239]), golden["heads.forced_tokens"][:-1])).unsqueeze(1)
    found = ConfidenceHead(checkpoint, backend).scores(hidden, before)
    near(found[:, 0], golden["heads.vanilla.forced_confidence_logits"])
    heads = load_file(GOLDEN / "dspark" / "other_heads.safetensors")
    own = {key.removeprefix("no_markov."): value for key, value in heads.items()}
    object.__setattr__(checkpoint, "tensors", {**checkpoint.tensors, **own})
    object.__setattr__(checkpoint.config, "confidence_with_markov", False)
    found = ConfidenceHead(checkpoint, backend).scores(hidden, before)
    near(found[:, 0], golden["heads.no_markov.confidence_logits"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("folder", ["anchor_predicts", "anchor_is_bonus"])
def test_a_draft_vocabulary_equals_the_official_one(folder: str, backend: str) -> None:
    path = GOLDEN / "dspark_speculators" / folder
    golden = load_file(path / "block.safetensors")
    bench = Bench(path, backend_of(backend), load_file(path / "target_embed.safetensors"))
    network, chain = bench.network, bench.proposer.walk
    assert isinstance(chain, MarkovChain) and network.target_ids is not None
    hidden: list[torch.Tensor] = []
    step = network.step
    network.step = lambda *given: hidden.append(step(*given)) or hidden[0]  # type: ignore
    bench.enter(golden["ids"][:12].tolist())
    bench.catch_up(0, golden["features"][:11].clone(), 11)
    at_once = bench.propose().tokens
    # Hidden states are looked at, which those that draft at once keep to themselves.
    hidden.clear()
    bench.proposer.at_once = None
    drafts = bench.propose()
    assert torch.equal(drafts.tokens, at_once)
    near(network.normed(hidden[0]), golden["final_hidden"])
    base = network.logits(hidden[0])
    near(base, golden["base_logits"])
    before = golden["prev_tokens"]
    logits, _ = chain.conditioned(base, before, None, None)
    near(logits, golden["logits"])
    assert network.target_ids[logits.argmax(dim=1)].tolist() == golden["argmax_target_ids"].tolist()
    assert bench.proposer.confidence is not None
    found = bench.proposer.confidence.scores(network.normed(hidden[0]), before)
    near(found, golden["confidence_logits"])
    first = 0 if folder == "anchor_predicts" else 1
    assert drafts.tokens.shape[1] == 6 - first
    assert int(drafts.tokens[0, 0]) == int(golden["argmax_target_ids"][first])


def test_the_selectors_distribution_equals_the_official_one() -> None:
    rounds = Rounds("dflash2", backend_of("torch"))
    for number in range(2):
        rounds.begin(number)
        if number == 0:
            rounds.end(number)
    selector, golden = rounds.bench.proposer.walk, rounds.arrays
    assert isinstance(selector, PathSelector)
    candidates, unary = golden["sampled.candidates"], golden["r1.unary_logits"]
    assert torch.equal(unary.topk(16, dim=1).indices, candidates)
    hidden = golden["r1.final_hidden"][1:].unsqueeze(1)
    nothing = torch.empty(0)
    edges = selector.edges(
        Rows(nothing, hidden, nothing, nothing, nothing), candidates.unsqueeze(1)
    )
    previous = torch.tensor([339])
    for row, token in enumerate(golden["sampled.draft_tokens"]):
        scores = selector.scores(unary[row][candidates[row]][None], edges[row], previous)
        near((scores / 0.7).softmax(dim=1)[0], golden["sampled.q"][row])
        previous = token[None]
