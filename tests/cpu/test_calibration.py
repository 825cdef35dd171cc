"""Prompts that an engine runs before it serves."""

from __future__ import annotations

from typing import Any

import torch

from eagle3_engines import folder, target
from harness import Job, make_engine, run_jobs
from surefoot.engine.calibration import compile_prompts, measure_cost
from surefoot.engine.engine import Engine
from surefoot.request import SamplingParams

SIZES = (1, 5, 16, 40)
JOBS = [
    Job((3, 7, 3, 7, 3, 5 + i), SamplingParams(temperature=i * 0.5, seed=i, max_tokens=30))
    for i in range(3)
]


def build() -> Engine:
    own = {"path": folder("skilled"), "draft_tokens": 4}
    return make_engine(
        target(), False, proposers=("eagle3", "ngram"), proposer_options={"eagle3": own},
        max_draft_tokens=4, max_num_seqs=3, kv_blocks=200, draft_policy="fixed",
    )  # fmt: skip


def test_prompts_run_at_the_start_leave_no_trace() -> None:
    """Texts and what was drafted for them are those of an engine that ran none."""
    fresh, used = build(), build()
    compile_prompts(used, SIZES)
    measure_cost(used, 64, 0.01)
    for left, right in zip(fresh.controller.estimators, used.controller.estimators, strict=True):
        for name, table in vars(left).items():
            if isinstance(table, torch.Tensor):
                assert torch.equal(table, vars(right)[name]), name
    pairs = [run_jobs(engine, JOBS) for engine in (fresh, used)]
    for left, right in zip(*pairs, strict=True):
        assert left.output == right.output
        assert left.proposed_by == right.proposed_by
        assert (left.stats.drafted, left.stats.accepted) == (
            right.stats.drafted,
            right.stats.accepted,
        )
    assert sum(request.stats.accepted for request in pairs[0]) > 20


def test_every_proposer_drafts_after_every_prompt() -> None:
    """Their kernels depend on how long texts may be."""
    engine, asked = build(), []
    for proposer in engine.proposers:

        def propose(slots: Any, own: Any = proposer, real: Any = proposer.propose) -> Any:
            asked.append((own.name, int(engine.state.length[0])))
            return real(slots)

        proposer.propose = propose  # type: ignore[method-assign]
    compile_prompts(engine, SIZES)
    assert {name for name, _ in asked} == {"eagle3", "ngram"} and len(asked) == 2 * len(SIZES)
    lengths = [length for name, length in asked if name == "ngram"]
    assert lengths == sorted(lengths) and lengths[-1] > 36, "behind the prompt, not before it"
