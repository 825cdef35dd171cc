"""The dynamic tree against the official one, node by node, and trees in the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3_engines import folder, target
from eagle3_golden import BLOCK, GOLDEN, Bench
from harness import (
    Job,
    make_engine,
    needs_native,
    run_alone,
    run_jobs,
)
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.kernels.backend import Backend, FlatBatch
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.tree_growth import BestNodes, GrownTree, TreeGrowth
from surefoot.request import SamplingParams
from surefoot.sampling.noise import gumbel, gumbel_at
from surefoot.speculation.decisions import Decision, Situation
from surefoot.speculation.drafting.tree import grow
from surefoot.speculation.proposers.eagle3.proposer import Eagle3Options, Eagle3Proposer
from surefoot.speculation.tree_offers import levels_of
from surefoot.speculation.trees import ancestors
from test_eagle3_engine import by_formulas

TREES = {"k4_d3_n15": (4, 3, 15), "k10_d5_n59": (10, 5, 59)}
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
TOLERANCE = 1e-4


class Grower:
    """One request whose stable entries are ``tokens`` and ``features``, and the tree behind it."""

    def __init__(self, backend: Backend, top_k: int, passes: int) -> None:
        self.bench = Bench("eagle3_tree", backend, 384)
        self.top_k, self.passes = top_k, passes
        self.levels: list[tuple[FlatBatch, torch.Tensor]] = []

    def follow_paths(
        self, features: torch.Tensor, tokens: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Entries from key ``first`` on, but for the last, which is the live row."""
        drafter = self.bench.drafter
        fused = drafter.fuse(features)
        keys = torch.arange(first, first + len(tokens))
        drafter.write_keys(fused, self.bench.batch(tokens, keys), self.bench.kv)
        return fused[-1:].clone()

    def grow(self, live: int, token: int, feature: torch.Tensor) -> GrownTree:
        drafter = self.bench.drafter
        assert drafter.target_ids is not None
        ids = drafter.target_ids

        def successors(logits: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
            best, columns = logits.log_softmax(dim=-1).topk(self.top_k)
            return ids[columns], best

        batch = self.bench.batch(torch.tensor([token]), torch.tensor([live]), start=live + 1)
        batch = replace(batch, max_keys=self.bench.tables.shape[1] * BLOCK)
        self.levels.clear()
        return grow(
            drafter, self.bench.kv, batch, feature, successors, self.passes,
            lambda rows, hidden: self.levels.append((rows, hidden.clone())),
        )  # fmt: skip


def in_order_of_proposal(nodes: BestNodes) -> tuple[list[int], torch.Tensor]:
    """Tokens and parents int64 [1, K] of the kept nodes as the official code numbers them."""
    order = nodes.order[0].argsort()
    number = order.argsort()
    parents = nodes.parents[0][order]
    renamed = torch.where(parents < 0, -1, number[parents.clamp(min=0)])
    return nodes.tokens[0][order].tolist(), renamed.unsqueeze(0)


def check_tree(nodes: BestNodes, arrays: Any, prefix: str = "") -> None:
    tokens, parents = in_order_of_proposal(nodes)
    assert tokens == arrays[f"{prefix}draft_tokens"][0, 1:].tolist()
    masks, depths = ancestors(parents)
    assert depths[0].tolist() == arrays[f"{prefix}tree_position_ids"].tolist()
    bits = (masks[0].unsqueeze(1) >> torch.arange(len(tokens) + 1)) & 1
    assert torch.equal(bits, arrays[f"{prefix}tree_mask"][0, 0].long())
    # As offered: parents before children, the best first.
    assert bool((nodes.parents < torch.arange(nodes.parents.shape[1])).all())
    assert bool((nodes.scores.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("name", TREES)
def test_the_tree_is_the_official_one(name: str) -> None:
    """On torch; its heads of 8 are too narrow for the compiled kernels."""
    top_k, passes, count = TREES[name]
    arrays = load_file(GOLDEN / "eagle3_tree" / f"{name}.safetensors")
    facts = json.loads((GOLDEN / "eagle3_tree" / f"{name}.json").read_text())
    grower = Grower(TorchBackend("cpu", torch.float32), top_k, passes)
    prompt, ids = facts["prompt_len"], arrays["ids"]
    feature = grower.follow_paths(arrays["aux_cat"], arrays["slot_tokens"], 1)
    tree = grower.grow(prompt, int(ids[-1]), feature)
    assert (tree.scores[0] - arrays["flat_scores"]).abs().max() < TOLERANCE
    for level, (rows, hidden) in enumerate(grower.levels):
        assert rows.tokens.tolist() == arrays[f"level{level}.tokens"].tolist()
        assert rows.positions.tolist() == arrays[f"level{level}.positions"].tolist()
        assert (hidden - arrays[f"level{level}.y"]).abs().max() < TOLERANCE
        assert rows.mask is not None
        visible = arrays[f"level{level}.visible"]
        bits = (rows.mask.unsqueeze(1) >> torch.arange(visible.shape[1] - prompt)) & 1
        assert bool(visible[:, :prompt].all())
        assert torch.equal(bits.bool(), visible[:, prompt:])
    check_tree(TreeGrowth().best_nodes(tree, count), arrays)

    # The next round: catch-up over the accepted path, and the next tree.
    path = facts["posterior"][5]["path_nodes"]
    assert facts["posterior"][5]["case"] == "accept_two"
    feature = grower.follow_paths(
        arrays["next.node_features"][path], arrays["next.slot_tokens"], prompt + 1
    )
    live, token = prompt + len(path), int(arrays["next.slot_tokens"][-1])
    check_tree(TreeGrowth().best_nodes(grower.grow(live, token, feature), count), arrays, "next.")


def test_noise_of_some_tokens_equals_that_of_all() -> None:
    seeds, choices = torch.tensor([5, -7, 2**40]), torch.tensor([0, 1, 2])
    positions, ids = torch.tensor([3, 900, 12]), torch.randint(0, 99, (3, 20))
    assert torch.equal(
        gumbel_at(seeds, choices, positions, ids),
        gumbel(seeds, choices, positions, 99).gather(1, ids),
    )


# --- in the engine --------------------------------------------------------------------------------

OWN = {"top_k": 3, "depth": 4, "draft_tokens": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def tree_engine(kind: str, backend: str = "torch", **options: Any) -> Any:
    own = {"path": folder(kind), **OWN, **options.pop("own", {})}
    values: dict[str, Any] = {"draft_policy": "fixed", "max_draft_tokens": 8, **options}
    engine = make_engine(
        target(backend), proposers=("eagle3",), proposer_options={"eagle3": own}, **values
    )
    return engine


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_branch_is_the_chain_of_the_formulas(backend: str) -> None:
    """Through prefix hits, preemption and accepted paths off the first branch: every tree holds
    the greedy draft that a recomputation of the whole text gives, as its likeliest children."""
    engine = tree_engine("skilled", backend, kv_blocks=30, max_num_batched_tokens=9, max_num_seqs=3)
    trees: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    inner = engine.round.books.learn

    def learn(index: int, slots: torch.Tensor, drafts: Any) -> None:
        for row, slot in enumerate(slots.tolist()):
            if slot == engine.state.padding_slot:
                continue
            text = tuple(engine.state.history[slot, : int(engine.state.length[slot])].tolist())
            trees[text] = drafts.tokens[row].tolist(), drafts.parents[row].tolist()
        inner(index, slots, drafts)

    engine.round.books.learn = learn
    start = (5, 9, 2, 33, 14, 21, 40, 8)
    jobs = [Job(start + tuple(range(3 + i, 6 + 2 * i)), GREEDY, arrival=2 * i) for i in range(6)]
    requests = run_jobs(engine, jobs)
    assert engine.stats.preemptions and any(request.cached for request in requests)
    assert sum(request.stats.accepted for request in requests) > 80
    for text in list(trees):
        tokens, parents = trees[text]
        node = -1
        for token in by_formulas("skilled", text, 2):
            children = [place for place, parent in enumerate(parents) if parent == node]
            # Best first, so the first child is the likeliest.
            if not children:
                break
            node = children[0]
            assert tokens[node] == token, text
        assert tokens[0] == by_formulas("skilled", text, 1)[0]


def trees_by_text(engine: Engine) -> dict[tuple[int, tuple[int, ...]], list[list[int]]]:
    """(Levels that were asked for, text) -> tokens and parents of the tree behind it."""
    found: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
    inner, proposer = engine.round.books.learn, cast(Eagle3Proposer, engine.proposers[0])

    def learn(index: int, slots: torch.Tensor, drafts: Any) -> None:
        for row, slot in enumerate(slots.tolist()):
            if slot != engine.state.padding_slot:
                length = int(engine.state.length[slot])
                text = tuple(engine.state.history[slot, :length].tolist())
                parts = (drafts.tokens, drafts.parents)
                kept = [part[row, : int(drafts.lengths[row])].tolist() for part in parts]
                found[proposer.wanted.longest, text] = kept
        inner(index, slots, drafts)

    engine.round.books.learn = learn  # type: ignore[method-assign]
    return found


def test_trees_grow_as_many_levels_as_they_are_told() -> None:
    """In each round another number: the trees are those of drafters that never grow more."""
    engine, steps = tree_engine("skilled"), 0
    trees, decide = trees_by_text(engine), engine.loop.planner.decide

    def vary(situation: Situation) -> Decision:
        nonlocal steps
        steps = steps % 3 + 1
        return replace(decide(situation), steps=steps)

    engine.loop.planner.decide = vary  # type: ignore[method-assign]
    jobs = [Job((5, 9, 2 + i, 33, 14), GREEDY) for i in range(3)]
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(target(), job).output
    assert {levels for levels, _ in trees} == {1, 2, 3}
    compared = 0
    for depth in (1, 2, 3):
        shallow = tree_engine("skilled", own={"depth": depth})
        expected = {text: tree for (_, text), tree in all_trees(shallow, jobs).items()}
        for (levels, text), tree in trees.items():
            if levels == depth and text in expected:
                assert tree == expected[text], (levels, text)
                assert max(levels_of(np.array([tree[1]]))[0]) <= levels
                compared += 1
    assert compared > 15


def all_trees(engine: Engine, jobs: list[Job]) -> dict[tuple[int, tuple[int, ...]], Any]:
    """Behind every text on the way, as nothing is verified."""
    trees, decide = trees_by_text(engine), engine.loop.planner.decide
    engine.loop.planner.decide = (  # type: ignore[method-assign]
        lambda situation: replace(decide(situation), drafts=0)
    )
    run_jobs(engine, jobs)
    return trees


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_accept_more_than_chains(temperature: float) -> None:
    rounds = {}
    for top_k in (1, 3):
        own = OWN if top_k > 1 else {"top_k": 1, "depth": None, "draft_tokens": 4}
        engine = tree_engine("skilled", own=own)
        jobs = [
            Job(
                (3 + i, 8, 2 + i),
                SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True),
            )
            for i in range(6)
        ]
        requests = run_jobs(engine, jobs)
        rounds[top_k] = sum(request.stats.rounds for request in requests)
        for job, request in zip(jobs, requests, strict=True):
            assert request.output == run_alone(target(), job).output
    assert rounds[3] < rounds[1], rounds


@pytest.mark.parametrize(
    "own",
    [{"top_k": 0}, {"top_k": 20, "depth": 5}, {"top_k": 1, "depth": 2, "draft_tokens": 5}],
)
def test_trees_that_cannot_be_are_refused(own: dict[str, Any]) -> None:
    with pytest.raises(SurefootError, match="eagle3"):
        Eagle3Options(path="x", **own)


def test_options_of_trees_have_defaults() -> None:
    assert Eagle3Options(path="x", top_k=10).tree_depth == 6
    chosen = [Eagle3Options(path="x", draft_tokens=count) for count in (3, None)]
    assert [Eagle3Proposer.draft_tokens(options) for options in chosen] == [3, 5]
