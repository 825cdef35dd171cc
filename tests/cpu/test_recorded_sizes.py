"""Every round that the planner may choose is recorded at the start: recording in the middle of
serving takes longer than a dozen rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from eagle3_engines import folder, target
from harness import Job, make_engine, run_jobs
from surefoot.engine import rounds as engine_rounds
from surefoot.engine.batch import Batch
from surefoot.engine.cuda_graphs import RecordedRounds
from surefoot.engine.engine import Engine
from surefoot.engine.measuring import (
    actions_of,
    decoding_sizes,
    prompt_actions,
    prompt_sizes,
)
from surefoot.engine.rounds import PaddedRounds
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import Decision
from surefoot.speculation.host_costs import HostCosts
from surefoot.speculation.planner import Planner
from surefoot.speculation.recorded_costs import PromptRounds, RecordedCosts, RecordedSize
from surefoot.speculation.scoring import PromptReads, PromptScores
from surefoot.speculation.size import GREEDY, Size
from test_eagle3_engine import crowd

CHAIN = {"path": folder("skilled"), "draft_tokens": 3, "top_k": 1}
TREE = {"path": folder("skilled"), "draft_tokens": 7, "top_k": 3, "depth": 3}


def padded_engine(
    proposers: tuple[str, ...], own: dict[str, Any], policy: str, max_num_seqs: int = 20
) -> Engine:
    options: dict[str, Any] = {"proposers": proposers, "draft_policy": policy}
    if "eagle3" in proposers:
        options["proposer_options"] = {"eagle3": own}
    return make_engine(target(), True, max_num_seqs=max_num_seqs, kv_blocks=400, **options)


def recorded_sizes(rounds: RecordedRounds) -> set[Size]:
    found: set[Size] = set()
    for spans in rounds.spans:
        for action in actions_of(rounds, spans):
            found.update(decoding_sizes(rounds, spans, GREEDY, action))
    for spans in rounds.prompt_spans:
        for action in prompt_actions(rounds, spans):
            found.update(prompt_sizes(rounds, spans, GREEDY, action))
    return found


def seconds_of(size: Size) -> float:
    return 1e-3 * (2 + 0.02 * size.rows + 0.2 * (size.steps or 0))


def made_up_planner(rounds: RecordedRounds, sizes: set[Size]) -> Planner:
    times = {
        RecordedSize(size.spans, size.rows, size.rows, (size.proposers, size.steps or 0)): [
            (128, seconds_of(size))
        ]
        for size in sizes
        if not size.has_prompts
    }
    proposing = {
        index: Proposing(2e-4, longest=rounds.round.drafters.get(index, 0))
        for index in range(len(rounds.round.proposers))
    }
    prompts = ExactCosts([1, 64, 4096], [2e-3, 3.3e-3, 8.4e-2], proposing)
    beside = {
        spans: PromptRounds(prompts, prompt_actions(rounds, spans), rounds.most_samples(spans))
        for spans in rounds.prompt_spans
    }
    costs = RecordedCosts(times, beside)
    rounds.costs = {GREEDY: costs}
    return Planner(costs, HostCosts(), rounds.width, rounds.round.drafters)


def arrivals(method: str, count: int) -> list[Job]:
    jobs = (crowd() * count)[:count]
    jobs = [replace(job) for job in jobs]
    for index, job in enumerate(jobs):
        job.params = SamplingParams(temperature=0, max_tokens=30 + index, ignore_eos=True)
        job.speculation = SpeculationParams(method)
        job.arrival = 3 * index
    return jobs


@pytest.mark.parametrize("policy", ["auto", "fixed"])
@pytest.mark.parametrize(
    ("proposers", "own"),
    [(("ngram",), CHAIN), (("eagle3",), CHAIN), (("eagle3", "ngram"), CHAIN), (("eagle3",), TREE)],
    ids=["ngram", "chain", "both", "tree"],
)
def test_no_round_is_of_a_size_that_was_not_recorded(
    proposers: tuple[str, ...], own: dict[str, Any], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_rounds, "PROMPT_DRAFTED", 40)
    monkeypatch.setattr(engine_rounds, "PROMPT_VERIFIED", 30)
    engine = padded_engine(proposers, own, policy)
    assert isinstance(engine.rounds, PaddedRounds)
    # What is asked of them here, padded rounds have as well.
    rounds = cast(RecordedRounds, engine.rounds)
    sizes = recorded_sizes(rounds)
    if policy == "auto":
        engine.loop.planner = made_up_planner(rounds, sizes)
    launched: Counter[Size] = Counter()
    run = rounds.run

    def watch(size: Size, keys: int, reads: PromptReads | None) -> PromptScores:
        launched[size] += 1
        return run(size, keys, reads)

    rounds.run = watch  # type: ignore[method-assign]
    run_jobs(engine, arrivals("auto", 18))
    assert len(launched) > 5
    assert set(launched) <= sizes, set(launched) - sizes
    if "eagle3" in proposers:
        return
    run_jobs(engine, arrivals("off", 6))
    assert set(launched) <= sizes, set(launched) - sizes


@pytest.mark.parametrize("drafts", [0, 40, 51, 80])
def test_a_decision_for_a_few_requests_more_asks_for_no_other_size(drafts: int) -> None:
    """It was made for 17 or 20, whose rounds have room for more drafts than those of 16."""
    engine = padded_engine(("eagle3",), CHAIN | {"draft_tokens": 5}, "auto")
    rounds = cast(RecordedRounds, engine.rounds)
    sizes = recorded_sizes(rounds)
    engine.loop.planner = made_up_planner(rounds, sizes)
    for job in arrivals("auto", 16):
        engine.add(engine.make_request(f"text {job.arrival}", job.prompt, job.params))
    while not engine.loop.flights or engine.loop.flights[0].batch.chunks:
        engine.step()
    batch = engine.loop.flights[0].batch
    assert batch.count == 16
    size = rounds.size(batch, Decision(drafts, (0,), 3), 100.0)
    assert size in sizes and size.rows == (64 if drafts else 16)


@pytest.mark.parametrize("chunk", [9, 300, 700])
@pytest.mark.parametrize("drafts", [0, 1, 40])
def test_rounds_with_prompts_verify_only_what_kv_is_reserved_for(chunk: int, drafts: int) -> None:
    """No drafts are wanted, or there are no blocks for them: those on offer must not get rows."""
    engine = padded_engine(("ngram",), CHAIN, "fixed")
    names = [f"text {index}" for index in range(5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for name in names:
        engine.add(engine.make_request(name, [5, 9, 2, 33], params))
    while not engine.loop.flights:
        engine.step()
    group = engine.loop.flights[0].batch.group
    batch = Batch(group, (chunk,), 0)
    size = engine.rounds.size(batch, Decision(drafts, (0,), 0), 100.0)
    assert size.verifies == (drafts > 0) and size.has_prompts
    rows = batch.rows + min(drafts, batch.decoding * engine.state.max_drafts)
    counts = cast(PaddedRounds, engine.rounds).prompt_rows
    fitting = (count for count in counts if count >= rows and count > size.spans)
    assert size.rows == next(fitting, rows)
    assert batch.samples + (rows - batch.rows if drafts else 0) <= size.samples < size.rows
