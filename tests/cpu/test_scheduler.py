"""Admission, slots and preemption on a fake executor: no torch, no model, random verdicts."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.engine.scheduler import Scheduler
from surefoot.kv.transaction import KVManager
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams, Status


def request(
    name: str, prompt: int, room: int, leader: Request | None = None, priority: int = 0
) -> Request:
    return Request(
        name,
        tuple(range(prompt)),
        SamplingParams(),
        SpeculationParams(),
        seed=0,
        max_length=prompt + room,
        leader=leader,
        priority=priority,
    )


def scheduler(blocks: int = 50, block_size: int = 4, seqs: int = 4, cache: bool = False) -> Any:
    return Scheduler(KVManager(blocks + 1, block_size, cache), seqs)


def step(machine: Scheduler, rows: int = 16, accept: int = 0) -> dict[str, int]:
    """One round of a fake executor in which ``accept`` drafts of each request are right. Returns
    the rows that each request had."""
    left = rows - len(machine.running)
    machine.admit(left)
    ran: dict[str, int] = {}
    while True:
        wanted = {}
        left = rows
        for item in machine.running:
            missing = item.length - item.computed
            count = min(missing, left) if missing > 1 else 1 + accept
            if count > 0:
                wanted[item.request_id] = min(count, item.max_length - item.computed)
                left -= count
        with machine.kv.transaction() as transaction:
            if transaction.reserve(wanted):
                transaction.keep()
                break
        machine.preempt()
    for item in list(machine.running):
        count = wanted.get(item.request_id, 0)
        missing = item.length - item.computed
        if not count:
            continue
        ran[item.request_id] = count
        known = min(count, missing)
        item.computed += known
        if known == missing:
            new = [7] * min(count - known + 1, item.max_length - item.length)
            item.output += new
            item.computed += len(new) - 1
        machine.kv.keep(machine.kv.leases[item.request_id])
        if item.length == item.max_length:
            machine.finish(item, FinishReason.LENGTH)
    for item in machine.running:
        machine.kv.give_back(machine.kv.leases[item.request_id])
    machine.check_integrity()
    return ran


def names(requests: list[Request]) -> list[str]:
    return [item.request_id for item in requests]


def test_shortage_preempts_the_youngest_who_resumes_before_later_arrivals() -> None:
    machine = scheduler(blocks=4, block_size=2)
    old, young, late = request("old", 2, 5), request("young", 2, 5), request("late", 2, 2)
    for item in (old, young, late):
        machine.add(item)
    step(machine)
    while old.length < 6:
        step(machine)
    assert young.preemptions > 0 and old.preemptions == 0
    assert names(list(machine.waiting)) == ["young", "late"]
    while not (old.finished and young.finished and late.finished):
        step(machine)
    assert {item.finish_reason for item in (old, young, late)} == {FinishReason.LENGTH}


def test_a_request_that_does_not_fit_waits_instead_of_pushing_others_out() -> None:
    machine = scheduler(blocks=4, block_size=2)
    running, late = request("running", 5, 3), request("late", 4, 2)
    machine.add(running)
    step(machine)
    machine.add(late)
    while not running.finished:
        assert "late" not in step(machine)
    assert "late" in step(machine)
    assert running.preemptions == late.preemptions == 0


@settings(max_examples=40)
@given(
    waves=st.lists(
        st.lists(st.tuples(st.integers(-1, 1), st.integers(1, 6)), max_size=4),
        min_size=1,
        max_size=6,
    ),
    seqs=st.integers(1, 3),
)
def test_lower_priorities_are_let_in_first_and_equal_ones_as_they_came(
    waves: list[list[tuple[int, int]]], seqs: int
) -> None:
    """Whoever is let in for the first time comes before all that go on waiting."""
    machine, arrivals = scheduler(blocks=9, block_size=2, seqs=seqs), 0
    order: dict[Request, tuple[int, int]] = {}
    for wave in [*waves, *[[]] * 300]:
        for priority, room in wave:
            item = request(str(arrivals), 3, room, priority=priority)
            order[item] = (priority, arrivals)
            arrivals += 1
            machine.add(item)
        before = set(machine.waiting)
        if machine.has_work:
            step(machine)
        fresh = [item for item in before - set(machine.waiting) if not item.preemptions]
        assert all(
            order[item] < order[other]
            for item in fresh
            for other in machine.waiting
            if not other.preemptions
        )
    assert not machine.has_work


def test_shortage_preempts_the_least_urgent() -> None:
    machine = scheduler(blocks=4, block_size=2)
    old, urgent = request("old", 2, 5), request("urgent", 2, 5, priority=-1)
    machine.add(old)
    step(machine)
    machine.add(urgent)
    while not (old.finished and urgent.finished):
        step(machine)
    assert old.preemptions > 0 and urgent.preemptions == 0


def test_who_decodes_keeps_the_block_of_its_next_token() -> None:
    machine = scheduler(blocks=4, block_size=2)
    running, late = request("running", 3, 5), request("late", 3, 1)
    machine.add(running)
    step(machine)
    assert running.length == 4  # Its next token begins a block.
    step(machine)
    assert running.length == 5 and machine.kv.pool.num_free == 2
    machine.add(late)
    # Two blocks are free; one of them is the running request's next.
    assert "late" not in step(machine)
    assert running.preemptions == late.preemptions == 0


def test_blocks_are_promised_once() -> None:
    """Not to two that come together, nor again while a prompt waits for its rows."""
    machine = scheduler(blocks=5, block_size=2)
    first, second = request("first", 6, 2), request("second", 5, 1)
    machine.add(first)
    machine.add(second)
    assert names(machine.admit(16)) == ["first"]
    assert machine.admit(16) == []
    assert names(list(machine.waiting)) == ["second"] and not second.preemptions


def test_after_a_restart_all_wait_in_order_of_arrival_and_hold_nothing() -> None:
    machine = scheduler(seqs=2, cache=True)
    first, ended, second, third, broken = every = [request(name, 9, 4) for name in "abcde"]
    for item in every:
        machine.add(item)
    step(machine)
    step(machine)
    machine.finish(ended, FinishReason.STOP)
    step(machine)
    assert names(machine.running) == ["a", "c"]
    # Broken off in the middle of letting somebody in, and of ending somebody.
    machine.waiting.popleft()
    machine.kv.open("d", third)
    broken.finish(FinishReason.ABORT)
    machine.restart()
    machine.check_integrity()
    assert names(list(machine.waiting)) == ["a", "c", "d"] and not machine.running
    assert machine.kv.pool.num_free == machine.kv.pool.capacity and not machine.kv.leases
    assert [item.preemptions for item in (first, second, third)] == [1, 1, 0]
    while machine.has_work:
        step(machine)
    assert {item.finish_reason for item in (first, second, third)} == {FinishReason.LENGTH}


def test_rows_of_a_round_bound_who_is_let_in() -> None:
    machine = scheduler()
    for name in "abc":
        machine.add(request(name, 5, 2))
    assert names(machine.admit(6)) == ["a", "b"]
    assert machine.admit(0) == []
    assert names(machine.admit(1)) == ["c"]


def test_slots_limit_the_running_and_the_rest_wait_in_order() -> None:
    machine = scheduler(seqs=2)
    for name in "abcd":
        machine.add(request(name, 2, 2))
    step(machine)
    assert names(machine.running) == ["a", "b"]
    step(machine)
    step(machine)
    assert names(machine.running) == ["c", "d"]


def test_choices_wait_for_their_leaders_prefill() -> None:
    machine = scheduler(cache=True)
    first = request("first", 9, 4)
    second = request("second", 9, 4, leader=first)
    other = request("other", 2, 4)
    for item in (first, second, other):
        machine.add(item)
    seen = [set(step(machine, rows=4)) for _ in range(3)]
    assert all("second" not in ran for ran in seen[:2]) and "other" in seen[2]
    step(machine)
    assert second.cached == 8


def test_choices_that_waited_keep_their_place() -> None:
    """Among those that wait, and then among those that run."""
    machine = scheduler()
    first = request("first", 9, 4)
    choices = [request(name, 9, 4, leader=first) for name in ("second", "third")]
    for item in (first, *choices, request("other", 2, 4)):
        machine.add(item)
    step(machine)
    assert names(machine.running) == ["first", "other"]
    assert names(list(machine.waiting)) == ["second", "third"]
    step(machine)
    assert names(machine.running) == ["first", "second", "third", "other"]


def test_prompts_that_come_together_share_the_room() -> None:
    """Neither has a block yet when the other is let in."""
    machine = scheduler(blocks=4)
    for name in "ab":
        machine.add(request(name, 12, 2))
    assert names(machine.admit(100)) == ["a"]


def test_an_ended_leader_does_not_hold_its_choices() -> None:
    machine = scheduler()
    first = request("first", 9, 4)
    second = request("second", 9, 4, leader=first)
    machine.add(first)
    machine.add(second)
    machine.finish(first, FinishReason.ABORT)
    assert "second" in step(machine)


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
        "seed": draw(st.integers(0, 10**6)),
    }


@settings(max_examples=300)
@given(worlds())
def test_every_request_ends_whole_and_in_bounded_time(world: dict[str, Any]) -> None:
    dice = random.Random(world["seed"])
    longest = max(prompt + room for prompt, room in world["sizes"])
    blocks = -(-longest // world["block_size"]) + world["extra_blocks"]
    machine = scheduler(blocks, world["block_size"], world["seqs"], world["cache"])
    every = [request(f"r{i}", *size) for i, size in enumerate(world["sizes"])]
    todo = list(every)
    steps = 0
    while todo or machine.has_work:
        while todo and dice.random() < 0.5:
            machine.add(todo.pop(0))
        step(machine, world["rows"], accept=dice.choice([0, 0, 1, 3]))
        if dice.random() < 0.05 and machine.running:
            machine.finish(dice.choice(machine.running), FinishReason.ABORT)
        steps += 1
        assert steps < 3000
    assert all(item.status is Status.FINISHED for item in every)
    assert machine.kv.pool.num_free == machine.kv.pool.capacity
    for item in every:
        if item.finish_reason is FinishReason.LENGTH:
            assert item.length == item.max_length
