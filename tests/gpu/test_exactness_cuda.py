"""Law 1 on the device, in float32: recorded rounds, called rounds, and plain decoding alone give
the same text. The scenarios are those of tests/cpu/test_exactness.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from device_engines import device_decoder, device_engine, plain_texts, register_twins
from hypothesis import HealthCheck, Phase, given, settings

import test_exactness as cpu
from harness import Job, run_jobs

pytestmark = pytest.mark.gpu
ON_DEVICE = False
SCENARIOS = 24
"""A planner that measures times decides how many drafts are verified: of 16, now and then too few.
"""
seen = {"recorded": 0, "called": 0, "verified": 0, "accepted": 0}


def check(scenario: tuple[list[Job], dict[str, Any]]) -> None:
    """Recorded, and called."""
    work, options = scenario
    decoder = device_decoder()
    expected = plain_texts(decoder, work)
    if options["proposers"]:
        texts = tuple((*request.prompt, *request.output) for request in expected)
        options = {**options, "proposer_options": {"oracle": {"texts": texts}}}
    for way in ({}, {"enforce_eager": True}):
        engine = device_engine(decoder, **{**options, **way})
        for job, want, got in zip(work, expected, run_jobs(engine, work), strict=True):
            cpu.compare("torch", job, want, got)
            seen["verified"] += got.stats.verified
            seen["accepted"] += got.stats.accepted
        seen["recorded"] += engine.stats.replays
        seen["called"] += engine.stats.rounds - engine.stats.replays


def test_any_scenario_gives_the_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    register_twins(monkeypatch)
    quick = settings(
        max_examples=SCENARIOS,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    quick(given(cpu.scenarios())(check))()
    print(seen, cpu.tally, sep="\n")
    cpu.tally.check()
    assert seen["recorded"] > 100 and seen["called"] > 100
    assert seen["verified"] > seen["accepted"] > 50
