"""Law 1: whatever drafted, whoever shared the batch, the text is that of plain decoding alone.

Of the scenarios some are the same in every run, the others new ones: a failing one is shrunk and
printed, and the next run tries it first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from harness import (
    TIE,
    VOCAB,
    Job,
    clocks,
    first_difference,
    irregular_clock,
    make_engine,
    needs_native,
    run_alone,
    run_jobs,
    score_gap,
    tiny_decoder,
)
from surefoot.models.decoder import Decoder
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams


@dataclass
class Tally:
    """What was compared, and which tokens differ where two were about equally likely."""

    tokens: int = 0
    ties: list[str] = field(default_factory=list)

    def check(self) -> None:
        """At most 1 token in 10,000 may be a tie."""
        assert len(self.ties) <= max(1, self.tokens / 10_000), "\n".join(self.ties)


tally = Tally()
"""Of the test that runs."""


@pytest.fixture(autouse=True)
def ties_are_rare() -> Iterator[None]:
    tally.tokens = 0
    tally.ties.clear()
    yield
    tally.check()


patterns = st.one_of(
    st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=40),
    st.builds(
        lambda piece, times: (piece * times)[:60],
        st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=9),
        st.integers(2, 9),
    ),
    st.builds(lambda tail: [*range(2, 26), *tail], st.lists(st.integers(2, 9), max_size=3)),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    greedy = draw(st.booleans())
    values: dict[str, Any] = {
        "temperature": 0.0 if greedy else draw(st.sampled_from([0.05, 0.5, 1.0, 1.7])),
        "seed": draw(st.integers(0, 2**40)),
        "max_tokens": draw(st.integers(1, 40)),
    }
    extras: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.sampled_from([1, 3, 10]),
        "top_p": st.sampled_from([0.1, 0.6, 0.95]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.2, 1.9]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-9.0, 3.0])),
        "stop_token_ids": st.lists(st.integers(2, VOCAB - 1), max_size=6),
        "ignore_eos": st.just(True),
        "min_tokens": st.integers(0, values["max_tokens"]),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 3),
    }
    for name in draw(st.sets(st.sampled_from(sorted(extras)), max_size=5)):
        values[name] = draw(extras[name])
    return SamplingParams(**values)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    method = draw(st.sampled_from(["auto", "auto", "off", "ngram", "oracle", "saboteur"]))
    limit = draw(st.one_of(st.none(), st.integers(0, 1)))
    cancel = draw(st.one_of(st.none(), st.none(), st.integers(1, 30)))
    return Job(
        prompt=tuple(draw(patterns)),
        params=draw(sampling_params()),
        speculation=SpeculationParams(method, limit),
        arrival=draw(st.integers(0, 12)),
        cancel=cancel,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[Job], dict[str, Any]]:
    work = draw(st.lists(jobs(), min_size=1, max_size=6))
    if draw(st.booleans()):
        # Shared prompts make prefix hits; a second arrival finds the first one's blocks.
        for job in work[1:]:
            job.prompt = work[0].prompt + job.prompt[:2]
    drafts = draw(st.integers(0, 8))
    block_size = draw(st.sampled_from([1, 4, 16]))
    longest = max(len(job.prompt) + (job.params.max_tokens or 0) for job in work)
    tight = -(-longest // block_size)
    seqs = draw(st.integers(1, 5))
    options = {
        "max_draft_tokens": drafts,
        "block_size": block_size,
        "kv_blocks": tight + draw(st.integers(0, 2 * tight)),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, draw(st.sampled_from([1, 5, 16, 64]))),
        "enable_prefix_caching": draw(st.booleans()),
        "draft_policy": draw(st.sampled_from(["auto", "fixed", "fixed"])),
        "proposers": ("ngram", "oracle", "saboteur") if drafts else (),
        "calibration_seconds": 0.0,
    }
    if drafts == 0:
        for job in work:
            job.speculation = SpeculationParams("off")
    else:
        for job in work:
            limit = job.speculation.max_draft_tokens
            if limit is not None and limit > drafts:
                job.speculation = SpeculationParams(job.speculation.method, drafts)
    return work, options


def check_scenario(
    backend: str,
    scenario: tuple[list[Job], dict[str, Any]],
    clock: int | None,
    ahead: bool = False,
    tried: Decoder | None = None,
) -> None:
    """``clock`` as of ``irregular_clock``. ``tried``: another decoder that has to give the same
    texts."""
    work, options = scenario
    # What is printed when this one fails.
    note("\n".join(map(str, [*work, options, clock])))
    decoder = tiny_decoder(backend)
    expected = [run_alone(decoder, job) for job in work]
    if options["proposers"]:
        texts = tuple((*request.prompt, *request.output) for request in expected)
        options = {**options, "proposer_options": {"oracle": {"texts": texts}}}
    engine = make_engine(tried or decoder, ahead, **options)
    if ahead and options["max_num_seqs"] % 2:
        engine.loop.depth += 1
    with irregular_clock(clock):
        actual = run_jobs(engine, work)
    for job, want, got in zip(work, expected, actual, strict=True):
        compare(backend, job, want, got)


def compare(backend: str, job: Job, want: Request, got: Request) -> None:
    cancelled = got.finish_reason is FinishReason.ABORT
    reference = want.output[: len(got.output)] if cancelled else want.output
    at = first_difference(reference, got.output)
    tally.tokens += len(got.output)
    if at is not None:
        assert at < min(len(reference), len(got.output)), (job, want.output, got.output)
        assert not tiny_decoder(backend).backend.row_invariant, (job, want.output, got.output)
        gap = score_gap(tiny_decoder(backend), want, at, got.output[at])
        assert gap < TIE, (job, want.output, got.output, gap)
        tally.ties.append(f"{backend}: gap {gap:.2e} at {at} of {job}")
    elif not cancelled:
        assert got.finish_reason == want.finish_reason
        assert got.stop_reason == want.stop_reason
    compared = len(got.output) if at is None else at
    check_logprobs(want, got, compared, job.params)
    stats = got.stats
    assert stats.accepted <= stats.verified <= stats.rounds * 8
    assert len(got.proposed_by) == len(got.output)
    assert sum(name is not None for name in got.proposed_by) == stats.accepted


def check_logprobs(want: Request, got: Request, compared: int, params: SamplingParams) -> None:
    pairs = []
    if params.logprobs is not None:
        assert len(got.logprobs) == len(got.output)
        pairs += list(zip(want.logprobs, got.logprobs, strict=False))[:compared]
    if params.prompt_logprobs is not None and got.output:
        assert len(got.prompt_logprobs) == len(got.prompt) - 1
        pairs += list(zip(want.prompt_logprobs, got.prompt_logprobs, strict=True))
    for left, right in pairs:
        assert left.token_id == right.token_id
        assert math.isclose(left.logprob, right.logprob, abs_tol=TIE)
        for (_, a), (_, b) in zip(left.top, right.top, strict=True):
            assert math.isclose(a, b, abs_tol=TIE)


fixed = settings(
    max_examples=200,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
fresh = settings(
    fixed,
    max_examples=100,
    derandomize=False,
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
    print_blob=True,
)
# Shrinking takes up to five minutes.
patient = pytest.mark.timeout(900)
BOTH = pytest.mark.parametrize("seeds", [fixed, fresh], ids=["fixed", "fresh"])


def check_scenarios(seeds: settings, check: Callable[[Any, int | None], None]) -> None:
    """Of scenarios drawn as ``seeds`` says."""
    seeds(given(scenarios(), clocks)(lambda scenario, clock: check(scenario, clock)))()
    assert tally.tokens > 5 * seeds.max_examples


def half(seeds: settings) -> settings:
    """For what takes three times as long as compiled kernels do."""
    return settings(seeds, max_examples=seeds.max_examples // 2)


@patient
@BOTH
def test_any_scenario_gives_the_plain_text_torch(seeds: settings) -> None:
    check_scenarios(half(seeds), lambda *drawn: check_scenario("torch", *drawn))


@needs_native
@patient
@BOTH
def test_any_scenario_gives_the_plain_text_native(seeds: settings) -> None:
    check_scenarios(seeds, lambda *drawn: check_scenario("native", *drawn))


@patient
@BOTH
def test_any_scenario_gives_the_plain_text_launched_ahead(seeds: settings) -> None:
    """Rounds are launched before one or two of those before are read, as on a GPU."""
    check_scenarios(half(seeds), lambda *drawn: check_scenario("torch", *drawn, ahead=True))


def test_too_many_ties_would_be_noticed() -> None:
    Tally(30_000, ["one", "two", "three"]).check()
    with pytest.raises(AssertionError, match="four"):
        Tally(30_000, ["one", "two", "three", "four"]).check()


def test_a_wrong_token_would_be_noticed() -> None:
    """The comparison itself can fail: a token changed by hand is no tie."""
    decoder = tiny_decoder()
    job = Job((3, 4, 5), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    want = run_alone(decoder, job)
    other = (want.output[4] + 1) % VOCAB
    got = Request("x", want.prompt, want.params, want.speculation, 0, 99, output=[*want.output])
    got.output[4] = other
    with pytest.raises(AssertionError):
        compare("torch", job, want, got)
    torch.manual_seed(0)
