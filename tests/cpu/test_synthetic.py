"""Synthetic acceptance in every kind of round, in traffic on a tiny engine."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import tiny_decoder
from surefoot.bench import synthetic
from surefoot.bench.sweep import drafting, random_prompts
from surefoot.bench.traffic import IDLE, TrafficSettings, run_calls
from surefoot.bench.workload import Call
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.request import SpeculationParams
from tree_proposers import Bush

OFF = SpeculationParams("off")


RATES = (0.8, 0.5, 0.1)


def synthetic_engine(ahead: bool, proposer: str = synthetic.NAME, **more: Any) -> Engine:
    synthetic.register()
    values: dict[str, Any] = dict(
        proposers=(proposer,), max_draft_tokens=4, max_num_seqs=6, kv_blocks=400, block_size=4,
        calibration_seconds=0.02, enable_prefix_caching=False, max_num_batched_tokens=24,
    )  # fmt: skip
    config = EngineConfig(**{**values, **more})
    return Engine(tiny_decoder(), config, ahead, synthetic.accept_at(RATES))


def some_calls(count: int) -> list[Call]:
    """More than fit at once, so that prompts come while others decode."""
    prompts = random_prompts(48, count, 17)
    return [Call(prompt, 30 + 2 * (i % 10), seed=i) for i, prompt in enumerate(prompts)]


def run_counting(
    engine: Engine, mode: Any, count: int = 12, temperature: float = 0.0
) -> tuple[list[Any], Any]:
    """The texts, and by kind of round how many times draft 1, 2, … was (verified, right)."""
    counts: dict[str, list[list[int]]] = defaultdict(lambda: [[0, 0] for _ in range(4)])
    texts: dict[str, list[int]] = {}
    step = engine.step

    def counting() -> list[Any]:
        before = dict(engine.stats.kinds)
        progress = step()
        now = engine.stats.kinds
        [kind] = [kind for kind in now if now[kind] != before.get(kind)] or [IDLE]
        for item in progress:
            texts[item.request.request_id] = item.request.output
            for place in range(item.drafting.verified):
                counts[kind][place][0] += 1
                counts[kind][place][1] += place < item.drafting.accepted
        return progress

    engine.step = counting  # type: ignore[method-assign]
    with drafting(engine, mode) as wish:
        run_calls(
            engine, some_calls(count), TrafficSettings((mode,), 6, temperature=temperature), wish
        )
    engine.step = step  # type: ignore[method-assign]
    return [texts[name] for name in sorted(texts)], counts


@pytest.mark.parametrize("proposer", [synthetic.NAME, "eagle3=dummy"])
def test_drafts_are_right_at_the_given_rates_in_every_kind_of_round(proposer: str) -> None:
    engine = synthetic_engine(True, proposer)
    texts, counts = run_counting(engine, 4, 60)
    assert len(counts) == 2, "one of the kinds of rounds did not occur"
    for kind, places in counts.items():
        for (verified, right), rate in zip(places, (*RATES, 0.0), strict=True):
            assert verified > 150, kind
            # Nearly independent coins; where a text ends, right drafts are cut.
            off = 4 * math.sqrt(rate * (1 - rate) / verified) + 0.02
            assert right / verified == pytest.approx(rate, abs=off), kind
    assert len({tuple(text[:20]) for text in texts}) == len(texts)


def test_the_text_is_the_same_however_it_is_scheduled() -> None:
    expected = run_counting(synthetic_engine(False), 0)[0]
    assert run_counting(synthetic_engine(True), 0)[0] == expected
    for engine in (synthetic_engine(False, max_num_seqs=2), synthetic_engine(True)):
        for mode in ("auto", 3):
            assert run_counting(engine, mode)[0] == expected
    assert run_counting(synthetic_engine(True), 2, temperature=1.0)[0] == expected


def test_coins_and_tokens_are_even_and_independent() -> None:
    state: Any = SimpleNamespace(
        device=torch.device("cpu"), max_drafts=3, vocab_size=1000,
        params=SimpleNamespace(seed=torch.arange(64)),
    )  # fmt: skip
    slots, first = torch.arange(64), torch.full((64,), 100)
    half = torch.full((500,), synthetic.ALWAYS // 2)
    text = synthetic.tokens_at(state, slots, first, torch.full((500,), synthetic.ALWAYS))
    right = (synthetic.tokens_at(state, slots, first, half) == text).double()
    assert right.mean() == pytest.approx(0.5, abs=0.015)
    for one, other in ((right[:, 1:], right[:, :-1]), (right[1:], right[:-1])):
        assert ((one - 0.5) * (other - 0.5)).mean() == pytest.approx(0, abs=0.008)
    assert text.double().mean() == pytest.approx(499.5, abs=10)
    assert torch.bincount(text.flatten() // 100, minlength=10).min() > 0.92 * text.numel() / 10


def test_trees_are_refused() -> None:
    with pytest.raises(SurefootError, match="chains") as caught:
        synthetic_engine(False, Bush.name)
    assert caught.value.option == "synthetic_acceptance"
