"""What only statistics can see: defects that plain decoding and speculation share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from certify_setups import make_judge, make_subject, one_thread, silent  # noqa: F401
from harness import needs_native
from surefoot.certify.distribution import run_distribution
from surefoot.certify.findings import Section
from surefoot.certify.seams import sample_with
from surefoot.certify.sizes import QUICK
from surefoot.engine.engine import Engine
from surefoot.sampling.sampler import sample_rows

Change = Callable[[Any, Any], tuple[Any, Any]]


def hotter(logits: torch.Tensor, params: Any) -> tuple[torch.Tensor, Any]:
    return logits / 1.4, params


def shared_choices(logits: torch.Tensor, params: Any) -> tuple[torch.Tensor, Any]:
    params.choice.zero_()
    return logits, params


def shared_seeds(logits: torch.Tensor, params: Any) -> tuple[torch.Tensor, Any]:
    params.seed.bitwise_and_(~1)
    return logits, params


def check(change: Change | None) -> Section:
    def sabotage(engine: Engine, speculative: bool) -> None:
        def changed(logits: Any, rows: Any, params: Any, *rest: Any) -> torch.Tensor:
            assert change is not None
            logits, params = change(logits, params)
            return sample_rows(logits, rows, params, *rest)

        sample_with(engine, changed)

    judge = make_judge(make_subject())
    if change is not None:
        judge = replace(judge, subject=judge.subject.broken(sabotage, breaks_plain=True))
    return run_distribution(judge, QUICK, silent, stop_at_first=change is not None)


@needs_native
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hotter, "follows its distribution"),
        (shared_choices, "neighbouring choices"),
        (shared_seeds, "neighbouring seeds"),
    ],
)
def test_shared_defects_are_found(change: Change, words: str) -> None:
    section = check(change)
    assert any(words in problem for problem in section.problems), section.problems


@needs_native
def test_sound_sampling_is_not_rejected_and_the_power_is_reported() -> None:
    section = check(None)
    assert section.problems == []
    tests = section.details["tests"]
    assert len(tests) > 40
    assert 0 < min(test["smallest_shift"] for test in tests) < 0.15
    # Under the null hypothesis about half of the p-values are above one half.
    high = sum(test["p"] > 0.5 for test in tests)
    assert 0.25 < high / len(tests) < 0.75


@pytest.mark.parametrize("offset", [0, 1])
@needs_native
def test_noise_shared_by_every_other_pair_is_found(offset: int) -> None:
    """Wherever the pairs begin: the prompt's length must not decide it."""

    def sabotage(engine: Engine, speculative: bool) -> None:
        def repeated(logits: Any, rows: Any, *rest: Any) -> torch.Tensor:
            positions = rows.positions - (rows.positions + offset) % 2
            return sample_rows(logits, replace(rows, positions=positions), *rest)

        sample_with(engine, repeated)

    judge = make_judge(make_subject())
    judge = replace(judge, subject=judge.subject.broken(sabotage, breaks_plain=True))
    section = run_distribution(judge, QUICK, silent, stop_at_first=True)
    assert any("neighbouring positions" in problem for problem in section.problems)
