"""The Triton kernels that grow trees against their torch twins, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.tree_growth import Frontier, empty_tree
from surefoot.kernels.triton.drafting import TritonDrafting
from surefoot.kernels.triton.penalties import Adjuster
from surefoot.kernels.triton.products import TritonLinear
from surefoot.kernels.upload import sending
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.drafting.picking import Picker
from surefoot.speculation.state import SlotState
from triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)
BACKEND = TorchBackend(DEVICE, torch.float32)
TORCH, TRITON = BACKEND.drafting, TritonDrafting(BACKEND)
GROUPS = 64
"""Groups of a part of 2048 logits: neighbours lie in different ones."""


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("width", "count"), [(40, 4), (2048, 1), (5000, 8), (4097, 3)])
def test_the_likeliest_several(width: int, count: int, mapped: bool) -> None:
    torch.manual_seed(width)
    logits = 4 * torch.randn(5, width)
    logits[1, width // 3 :] = float("-inf")
    logits[2] -= 300
    logits[3, width - 1] = 50
    ids = torch.randperm(3 * width)[:width].sort().values if mapped else None
    expected = TORCH.likeliest_several(logits, ids, count)
    tokens, scores = TRITON.likeliest_several(logits, ids, count)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(scores, expected[1], rtol=1e-5, atol=1e-4)


def test_of_equal_logits_the_first_count() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [7, 2900]] = 2.0
    tokens, _ = TRITON.likeliest_several(logits, None, 4)
    assert tokens.tolist() == [[7, 2900, 0, 1]]


def admitted(asked: list[SamplingParams], vocab: int) -> SlotState:
    """Requests with these parameters in slots 0, 1, …"""
    state = SlotState(len(asked), 64, 4, 16, vocab, DEVICE)
    requests = [
        Request(str(slot), (1, 2), each, SpeculationParams(), 0, 64, slot=slot)
        for slot, each in enumerate(asked)
    ]
    with sending(state.device) as uploads:
        state.admit(requests, uploads)
    return state


def pickers(
    state: SlotState, ids: torch.Tensor | None, asked: list[SamplingParams]
) -> list[Picker]:
    """Torch's, and that of the kernels."""
    kernels = SimpleNamespace(drafting=TRITON, adjust=Adjuster(DEVICE))
    made = []
    for backend in (BACKEND, kernels):
        network: Any = SimpleNamespace(backend=backend, target_ids=ids)
        made.append(Picker(network, state, coupled=True))
        made[-1].serve(SamplingStages.of(asked))
    return made


def in_groups_of_their_own(width: int, ids: torch.Tensor | None) -> torch.Tensor:
    """Columns of which no two are in one group, nor two of their tokens."""
    taken, tokens, found = set[int](), set[int](), []
    for column in torch.randperm(width).tolist():
        token = column if ids is None else int(ids[column])
        if column % GROUPS not in taken and token % GROUPS not in tokens:
            found.append(column)
            taken.add(column % GROUPS)
            tokens.add(token % GROUPS)
    return torch.tensor(found[:40])


@pytest.mark.parametrize("mapped", [False, True])
def test_drafts_with_penalties(mapped: bool) -> None:
    """Each makes its token less likely for the next; beside them one without any."""
    torch.manual_seed(4)
    width, vocab = 3000, 5000 if mapped else 3000
    ids = torch.randperm(vocab)[:width].sort().values if mapped else None
    asked = [
        SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={7: 3.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.4, min_tokens=9),
    ]
    logits = torch.randn(3, width)
    logits[:, torch.randperm(width)[:5]] = torch.tensor([9.0, 8.5, 8.2, 8.0, 7.0])
    slots, found = torch.tensor([2, 0, 1]), []
    for draw in (True, False):
        state = admitted(asked, vocab)
        picker = pickers(state, ids, asked)[draw]
        tokens, chances = torch.zeros((4, 3), dtype=torch.int64), torch.zeros((4, 3))
        for step, out in enumerate(zip(tokens, chances, strict=True)):
            picker.pick(slots, torch.full((3,), 2 + step), logits.clone(), out)
        assert torch.equal(state.history[slots, 2:6], tokens.T)
        found.append((tokens, chances))
    assert len(set(found[0][0][:, 1].tolist())) == 4 and len(set(found[0][0][:, 2].tolist())) == 1
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


NUMPY = "ignore::RuntimeWarning"
"""It warns where -inf is meant."""
CHAINED = {
    "drawn": [
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_k=2, seed=5),
        SamplingParams(temperature=0.9, top_p=0.8, min_p=0.002, seed=6),
    ],
    "adjusted": [
        SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={7: 3.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.4, min_tokens=9),
        SamplingParams(temperature=0.6, seed=2, frequency_penalty=0.7),
        SamplingParams(temperature=0, min_tokens=9, logit_bias={7: 3.0}),
    ],
}


@pytest.mark.filterwarnings(NUMPY)
@pytest.mark.parametrize("kind", CHAINED)
@pytest.mark.parametrize(("requests", "rank"), [(1, 20), (5, 1000), (19, 20)])
@pytest.mark.parametrize("mapped", [False, True])
def test_drawn_markov_chains(requests: int, rank: int, mapped: bool, kind: str) -> None:
    """As drawn step by step over the target's vocabulary."""
    torch.manual_seed(requests + 100 * mapped)
    steps, width, vocab = 4, 700, 1000 if mapped else 700
    ids = torch.randperm(vocab)[:width].sort().values if mapped else None
    likely = torch.tensor([17, 300, 400, 530, 680])
    tokens_there = (likely if ids is None else ids[likely]).tolist()
    asked = [
        replace(each, logit_bias={tokens_there[i % 5]: 5.0, tokens_there[0]: -5.0})
        if (each := CHAINED[kind][i % len(CHAINED[kind])]).logit_bias
        else each
        for i in range(requests)
    ]
    before, weight = torch.randn(vocab, rank) / rank**0.5, torch.randn(width, rank)
    logits = torch.randn(steps, requests, width)
    # Whatever filters keep lies in groups of its own, but for next to nothing.
    logits[:, :, likely] += 12
    logits[:, :, 128:256] = float("-inf")
    slots, first = torch.randperm(requests), torch.randint(0, vocab, (requests,))
    positions = torch.arange(2, 2 + steps).unsqueeze(1).repeat(1, requests)
    state = admitted(asked, vocab)
    reference, picker = pickers(state, ids, asked)
    tokens = torch.zeros((steps, requests), dtype=torch.int64)
    chances = torch.zeros((steps, requests))
    head = before, TritonLinear(weight, None)
    assert picker.pick_markov(slots, first, positions, logits.clone(), head, (tokens, chances))
    assert torch.equal(state.history[slots, 2 : 2 + steps], tokens.T)
    state.history[:, 2 : 2 + steps] = 0
    right, current = torch.ones(requests, dtype=torch.bool), first
    found = torch.zeros(requests, dtype=torch.int64), torch.zeros(requests)
    for step in range(steps):
        sums = logits[step] + before[current] @ weight.T
        reference.pick(slots, positions[step], sums, found)
        # What follows another draft is another text.
        right &= tokens[step] == found[0]
        torch.testing.assert_close(chances[step][right], found[1][right], rtol=1e-3, atol=1e-6)
        current = found[0].clone()
    assert right.double().mean() >= 0.9
    assert picker.pick_markov(slots, first, positions, logits.clone(), head, (tokens, None))


@pytest.mark.filterwarnings(NUMPY)
def test_chains_that_hold_no_numbers_end() -> None:
    """The drafts of the other request are as without them."""
    torch.manual_seed(5)
    steps, width, rank = 2, 300, 8
    asked = [SamplingParams(temperature=0.9, top_p=0.6, seed=each) for each in range(2)]
    head = torch.randn(width, rank), TritonLinear(torch.randn(width, rank), None)
    logits, found = torch.randn(steps, 2, width), []
    positions = torch.arange(2, 2 + steps).unsqueeze(1).repeat(1, 2)
    for value in (0.0, torch.nan):
        logits[:, 1] = value
        tokens, chances = torch.zeros((steps, 2), dtype=torch.int64), torch.zeros((steps, 2))
        _, picker = pickers(admitted(asked, width), None, asked)
        first, slots = torch.zeros(2, dtype=torch.int64), torch.arange(2)
        assert picker.pick_markov(slots, first, positions, logits, head, (tokens, chances))
        found.append(tokens)
    assert torch.equal(found[0][:, 0], found[1][:, 0])
    assert (found[1] < width).all()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": {3: 4.0, 8: -2.0}},
    ],
)
def test_several_are_drawn(params: dict[str, Any], mapped: bool) -> None:
    """Beside a greedy request. Whatever could be drawn lies in groups of its own."""
    torch.manual_seed(3)
    width, vocab, count, each = 5000, 9000 if mapped else 5000, 5, 3
    asked = [SamplingParams(seed=5, **params), SamplingParams(temperature=0)]
    state = admitted(asked, vocab)
    ids = torch.randperm(vocab)[:width].sort().values if mapped else None
    logits = torch.randn(2 * each, width) - 60
    likely = in_groups_of_their_own(width, ids)
    for row in logits:
        row[likely] = 2 * torch.randn(len(likely))
    slots, places = torch.tensor([0, 1]), torch.tensor([9, 4])
    found = []
    for picker in pickers(state, ids, asked):
        found.append(picker.pick_several(slots, places, logits.clone(), count))
    kept = found[0][1].isfinite()
    assert kept.sum() > 2 * each
    assert torch.equal(kept, found[1][1].isfinite())
    assert torch.equal(found[0][0][kept], found[1][0][kept])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-3)


def rows(batch: int) -> FlatBatch:
    """The live rows."""
    keys = torch.randint(3, 900, (batch,))
    return FlatBatch(
        tokens=torch.zeros_like(keys),
        positions=keys - 1,
        key_index=keys,
        row_slot=torch.randperm(batch),
        block_tables=torch.zeros(batch, 1, dtype=torch.int32),
        span_start=keys,
        max_keys=1000,
    )


@pytest.mark.parametrize(("batch", "top_k", "levels"), [(1, 4, 6), (3, 8, 6), (2, 5, 2), (2, 3, 1)])
def test_a_tree_grows(batch: int, top_k: int, levels: int) -> None:
    torch.manual_seed(10 * batch + top_k)
    live, width = rows(batch), 40
    trees = [empty_tree(batch, top_k, levels, torch.device(DEVICE)) for _ in range(2)]
    before: list[Frontier | None] = [None, None]
    for level in range(levels):
        nodes = batch * (top_k if level else 1)
        # No two alike, as which of equal ones torch takes is not said.
        chances = -torch.rand(nodes, top_k).sort(dim=1).values
        if level == 1:
            chances[::2, -1] = float("-inf")
        offers = torch.randint(0, 1000, (nodes, top_k)), chances
        features = torch.randn(nodes, width)
        before = [
            module.branch(tree, level, offers, known, features, live)
            for module, tree, known in zip((TORCH, TRITON), trees, before, strict=True)
        ]
        if level < levels - 1:
            for field in fields(Frontier):
                expected, found = (getattr(each, field.name) for each in before)
                assert torch.equal(found, expected), field.name
    for name in ("tokens", "scores", "parents"):
        assert torch.equal(*(getattr(tree, name) for tree in trees)), name
    for count in (1, 7, 16, 63):
        expected, found = (m.best_nodes(trees[0], count) for m in (TORCH, TRITON))
        for field in fields(expected):
            pair = getattr(found, field.name), getattr(expected, field.name)
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-7)


def test_equal_nodes_stay_in_order() -> None:
    """A chance of 1 puts a child on its parent's score: the parent comes first all the same."""
    tree = empty_tree(1, 3, 2, torch.device(DEVICE))
    tree.tokens[0] = torch.arange(12)
    tree.parents[0] = torch.tensor([-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3)
    tree.scores[0] = torch.tensor([-1.0, -1, -2, -1, -2, -9, -1, -2, -9, -2, -9, -9])
    best = TRITON.best_nodes(tree, 8)
    assert best.tokens[0].tolist() == [0, 1, 3, 6, 2, 4, 7, 9]
    assert best.parents[0].tolist() == [-1, -1, 0, 1, -1, 0, 1, 4]


@pytest.mark.parametrize("masked", [False, True])
def test_features_follow_trees(masked: bool) -> None:
    """Spans of a tree, a chain and one row: the features before rows are those of their parents."""
    torch.manual_seed(7)
    slots, width, block = torch.tensor([2, 0, 1]), 40, 4
    first, settled = torch.tensor([0, 5, 8]), torch.tensor([3, 2, 1])
    above = torch.tensor([-1, 0, 0, 1, 3, -1, 5, 6, -1, 0])
    last = torch.tensor([4, 6, 8])
    # Of the tree rows 0, 1 and 4 are kept; the last row is padding.
    owner = torch.tensor([2, 2, -1, -1, 2, 0, 0, 0, 1, -1])
    keys = torch.tensor([6, 7, 7, 8, 8, 2, 3, 4, 11, 3])
    batch = FlatBatch(
        tokens=keys, positions=keys, key_index=keys, row_slot=owner,
        block_tables=1 + torch.arange(12).view(3, 4).int(), span_start=keys, max_keys=16,
    )  # fmt: skip
    features, before, ends = torch.randn(10, width), torch.randn(3, width), torch.randn(13, width)
    served = torch.tensor([True, False, True]) if masked else None
    valid = (owner >= 0) & (owner != 1) if masked else owner >= 0
    results = []
    for module in (TORCH, TRITON):
        own = before.clone(), ends.clone()
        shifted, positions, row_slot = module.shift_features(
            features, *own, slots, first, settled, batch, block, 30, served, above, last
        )
        assert torch.equal(row_slot, torch.where(valid, owner, -1))
        kept = own[0] if served is None else own[0][served]
        results.append((shifted[valid], positions[valid], kept, own[1][1:]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(results[1][0][2], features[3]), "the tree's third kept row is below row 3"
