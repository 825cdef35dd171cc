"""The sampler against a plain re-computation, row by row, and against the exact distribution."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from surefoot.kernels.acceptance import accept_chain, cut_at_end
from surefoot.kernels.backend import Backend
from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.logprobs import row_logprobs
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.logprobs import unpack
from surefoot.sampling.noise import gumbel, philox
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, filtered_scores, sample_rows

NATIVE = None if native_unavailable() else NativeBackend(threads=2)
BACKENDS = [
    pytest.param(None, id="torch"),
    pytest.param(
        NATIVE,
        id="native",
        marks=pytest.mark.skipif(NATIVE is None, reason=f"native kernels: {native_unavailable()}"),
    ),
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)

GOLDEN = Path(__file__).parent.parent / "golden"


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter: Any, key: Any, output: Any) -> None:
    got = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in got) == output


def noise_of(seeds: Any, choices: Any, positions: Any, vocab: int) -> torch.Tensor:
    return gumbel(torch.tensor(seeds), torch.tensor(choices), torch.tensor(positions), vocab)


def test_noise_is_finite_everywhere_and_gumbel_distributed() -> None:
    noise = noise_of([5] * 200, [0] * 200, list(range(200)), 1001)
    assert torch.isfinite(noise).all()
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 0.001


def test_noise_of_a_row_does_not_depend_on_its_neighbours() -> None:
    together = noise_of([5, 2**62 + 3, 5], [0, 1, 0], [7, 8, 9], 333)
    for row, (seed, choice, position) in enumerate([(5, 0, 7), (2**62 + 3, 1, 8), (5, 0, 9)]):
        assert torch.equal(noise_of([seed], [choice], [position], 333)[0], together[row])


@pytest.mark.parametrize("what", ["position", "seed", "high seed bits", "choice", "token"])
def test_neighbouring_noise_is_uncorrelated(what: str) -> None:
    count, vocab = 400, 256
    zero, ramp = [0] * count, list(range(count))
    base = noise_of([11] * count, zero, ramp, vocab)
    other = {
        "position": lambda: noise_of([11] * count, zero, [x + 1 for x in ramp], vocab),
        "seed": lambda: noise_of([12] * count, zero, ramp, vocab),
        "high seed bits": lambda: noise_of([11 + 2**40] * count, zero, ramp, vocab),
        "choice": lambda: noise_of([11] * count, [1] * count, ramp, vocab),
        "token": lambda: base.roll(1, dims=1),
    }[what]()
    correlation = np.corrcoef(base.flatten().numpy(), other.flatten().numpy())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(count * vocab)


def slot_params(*requests: Request) -> SlotParams:
    params = SlotParams(len(requests), VOCAB, torch.device("cpu"))
    for slot, request in enumerate(requests):
        request.slot = slot
    params.write(requests)
    return params


VOCAB = 23


def make_request(params: SamplingParams, prompt: list[int], seed: int = 0) -> Request:
    ends = (3, 4)
    return Request("r", tuple(prompt), params, SpeculationParams(), seed, 999, ends)


def plain_scores(
    logits: list[float], params: SamplingParams, request: Request, before: list[int]
) -> np.ndarray:
    """Filtered log-probabilities of one row, written as one would say it."""
    scores = np.array(logits, dtype=np.float64)
    output = before[len(request.prompt) :]
    for token in range(len(scores)):
        if token in before:
            repetition = params.repetition_penalty
            scores[token] *= repetition if scores[token] <= 0 else 1 / repetition
        count = output.count(token)
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty * (count > 0)
        scores[token] += (params.logit_bias or {}).get(token, 0)
        if len(output) < params.min_tokens and token in request.stop_token_ids:
            scores[token] = -np.inf
    if params.greedy:
        return scores
    scores = (scores - scores.max()) / params.temperature
    probabilities = np.exp(scores) / np.exp(scores).sum()
    keep = probabilities >= params.min_p * probabilities.max() * (1 - 1e-9)
    scores = np.where(keep, scores, -np.inf)
    if params.top_k > 0:
        border = np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
        scores = np.where(scores >= border, scores, -np.inf)
    probabilities = np.exp(scores) / np.exp(scores).sum()
    order = np.argsort(-probabilities, kind="stable")
    total, border = 0.0, 0.0
    for token in order:
        if total < params.top_p - 1e-6:
            border = probabilities[token]
        total += probabilities[token]
    if params.top_p < 1:
        scores = np.where(probabilities >= border, scores, -np.inf)
    return scores


parameter_sets = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0])},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 4, 22, 23, 999]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.9]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.5])),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=7),
    },
)


@each_backend
@settings(max_examples=300)
@given(sets=st.lists(parameter_sets, min_size=1, max_size=4), seed=st.integers(0, 10**9))
def test_rows_of_a_mixed_batch_equal_the_plain_recomputation(
    backend: Backend | None, sets: Any, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    requests, histories = [], []
    for values in sets:
        prompt = dice.integers(0, VOCAB, dice.integers(1, 6)).tolist()
        requests.append(make_request(SamplingParams(**values), prompt, int(dice.integers(2**40))))
        histories.append(prompt + dice.integers(0, VOCAB, dice.integers(0, 8)).tolist())
    params = slot_params(*requests)
    width = max(map(len, histories)) + 3
    history = torch.tensor([text + [5] * (width - len(text)) for text in histories])
    # Two rows each: the last position and one before it, where later tokens must not be seen.
    slots, positions = [], []
    for slot, text in enumerate(histories):
        slots += [slot, slot]
        positions += [len(text), max(len(text) - 2, len(requests[slot].prompt))]
    logits = torch.tensor(dice.normal(0, 2, (len(slots), VOCAB)), dtype=torch.float32)
    rows = SampleRows(torch.tensor(slots), torch.tensor(positions), history, width)
    features = SamplingStages.of(request.params for request in requests)
    untouched = logits.clone()
    got = sample_rows(logits, rows, params, features, backend).tolist()
    assert torch.equal(logits, untouched)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        request = requests[slot]
        before = histories[slot][:position]
        scores = plain_scores(logits[row].tolist(), request.params, request, before)
        if not request.params.greedy:
            noise = noise_of([request.seed], [0], [position], VOCAB)[0].numpy()
            scores = scores + noise
        assert scores[got[row]] >= scores.max() - 1e-4, (request.params, scores, got[row])


@each_backend
def test_ties_go_to_the_lowest_id(backend: Backend | None) -> None:
    request = make_request(SamplingParams(temperature=0), [1])
    logits = torch.zeros((1, VOCAB))
    logits[0, [9, 4, 17]] = 1.0
    rows = SampleRows(torch.tensor([0]), torch.tensor([1]), torch.tensor([[1]]), 1)
    assert int(sample_rows(logits, rows, slot_params(request), SamplingStages(), backend)) == 4


@each_backend
def test_tiny_temperatures_do_not_overflow(backend: Backend | None) -> None:
    request = make_request(SamplingParams(temperature=1e-30, top_p=0.9, top_k=5, min_p=0.1), [1])
    logits = torch.linspace(-50, 50, VOCAB).unsqueeze(0)
    rows = SampleRows(torch.tensor([0]), torch.tensor([1]), torch.tensor([[1]]), 1)
    features = SamplingStages.of([request.params])
    assert int(sample_rows(logits, rows, slot_params(request), features, backend)) == VOCAB - 1


@each_backend
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.4, "top_k": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    ],
)
def test_twenty_thousand_seeds_follow_the_exact_distribution(
    values: Any, backend: Backend | None
) -> None:
    count = 20_000
    params = SamplingParams(**values)
    request = make_request(params, [1, 2, 2, 5])
    before = [1, 2, 2, 5, 7, 7, 8]
    dice = np.random.default_rng(3)
    row = dice.normal(0, 0.8, VOCAB)
    slots = slot_params(request)
    slots.seed = torch.arange(count) * 7919 + 13
    for name in vars(slots):
        column = getattr(slots, name)
        if isinstance(column, torch.Tensor) and name != "seed":
            setattr(slots, name, column[:1].expand(count, *column.shape[1:]).contiguous())
    rows = SampleRows(
        torch.arange(count),
        torch.full((count,), len(before)),
        torch.tensor([before]).expand(count, -1),
        len(before),
    )
    logits = torch.tensor(row, dtype=torch.float32).expand(count, -1)
    tokens = sample_rows(logits, rows, slots, SamplingStages.of([params]), backend)
    scores = plain_scores(row.tolist(), params, request, before)
    expected = np.exp(scores) / np.exp(scores).sum() * count
    observed = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert (observed[expected == 0] == 0).all()
    usual = expected > 5
    rest = (~usual) & (expected > 0)
    seen = np.append(observed[usual], observed[rest].sum())
    wanted = np.append(expected[usual], expected[rest].sum())
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 0.001


def test_greedy_acceptance_equals_the_golden_cases() -> None:
    cases = json.loads((GOLDEN / "greedy_prefix.json").read_text())["cases"]
    assert len(cases) == 200
    width = 8
    drafts = torch.tensor([case["draft"] + [-1] * (width - len(case["draft"])) for case in cases])
    sampled = torch.tensor(
        [case["target_argmax"] + [-2] * (width + 1 - len(case["target_argmax"])) for case in cases]
    )
    lengths = torch.tensor([len(case["draft"]) for case in cases])
    accepted = accept_chain(sampled, drafts, lengths).tolist()
    assert accepted == [case["accepted"] for case in cases]
    for row, case in enumerate(cases):
        assert sampled[row, : accepted[row] + 1].tolist() == case["committed"]


@settings(max_examples=300)
@given(st.data())
def test_acceptance_and_cut_equal_a_loop(data: Any) -> None:
    batch, width = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 5))
    small = st.integers(0, 2)
    sampled = [[data.draw(small) for _ in range(width + 1)] for _ in range(batch)]
    drafts = [[data.draw(small) for _ in range(width)] for _ in range(batch)]
    lengths = [data.draw(st.integers(0, width)) for _ in range(batch)]
    room = [data.draw(st.integers(1, 7)) for _ in range(batch)]
    stops = [[data.draw(st.integers(-1, 4)) for _ in range(2)] for _ in range(batch)]
    accepted = accept_chain(
        torch.tensor(sampled), torch.tensor(drafts).view(batch, width), torch.tensor(lengths)
    )
    counts, codes = cut_at_end(
        torch.tensor(sampled), accepted + 1, torch.tensor(room), torch.tensor(stops)
    )
    for row in range(batch):
        run = 0
        while run < lengths[row] and drafts[row][run] == sampled[row][run]:
            run += 1
        assert int(accepted[row]) == run
        committed, code = [], 0
        for token in sampled[row][: run + 1]:
            committed.append(token)
            if token in stops[row]:
                code = 1
                break
            if len(committed) == room[row]:
                code = 2
                break
        assert (int(counts[row]), int(codes[row])) == (len(committed), code)


def test_the_mass_before_a_token_may_not_reach_top_p() -> None:
    """Where the tokens before have exactly the mass asked for, the next is one too many."""
    logits = torch.linspace(3, -3, VOCAB).unsqueeze(0)
    mass = torch.softmax(logits - logits.amax(), dim=-1)
    before = mass.cumsum(dim=-1) - mass
    for kept in (1, 4):
        exact = before[0, kept]
        for top_p, expected in ((exact, kept), (exact.nextafter(torch.tensor(1.0)), kept + 1)):
            params = SamplingParams(temperature=1.0, top_p=top_p.item())
            slots = slot_params(make_request(params, [1]))
            assert slots.top_p[0] == top_p
            stages = SamplingStages.of([params])
            scores = filtered_scores(logits, torch.tensor([0]), slots, stages)
            assert int(scores.isfinite().sum()) == expected


def test_tokens_that_are_as_likely_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]).expand(5, -1)
    tokens = torch.arange(5)
    found = unpack(row_logprobs(logits, tokens, 0), tokens.tolist(), 0)
    assert [item.rank for item in found] == [5, 1, 1, 4, 1]


def test_logprobs_are_those_of_the_raw_row() -> None:
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([0, 7, 39, 12, 12])
    got = row_logprobs(logits, tokens, 3)
    exact = torch.log_softmax(logits.double(), dim=-1)
    for row, token in enumerate(tokens.tolist()):
        [found] = unpack(got[row : row + 1], [token], 3)
        assert math.isclose(found.logprob, float(exact[row, token]), abs_tol=1e-5)
        assert found.rank == int((exact[row] > exact[row, token]).sum()) + 1
        best = exact[row].topk(3)
        assert [id for id, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)
