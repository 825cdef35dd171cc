"""Serving imports nothing: everybody would wait for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import needs_native

SERVE = """
import random, sys
sys.path.insert(0, sys.argv[1])
from harness import make_engine, tiny_decoder
from surefoot.request import SamplingParams, SpeculationParams

engine = make_engine(
    tiny_decoder("native"), sys.argv[2] == "ahead", max_num_seqs=24, max_draft_tokens=4,
    proposers=("ngram", "eagle3=dummy"),
)
before, dice = set(sys.modules), random.Random(0)
for wave in range(12):
    for index in range(dice.randint(1, 24)):
        prompt = [dice.randrange(48) for _ in range(dice.choice((3, 8, 17)))]
        params = SamplingParams(
            temperature=dice.choice((0, 0.8)), top_p=dice.choice((1, 0.9)), ignore_eos=True,
            max_tokens=dice.randint(1, 40),
        )
        wish = SpeculationParams(dice.choice(("auto", "auto", "off")))
        engine.add(engine.make_request(f"{wave}.{index}", prompt, params, wish))
        if dice.random() < 0.3:
            engine.step()
    while engine.has_work:
        engine.step()
assert engine.stats.draft_rows
print(*sorted(set(sys.modules) - before))
"""


@needs_native
@pytest.mark.parametrize("rounds", ["called", "ahead"])
def test_serving_imports_nothing(rounds: str) -> None:
    """In a process of its own: this one has imported it all."""
    found = subprocess.run(
        [sys.executable, "-c", SERVE, str(Path(__file__).parent), rounds],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
