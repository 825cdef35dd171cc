"""Drafts in trees: shapes, acceptance, KV moves, and the text of plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import tree_proposers  # noqa: F401 - registers
from eagle3_golden import GOLDEN
from harness import (
    Job,
    make_engine,
    needs_native,
    run_alone,
    run_jobs,
    tiny_decoder,
)
from structured_harness import params_with, structured_engine
from surefoot.kernels.backend import AcceptedPaths, AttentionShape
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.trees import Trees, accept_paths, ancestors
from test_exactness import check_logprobs, compare, scenarios
from test_native_backend import LAYOUTS, Row, Runner, chain, native

TREES = ["k4_d3_n15", "k10_d5_n59"]


def golden(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = GOLDEN / "eagle3_tree"
    return load_file(folder / f"{name}.safetensors"), json.loads(
        (folder / f"{name}.json").read_text()
    )


def parents_of(mask: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """int64 [1, K] from a mask [K + 1, K + 1] and depths [K + 1]."""
    parents = []
    for node in range(1, len(mask)):
        above = [other for other in range(node) if mask[node, other]]
        parents.append(max(above, key=lambda other: int(depths[other])) - 1)
    return torch.tensor([parents])


@pytest.mark.parametrize("name", TREES)
def test_masks_and_depths_equal_the_official_ones(name: str) -> None:
    arrays, _ = golden(name)
    mask, depths = arrays["tree_mask"][0, 0], arrays["tree_position_ids"]
    masks, found = ancestors(parents_of(mask, depths))
    assert found[0].tolist() == depths.tolist()
    bits = (masks[0].unsqueeze(1) >> torch.arange(len(mask))) & 1
    assert torch.equal(bits, mask.long())


@pytest.mark.parametrize("name", TREES)
def test_acceptance_equals_the_official_walk(name: str) -> None:
    arrays, facts = golden(name)
    parents = parents_of(arrays["tree_mask"][0, 0], arrays["tree_position_ids"])
    tokens = arrays["draft_tokens"][:, 1:]
    count, cases = tokens.shape[1], facts["posterior"]
    trees = Trees(*(x.expand(len(cases), -1) for x in (tokens, parents, *ancestors(parents))))
    sampled = arrays["posterior.tree_logits"].argmax(dim=-1)
    paths = accept_paths(trees, sampled, torch.full((len(cases),), count))
    for index, case in enumerate(cases):
        length = int(paths.lengths[index])
        assert length == case["accept_length"], case["case"]
        rows = paths.rows[index, : length + 1]
        assert rows.tolist() == case["path_nodes"]
        assert sampled[index, rows[-1]] == case["next_token"]
        assert sampled[index, rows[:-1]].tolist() == case["accepted_tokens"]


@pytest.mark.parametrize("name", TREES)
def test_moved_keys_equal_the_official_ones(name: str) -> None:
    """On a pool whose layout is the backend's own: written row by row, moved, read back."""
    arrays, facts = golden(name)
    before, after = arrays["next.target_kv_before"], arrays["next.target_kv_after"]
    prompt = facts["prompt_len"]
    [case] = [case for case in facts["posterior"] if case["case"] == "accept_two"]
    rows = torch.zeros((1, before.shape[3]), dtype=torch.int64)
    rows[0, : len(case["path_nodes"])] = torch.tensor(case["path_nodes"])
    backend = TorchBackend("cpu", torch.float32)
    pages = -(-before.shape[3] // 4)
    [kv] = backend.allocate_kv(1, pages + 1, 4, AttentionShape(2, 2, 4, 1.0))
    tables = torch.arange(pages, 0, -1, dtype=torch.int32).unsqueeze(0)
    keys = torch.arange(before.shape[3])
    blocks, places = tables[0, keys // 4].long(), keys % 4
    kv[:, blocks, places] = before[:, 0].transpose(1, 2)
    length = torch.tensor([case["accept_length"]])
    slots = torch.zeros(1, dtype=torch.int64)
    backend.move_paths([kv], AcceptedPaths(tables, slots, torch.tensor([prompt]), rows, length))
    found = kv[:, blocks, places].transpose(1, 2)
    length = prompt + case["accept_length"] + 1
    assert torch.equal(found[:, :, :length], after[:, 0, :, :length])


@pytest.mark.parametrize("block_size", [1, 4, 16, 20])
@pytest.mark.parametrize(
    "name", ["torch", *(pytest.param(name, marks=needs_native) for name in ("fp32", "bf16"))]
)
def test_attention_sees_moved_keys_where_they_are_now(name: str, block_size: int) -> None:
    """A row that sees keys 7, 14 and 20 of a span, and the same after they have moved to its
    beginning."""
    layout = LAYOUTS["fp32" if name == "torch" else name]
    backend = TorchBackend("cpu", torch.float32) if name == "torch" else native(layout).backend
    runner = Runner(layout, backend, block_size=block_size)
    runner.forward([*chain(0, 0, 30), *chain(1, 0, 3)])

    def look(*offsets: int) -> torch.Tensor:
        mask = sum(1 << offset for offset in (*offsets, 34))
        return runner.forward([Row(0, 40, position=30, mask=mask)], {0: 6})

    expected = look(1, 8, 14)
    assert not torch.equal(look(0, 1, 2), expected)
    rows, lengths = torch.tensor([[0, 5, 7, 9], [0, 2, 9, 15]]), torch.tensor([0, 3])
    slots, start = torch.tensor([1, 0]), torch.tensor([5, 2])
    backend.move_paths(runner.kv, AcceptedPaths(runner.tables, slots, start, rows, lengths))
    found = look(0, 1, 2)
    assert torch.allclose(found, expected, atol=1e-4)
    assert name == "torch" or torch.equal(found, expected)


def greedy_trees(
    seed: int, params: dict[str, Any] | None = None, ahead: bool = False, **options: Any
) -> Any:
    plain = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    job = Job((3, 9, 4, 7, 2, 11), SamplingParams(**{**plain, **(params or {})}))
    want = run_alone(tiny_decoder(), job)
    texts = ((*want.prompt, *want.output),)
    own = {"bush": {"texts": texts, "seed": seed}}
    values: dict[str, Any] = {"max_draft_tokens": 8, "draft_policy": "fixed", **options}
    values |= {"proposers": ("bush",), "proposer_options": own}
    engine = make_engine(tiny_decoder(), ahead, **values)
    [got] = run_jobs(engine, [job])
    return want, got


@pytest.mark.parametrize("seed", range(3))
def test_trees_are_accepted_and_change_nothing(seed: int) -> None:
    want, got = greedy_trees(seed)
    assert got.output == want.output
    assert got.stats.accepted > 8 and got.stats.rounds < 33


def test_logprobs_are_those_of_the_accepted_path() -> None:
    want, got = greedy_trees(1, {"logprobs": 2})
    assert got.stats.accepted > 8
    check_logprobs(want, got, len(got.output), got.params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_follow_a_grammar(temperature: float) -> None:
    """Each row's mask is that of its own path; branches that the grammar forbids are cut."""
    structure = {"regex": r"(ab|a1|cab|1){14,20}"}
    params = params_with(structure, temperature=temperature, seed=3, max_tokens=40)
    job, seeds = Job((3, 4, 5), params), range(8)
    [want] = run_jobs(structured_engine(tiny_decoder(), max_draft_tokens=0), [job])
    accepted = 0
    for seed in seeds:
        own = {"texts": ((*want.prompt, *want.output),), "seed": seed}
        engine = structured_engine(
            tiny_decoder(),
            proposers=("bush",),
            proposer_options={"bush": own},
            draft_policy="fixed",
            max_draft_tokens=8,
        )
        [got] = run_jobs(engine, [job])
        assert got.output == want.output
        accepted += got.stats.accepted
    assert accepted > 10


def test_a_tree_of_63_nodes() -> None:
    want, got = greedy_trees(1, max_draft_tokens=63)
    assert got.output == want.output and got.stats.accepted > 20


def some(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def record(work: list[Job], drafts: int) -> None:
    """Take from the jobs what the host would have to plan their rounds for, and most limits."""
    for job in work:
        limit = 3 if job.speculation.max_draft_tokens == 0 and drafts > 3 else None
        job.params = replace(job.params, logprobs=None)
        job.speculation = replace(job.speculation, max_draft_tokens=limit)


def check(
    backend: str, scenario: tuple[list[Job], dict[str, Any]], seed: int, ahead: bool = False
) -> None:
    work, options = scenario
    decoder = tiny_decoder(backend)
    expected = [run_alone(decoder, job) for job in work]
    if options["proposers"]:
        texts = tuple((*request.prompt, *request.output) for request in expected)
        own = {"bush": {"texts": texts, "seed": seed}}
        options = {**options, "proposers": ("ngram", "bush"), "proposer_options": own}
    for job in work:
        method = {"oracle": "bush", "saboteur": "auto"}.get(job.speculation.method)
        if method:
            job.speculation = SpeculationParams(method, job.speculation.max_draft_tokens)
    engine = make_engine(decoder, ahead, **options)
    actual = run_jobs(engine, work)
    for job, want, got in zip(work, expected, actual, strict=True):
        compare(backend, job, want, got)


@some(12)
@given(scenarios(), st.integers(0, 99))
def test_any_scenario_gives_the_plain_text(scenario: Any, seed: int) -> None:
    check("torch", scenario, seed)


@needs_native
@some(40)
@given(scenarios(), st.integers(0, 99))
def test_any_scenario_gives_the_plain_text_native(scenario: Any, seed: int) -> None:
    check("native", scenario, seed)


@some(25)
@given(scenarios(), st.integers(0, 99))
def test_any_scenario_gives_the_plain_text_launched_ahead(scenario: Any, seed: int) -> None:
    work, options = scenario
    record(work, options["max_draft_tokens"])
    check("torch", scenario, seed, ahead=True)
