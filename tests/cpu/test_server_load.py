"""A crowd of clients on one server, and what serving costs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from server_attacks import run
from server_harness import emoji_model, offline, running_server
from server_load import (
    CHAT,
    Speeds,
    Tally,
    make_cases,
    make_tool_cases,
    so_many,
    storm,
    throughput,
)

REQUESTS = int(os.environ.get("SUREFOOT_LOAD_REQUESTS", "300"))
CLIENTS = int(os.environ.get("SUREFOOT_LOAD_CLIENTS", "16"))
MOST_TRIES = 6


def test_a_crowd_gets_the_offline_texts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = emoji_model(tmp_path)
    # Too few blocks for everybody, so that requests are preempted as well.
    options = {"backend": "auto", "kv_cache_memory": 260_000, "max_model_len": 512}
    cases = make_cases(offline(model, **options), 40, 40)
    tally = Tally()
    with running_server(model, "--max-queue", "12", **options) as server:
        cases += asyncio.run(make_tool_cases(server, 4))
        course = asyncio.run(storm(server, cases, CLIENTS, tally, so_many(REQUESTS, tally)))
        assert not tally.wrong, "\n".join(tally.wrong[:3])
        assert min(tally.counts[kind] for kind in ("stream", "whole", "leave", "mistake")) > 5
        server.wait_idle()
        assert server.metric("surefoot_preemptions_total") > 0
        assert server.metric("surefoot_kv_usage_ratio") == 0
        assert any(case.path == CHAT for case in cases)
        assert any("structured_outputs" in case.body for case in cases)
        assert min(course.drafts) > 0
        if not course.flat:
            # A heap grows by a step now and then; what leaks goes on growing.
            again = Tally()
            course = asyncio.run(storm(server, cases, CLIENTS, again, so_many(REQUESTS, again)))
            assert not again.wrong, "\n".join(again.wrong[:3])
        assert course.flat, f"bytes of memory before and after: {course.memory}"
        assert server.stop() == 0


def test_serving_costs_little(tmp_path: Path) -> None:
    model = emoji_model(tmp_path)
    tries: list[Speeds] = []
    # CPU time, as neighbours on a shared machine change the clock's, and the least of it, as they
    # add to this, too: with a CPU each for core and front, the server reaches 0.8 times the speed
    # in process when both of these hold. While they do not, it is measured again.
    for _ in range(MOST_TRIES):
        tries.append(throughput(str(model), 32, 80, 2))
        inside = min(each.inside_cpu for each in tries)
        core = min(each.core_cpu for each in tries)
        front = min(each.front_cpu for each in tries)
        if max(core, front) <= inside / 0.8:
            break
    else:
        pytest.fail("\n".join(str(each) for each in tries))


def test_a_stream_beside_attackers_keeps_its_text(tmp_path: Path) -> None:
    """How long its gaps are is measured by ``server_attacks``, on a machine that nobody else
    uses."""
    names = ["300,000 headers", "mistakes"]
    with running_server(emoji_model(tmp_path)) as server:
        report = run(server, 150, names)
    assert list(report["attacks"]) == names
    for found in report["attacks"].values():
        assert found["text_unchanged"] and 0 < found["median"] <= found["longest"]
    answers = [found["answers"] for found in report["attacks"].values()]
    assert set(answers[0]) <= {431, 0} and answers[0]
    assert set(answers[1]) == {400}
