"""What only statistics can see: defects that plain decoding and speculation share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from certify_setups import make_judge, make_subject, one_thread, silent  # noqa: F401
from harness import needs_native
from surefoot.certify import distribution
from surefoot.certify.distribution import run_distribution
from surefoot.certify.findings import Section
from surefoot.certify.hypotheses import Draws
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


@needs_native
def test_no_two_cells_share_their_random_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what is drawn again: where a model is sure of each token, the numbers consist of
    them alone, and an accident among them would be found wherever it is looked for."""
    found: list[list[float]] = []

    def tests_of(name: str, draws: dict[str, Draws], positions: int) -> list[Any]:
        found.extend(sorted(draw.uniforms.values()) for draw in draws.values())
        return []

    monkeypatch.setattr(distribution, "tests_of", tests_of)
    monkeypatch.setattr(distribution, "CELLS", (("sure", {"temperature": 1e-3}),) * 2)
    judge, size = make_judge(make_subject()), replace(QUICK, seeds=8, sampled_positions=3)
    for number, seed in ((0, 100), (1, 100), (0, 900)):
        distribution._run_cell(judge, Section("distribution"), size, number, seed)
    assert len({tuple(values) for values in found}) == len(found) == 6
    assert len({round(value, 9) for values in found for value in values}) > 6 * 40


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
