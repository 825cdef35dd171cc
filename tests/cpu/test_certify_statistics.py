"""The certificate's own arithmetic, against scipy, the sampler, and brute force."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import pytest
import torch
from scipy import stats

from harness import VOCAB
from surefoot.certify import statistics
from surefoot.certify.noise import Noise
from surefoot.certify.regret import Filters, Row, adjusted, probabilities, regret, tie_bound
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, adjust, filtered_scores, sample_rows


@pytest.mark.parametrize(("statistic", "freedom"), [(0.5, 1), (12.0, 7), (80.0, 15), (3.0, 40)])
def test_chi_square_tail(statistic: float, freedom: int) -> None:
    expected = stats.chi2.sf(statistic, freedom)
    assert math.isclose(statistics.chi_square_tail(statistic, freedom), expected, rel_tol=1e-9)


def test_goodness_of_fit_is_pearsons() -> None:
    counts, chances = [30, 14, 6], [0.5, 0.3, 0.2]
    expected = stats.chisquare(counts, [chance * 50 for chance in chances])
    p_value, freedom = statistics.goodness_of_fit(counts, chances)
    assert freedom == 2 and math.isclose(p_value, expected.pvalue, rel_tol=1e-9)


def test_rare_classes_are_pooled() -> None:
    p_value, freedom = statistics.goodness_of_fit([50, 3, 2, 3, 2], [0.84, 0.04, 0.04, 0.04, 0.04])
    expected = stats.chisquare([50, 10], [0.84 * 60, 0.16 * 60])
    assert freedom == 1 and math.isclose(p_value, expected.pvalue, rel_tol=1e-9)


def test_homogeneity_is_that_of_the_contingency_table() -> None:
    left, right = [20, 35, 45], [30, 20, 60]
    expected: Any = stats.chi2_contingency([left, right], correction=False)
    p_value, freedom = statistics.same_distribution(left, right)
    assert freedom == 2 and math.isclose(p_value, float(expected[1]), rel_tol=1e-9)


def test_false_discovery_rate() -> None:
    p_values = [0.001, 0.8, 0.012, 0.021, 0.5, 0.03]
    expected = stats.false_discovery_control(p_values) <= 0.05
    assert statistics.benjamini_hochberg(p_values, 0.05) == expected.tolist()
    assert not any(statistics.benjamini_hochberg([0.2, 0.06, 0.9], 0.05))


def test_the_reported_power_is_the_real_one() -> None:
    """A shift of the reported size, spread evenly, is rejected nine times out of ten."""
    samples, bins, alpha = 800, 8, 0.01
    shift = statistics.smallest_shift(samples, bins - 1, alpha)
    chances = [1 / bins + (shift if i % 2 else -shift) * 2 / bins for i in range(bins)]
    assert math.isclose(sum(abs(c - 1 / bins) for c in chances) / 2, shift, rel_tol=1e-9)
    generator = torch.Generator().manual_seed(0)
    seen = 0
    for _ in range(400):
        drawn = torch.tensor(chances).multinomial(samples, replacement=True, generator=generator)
        counts = drawn.bincount(minlength=bins).tolist()
        seen += statistics.goodness_of_fit(counts, [1 / bins] * bins)[0] < alpha
    assert 0.84 < seen / 400 < 0.96


def test_dependence_is_seen_and_independence_is_not() -> None:
    random = Random(1)
    values = [random.random() for _ in range(600)]
    tied = [(value, value) for value in values[:300]]
    free = list(zip(values[:300], values[300:], strict=True))
    assert statistics.independent(tied)[0] < 1e-9
    assert statistics.independent(free)[0] > 0.01
    assert statistics.uniform([value**2 for value in values])[0] < 1e-9
    assert statistics.uniform(values)[0] > 0.01


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.6, "min_p": 0.02, "temperature": 1.7},
    {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.4},
    {"logit_bias": {3: 4.0, 9: -2.0}, "min_tokens": 30, "stop_token_ids": (4, 5)},
    {"temperature": 0.0, "repetition_penalty": 0.7},
]


def rows_of(values: dict[str, Any], seed: int) -> tuple[Row, torch.Tensor, torch.Tensor, Any]:
    """The same position for the certificate and for the sampler."""
    params = SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 50, **values})
    random = Random(seed)
    prompt = tuple(random.randrange(VOCAB) for _ in range(6))
    output = [random.randrange(VOCAB) for _ in range(9)]
    ends = (0, 1, *(params.stop_token_ids or ()))
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    request = Request("x", prompt, params, SpeculationParams(), seed, 99, (0, 1), output=output)
    slot = SlotParams(1, VOCAB, torch.device("cpu"))
    request.slot = 0
    slot.write([request])
    zero = torch.zeros(1, dtype=torch.int64)
    history = torch.tensor([[*prompt, *output, 7, 7]])
    rows = SampleRows(zero, torch.tensor([15]), history, 17)
    return Row(prompt, output, params, 0, ends), logits, zero, (rows, slot)


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", PARAMETERS, ids=str)
def test_the_second_opinion_on_scores_agrees_with_the_sampler(values: dict[str, Any]) -> None:
    for seed in range(20):
        row, logits, zero, (rows, slot) = rows_of(values, seed)
        features = SamplingStages.of([row.params])
        expected = adjust(logits, rows, slot, features)
        close(adjusted(logits[0], row), expected[0].double())
        token = int(sample_rows(logits, rows, slot, features)[0])
        assert regret(logits[0], row, token, 1e-5) <= 1e-4
        if row.params.greedy:
            continue
        kept = torch.softmax(filtered_scores(expected, zero, slot, features)[0], dim=0)
        close(probabilities(logits[0], row), kept.double())


def test_what_a_shift_admits_is_what_the_filters_admit_after_it() -> None:
    generator = torch.Generator().manual_seed(2)
    for number in range(60):
        scores = torch.randn(12, generator=generator).double()
        filters: dict[str, Any] = ({"top_k": 4}, {"min_p": 0.3}, {"top_p": 0.6})[number % 3]
        params = SamplingParams(temperature=(0.6, 1.0)[number % 2], **filters)
        for shift, token in itertools.product((0.3, -0.3), range(12)):
            moved = scores.clone()
            moved[token] += shift
            really = bool(Filters(moved, params).admitted()[token])
            said = bool(Filters(scores, params).admitted(shift)[token])
            if params.top_p == 1:
                assert said == really
            elif shift > 0:
                # Masses are bounded by what all rivals could gain or lose together.
                assert said or not really
            else:
                assert really or not said


def kept_by_definition(scores: list[float], params: SamplingParams, shift: float, i: int) -> bool:
    """One token, moved by ``shift``, against all the others where they are."""
    temperature, mine = params.temperature, scores[i] + shift
    best = max(scores)
    border = best + temperature * math.log(params.min_p) if params.min_p else -math.inf
    falling = sorted(scores, reverse=True)
    last = falling[params.top_k - 1] if params.top_k else -math.inf
    core = [score for score in scores if score >= border and score >= last]
    total = sum(math.exp((score - best) / temperature) for score in core)
    rivals = [score for j, score in enumerate(scores) if j != i and score > mine]
    mass = sum(math.exp((s - best) / temperature) for s in rivals if s >= border and s >= last)
    return (
        mine >= border
        and (not params.top_k or len(rivals) < params.top_k)
        and (params.top_p == 1 or mass / total * math.exp(-shift / temperature) < params.top_p)
    )


@pytest.mark.parametrize("few", [1, 4, 512])
def test_filters_keep_what_their_definitions_keep(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of the vocabulary is sorted at first."""
    monkeypatch.setattr("surefoot.certify.regret.FEW", few)
    generator, random = torch.Generator().manual_seed(few), Random(few)
    for _ in range(40):
        scores = (random.choice((0.3, 3.0)) * torch.randn(60, generator=generator)).double()
        params = SamplingParams(
            temperature=random.choice((0.5, 1.0, 40.0)),
            top_k=random.choice((0, 1, 7)),
            top_p=random.choice((1.0, 0.3, 0.97)),
            min_p=random.choice((0.0, 0.0, 0.1)),
        )
        for shift in (0.0, 0.4, -0.4):
            kept = Filters(scores, params).admitted(shift).tolist()
            places = range(len(scores))
            assert kept == [kept_by_definition(scores.tolist(), params, shift, i) for i in places]


def test_regret_is_the_loss_of_score() -> None:
    logits = torch.tensor([1.0, 4.0, 3.5, -2.0])
    greedy = Row((0,), [], SamplingParams(temperature=0), 0, ())
    assert regret(logits, greedy, 1, 0.0) == 0
    assert math.isclose(regret(logits, greedy, 2, 0.0), 0.5)
    filtered = Row((0,), [], SamplingParams(temperature=1, top_k=1, seed=1), 0, ())
    assert regret(logits, filtered, 1, 0.0) == 0
    assert regret(logits, filtered, 2, 0.1) == math.inf
    # With half a point of help token 2 gets in, and nothing is sure to stay in but token 1.
    assert regret(logits, filtered, 2, 0.6) < math.inf


def test_the_bound_follows_what_multiplies_the_noise() -> None:
    noise = Noise(10, (), 0.01, 0.0, 20.0, 1.0)

    def bound(**values: Any) -> float:
        return tie_bound(noise, Row((0,), [], SamplingParams(**values), 0, ()))

    assert bound(temperature=0) == noise.regret_bound == 0.02
    assert bound(temperature=0, repetition_penalty=2.0) > 0.04
    assert 0.02 < bound(temperature=1) < bound(temperature=50) < 0.03
