"""The scheduler on a fake executor: no torch, no model, random verdicts."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.engine.scheduler import Plan, Scheduler
from surefoot.kv.transaction import KVManager
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams, Status


def request(name: str, prompt: int, room: int, leader: Request | None = None) -> Request:
    return Request(
        name,
        tuple(range(prompt)),
        SamplingParams(),
        SpeculationParams(),
        seed=0,
        max_length=prompt + room,
        leader=leader,
    )


def scheduler(
    blocks: int = 50, block_size: int = 4, seqs: int = 4, rows: int = 16, cache: bool = False
) -> Scheduler:
    return Scheduler(KVManager(blocks + 1, block_size, cache), seqs, rows)


def step(machine: Scheduler, drafts: dict[str, int] | None = None, accept: int = 0) -> Plan:
    """One round of a fake executor that accepts ``accept`` drafts where there are so many."""
    plan = machine.schedule(lambda decoding, rows: drafts or {})
    committed = {}
    with plan.transaction:
        for span in plan.spans:
            if span.samples:
                count = min(span.drafts, accept) + 1
                room = span.request.max_length - span.request.length
                committed[span.request.request_id] = [7] * min(count, room)
        machine.apply(plan, committed)
    for span in plan.spans:
        if span.request.length == span.request.max_length:
            machine.finish(span.request, FinishReason.LENGTH)
    machine.check_integrity()
    return plan


def rows_of(plan: Plan) -> dict[str, int]:
    return {span.request.request_id: span.rows + span.drafts for span in plan.spans}


def test_a_long_prompt_is_chunked_beside_running_requests() -> None:
    machine = scheduler(rows=8)
    machine.add(request("a", 3, 9))
    step(machine)
    machine.add(request("b", 20, 9))
    plans = [rows_of(step(machine)) for _ in range(4)]
    assert plans == [{"b": 7, "a": 1}, {"b": 7, "a": 1}, {"b": 6, "a": 1}, {"b": 1, "a": 1}]


def test_a_prefill_chunk_leaves_running_requests_their_pace() -> None:
    machine = scheduler(rows=8)
    machine.chunk_rows = lambda decoding: 4 - decoding
    machine.add(request("a", 8, 9))
    machine.add(request("b", 3, 9))
    # Nobody waits for the first token beside the first prompt.
    assert rows_of(step(machine)) == {"a": 8}
    assert rows_of(step(machine)) == {"b": 3, "a": 1}
    machine.add(request("c", 7, 9))
    chunks = [rows_of(step(machine))["c"] for _ in range(4)]
    assert chunks == [2, 2, 2, 1]


def test_drafts_join_the_same_round_as_prefill_and_plain_requests() -> None:
    machine = scheduler()
    for name in "ab":
        machine.add(request(name, 3, 9))
    step(machine)
    machine.add(request("c", 5, 9))
    assert rows_of(step(machine, {"a": 4}, accept=2)) == {"c": 5, "a": 5, "b": 1}


def test_shortage_costs_drafts_first_then_the_youngest() -> None:
    machine = scheduler(blocks=4, block_size=2)
    old, young = request("old", 2, 5), request("young", 2, 5)
    machine.add(old)
    machine.add(young)
    step(machine)
    plan = step(machine, {"old": 6, "young": 6}, accept=6)
    assert rows_of(plan) == {"old": 1, "young": 1}
    while old.length < 6:
        plan = step(machine)
    assert young.preemptions == 1 and old.preemptions == 0
    while not (old.finished and young.finished):
        step(machine)
    assert old.finish_reason is young.finish_reason is FinishReason.LENGTH


def test_a_request_that_does_not_fit_waits_instead_of_pushing_others_out() -> None:
    machine = scheduler(blocks=4, block_size=2)
    running, late = request("running", 5, 3), request("late", 4, 2)
    machine.add(running)
    step(machine)
    machine.add(late)
    while not running.finished:
        assert "late" not in rows_of(step(machine))
    assert "late" in rows_of(step(machine))
    assert running.preemptions == late.preemptions == 0


def test_slots_limit_the_running_and_the_rest_wait_in_order() -> None:
    machine = scheduler(seqs=2)
    every = [request(name, 2, 2) for name in "abcd"]
    for item in every:
        machine.add(item)
    step(machine)
    assert [r.request_id for r in machine.running] == ["a", "b"]
    step(machine)
    step(machine)
    assert [r.request_id for r in machine.running] == ["c", "d"]


def test_choices_wait_for_their_leaders_prefill() -> None:
    machine = scheduler(rows=4, cache=True)
    first = request("first", 9, 4)
    second = request("second", 9, 4, leader=first)
    other = request("other", 2, 4)
    for item in (first, second, other):
        machine.add(item)
    seen = [set(rows_of(step(machine))) for _ in range(3)]
    assert all("second" not in names for names in seen[:2]) and "other" in seen[2]
    step(machine)
    assert second.cached == 8


def test_an_ended_leader_does_not_hold_its_choices() -> None:
    machine = scheduler()
    first = request("first", 9, 4)
    second = request("second", 9, 4, leader=first)
    machine.add(first)
    machine.add(second)
    machine.finish(first, FinishReason.ABORT)
    assert "second" in rows_of(step(machine))


def test_finishing_twice_or_while_waiting_is_harmless() -> None:
    machine = scheduler()
    waiting = request("w", 3, 3)
    machine.add(waiting)
    machine.finish(waiting, FinishReason.ABORT)
    machine.finish(waiting, FinishReason.STOP)
    assert waiting.finish_reason is FinishReason.ABORT
    assert not machine.has_work


def test_scheduler_imports_no_torch() -> None:
    code = "import sys, surefoot.engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "block_size": draw(st.sampled_from([1, 3, 4])),
        "extra_blocks": draw(st.integers(0, 12)),
        "seqs": draw(st.integers(1, 4)),
        "rows": draw(st.integers(4, 12)),
        "cache": draw(st.booleans()),
        "sizes": draw(
            st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15)), min_size=1, max_size=7)
        ),
        "chunk": draw(st.none() | st.integers(-2, 8)),
        "seed": draw(st.integers(0, 10**6)),
    }


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_every_request_ends_whole_and_in_bounded_time(world: dict[str, Any]) -> None:
    dice = random.Random(world["seed"])
    longest = max(prompt + room for prompt, room in world["sizes"])
    blocks = -(-longest // world["block_size"]) + world["extra_blocks"]
    machine = scheduler(blocks, world["block_size"], world["seqs"], world["rows"], world["cache"])
    if (chunk := world["chunk"]) is not None:
        machine.chunk_rows = lambda decoding: chunk
    every = [request(f"r{i}", *size) for i, size in enumerate(world["sizes"])]
    todo = list(every)
    steps = 0
    while todo or machine.has_work:
        while todo and dice.random() < 0.5:
            machine.add(todo.pop(0))
        drafts = {item.request_id: dice.randrange(9) for item in machine.running}
        plan = step(machine, drafts, accept=dice.randrange(9))
        assert plan.rows <= world["rows"] + sum(span.drafts for span in plan.spans)
        if dice.random() < 0.05 and machine.running:
            machine.finish(dice.choice(machine.running), FinishReason.ABORT)
        steps += 1
        assert steps < 3000
    assert all(item.status is Status.FINISHED for item in every)
    assert machine.kv.pool.num_free == machine.kv.pool.capacity
    for item in every:
        if item.finish_reason is FinishReason.LENGTH:
            assert item.length == item.max_length
