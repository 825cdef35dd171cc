"""``surefoot bench --traffic``: workloads, the arithmetic of latencies, the closed loop, synthetic
acceptance in every kind of round, and the command."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness import tiny_decoder
from surefoot.bench import synthetic
from surefoot.bench.latency import Latency, Timeline, summarise
from surefoot.bench.sweep import drafting, random_prompts
from surefoot.bench.traffic import IDLE, RoundClock, Run, TrafficSettings, run_calls
from surefoot.bench.traffic_report import mode_json, ratio_to_plain, shares
from surefoot.bench.workload import Call, Shape, arrivals, draw_calls
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from tiny_models import tiny_hf_model
from tree_proposers import Bush

OFF = SpeculationParams("off")


# --- workloads --------------------------------------------------------------------------------


def prompt_length(call: Call) -> int:
    assert isinstance(call.prompt, list)
    return len(call.prompt)


def test_lengths_are_lognormal_between_their_bounds() -> None:
    calls = draw_calls(Shape(requests=6000), 50)
    logs = [math.log(prompt_length(call)) for call in calls]
    inside = sorted(logs)[len(logs) // 2]
    assert min(logs) == math.log(32) and max(logs) == math.log(2048)
    assert inside == pytest.approx(5.9, abs=0.05)
    # A standard deviation below the median and above it.
    below, above = (sorted(logs)[int(len(logs) * share)] for share in (0.1587, 0.8413))
    assert (above - below) / 2 == pytest.approx(0.8, abs=0.04)
    outputs = [call.output_tokens for call in calls]
    assert (min(outputs), max(outputs)) == (64, 448)
    assert fmean(outputs) == pytest.approx(256, abs=6)


def test_other_bounds_have_the_same_shape() -> None:
    lengths = sorted(map(prompt_length, draw_calls(Shape(4000, (10, 1000), (7, 7)), 50)))
    assert lengths[0] == 10 and lengths[-1] == 1000
    place = math.log(lengths[2000] / 10) / math.log(100)
    assert place == pytest.approx((5.9 - math.log(32)) / math.log(64), abs=0.02)
    fixed = draw_calls(Shape(5, (9, 9), (7, 7)), 50)
    assert {(prompt_length(call), call.output_tokens) for call in fixed} == {(9, 7)}


def test_a_seed_draws_the_same_requests_and_a_variant_other_tokens_only() -> None:
    shape = Shape(40, seed=3, rate=2.0)
    calls = draw_calls(shape, 50)
    assert draw_calls(shape, 50) == calls
    assert [call.seed for call in calls] == list(range(3, 43))
    assert all(0 <= token < 50 for call in calls for token in cast(Any, call.prompt))

    def frame(calls: list[Call]) -> list[Any]:
        return [(prompt_length(c), c.output_tokens, c.seed, c.due) for c in calls]

    other = draw_calls(shape, 50, variant=1)
    assert frame(other) == frame(calls) and other != calls
    assert frame(draw_calls(Shape(40, seed=4, rate=2.0), 50)) != frame(calls)
    given = draw_calls(Shape(5), prompts=[[1], [2, 3]])
    assert [call.prompt for call in given] == [[1], [2, 3], [1], [2, 3], [1]]


def test_arrivals_are_a_poisson_process() -> None:
    assert arrivals(Shape(3)) == [0, 0, 0]
    times = arrivals(Shape(4000, rate=8.0))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert times[-1] == pytest.approx(4000 / 8) and min(gaps) > 0
    # As wide as long on average, and a gap says nothing of the next.
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.05)
    products = [(a - fmean(gaps)) * (b - fmean(gaps)) for a, b in itertools.pairwise(gaps)]
    assert abs(fmean(products)) < 0.05 * fmean(gaps) ** 2
    assert sum(gap > 2 / 8 for gap in gaps) / 4000 == pytest.approx(math.exp(-2), abs=0.02)


# --- latencies --------------------------------------------------------------------------------


def test_latencies_are_those_of_vllm_bench_serve() -> None:
    lines = [
        # Three chunks of five tokens: speculation.
        Timeline(sent=1.0, chunks=[1.5, 1.6, 1.9], tokens=5, prompt_tokens=10),
        Timeline(sent=2.0, chunks=[4.0], tokens=1, prompt_tokens=3),
        Timeline(sent=0.0, chunks=[0.1, 0.3], tokens=2, prompt_tokens=1),
        Timeline(sent=0.0, chunks=[9.0, 9.5], tokens=7, prompt_tokens=1, error="lost"),
    ]
    found = summarise(lines)
    assert (found.completed, found.failed) == (3, 1)
    assert (found.prompt_tokens, found.output_tokens) == (14, 8)
    assert found.seconds == 4.0 and found.output_throughput == 2.0
    assert found.last_first_token == 4.0
    numbers = found.to_json()
    assert numbers["p50_ttft_ms"] == pytest.approx(500)
    assert numbers["mean_ttft_ms"] == pytest.approx(1000 * (0.5 + 2 + 0.1) / 3)
    # Between neighbours: 80 % of the way from the second to the third, and 98 %.
    assert numbers["p90_ttft_ms"] == pytest.approx(500 + 0.8 * 1500)
    assert numbers["p99_ttft_ms"] == pytest.approx(500 + 0.98 * 1500)
    # All gaps together, whoever's: 0.1, 0.3, 0.2.
    assert numbers["p50_itl_ms"] == pytest.approx(200)
    assert numbers["max_itl_ms"] == pytest.approx(300)
    # A number for each request of two tokens or more: 0.4 / 4 and 0.2 / 1.
    assert numbers["mean_tpot_ms"] == pytest.approx(150)
    assert numbers["max_tpot_ms"] == pytest.approx(200)
    assert numbers["max_e2el_ms"] == pytest.approx(2000)
    assert numbers["request_throughput"] == pytest.approx(3 / 4)
    assert numbers["total_token_throughput"] == pytest.approx(22 / 4)


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    found = summarise([Timeline(error="no")])
    assert found.ttft is found.itl is found.tpot is None and found.output_throughput == 0
    assert Latency.of([]) is None
    report = mode_json({"default": [Run(found, errors=("no",))]}, "default")
    assert report["failed"] == 1 and report["runs"][0]["errors"] == ["no"]


# --- the loop, on an engine and a clock that are made up ------------------------------------------


class FakeEngine:
    """Each step takes ``step_seconds`` and gives every running request a token; at most ``slots``
    run. Steps alternate between two kinds of rounds."""

    def __init__(self, slots: int, step_seconds: float = 1.0) -> None:
        self.slots, self.step_seconds = slots, step_seconds
        self.now, self.slept = 100.0, []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.most = 0
        self.stats = SimpleNamespace(preemptions=0, rounds_by_kind={"even": 0, "odd": 0})

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert not self.waiting and not self.running
        self.slept.append(seconds)
        self.now += seconds

    def make_request(
        self, name: str, prompt: Any, params: SamplingParams, wish: SpeculationParams
    ) -> Request:
        assert params.ignore_eos and params.seed is not None
        return Request(name, tuple(prompt), params, wish, params.seed, 10_000)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def step(self) -> list[Any]:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        self.now += self.step_seconds
        kinds = dict(self.stats.rounds_by_kind)
        kinds["odd" if sum(kinds.values()) % 2 else "even"] += 1
        self.stats.rounds_by_kind = kinds
        progress = []
        for request in list(self.running):
            request.output.append(7)
            request.stats.rounds += 1
            progress.append(SimpleNamespace(request=request, tokens=[7]))
            if len(request.output) == request.params.max_tokens:
                request.finish(FinishReason.LENGTH)
                self.running.remove(request)
        return progress

    def run(self, calls: list[Call], at_once: int | None) -> Run:
        settings = TrafficSettings((0,), at_once)
        return run_calls(cast(Any, self), calls, settings, OFF, self.clock, self.sleep)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    at_once=st.integers(1, 6),
    slots=st.integers(1, 6),
)
def test_a_closed_loop_keeps_its_number_of_requests_under_way(
    lengths: list[int], at_once: int, slots: int
) -> None:
    engine = FakeEngine(slots)
    run = engine.run([Call([1, 2], n, i) for i, n in enumerate(lengths)], at_once)
    assert engine.most == min(at_once, len(lengths))
    assert run.traffic.completed == len(lengths) and not engine.slept
    assert run.traffic.output_tokens == sum(lengths)
    assert run.drafted is not None and run.drafted.accepted_length == 1
    assert sum(kind.rounds for kind in run.rounds.values()) == engine.now - 100


def test_the_time_to_the_first_token_counts_from_sending() -> None:
    # Two places, one of which the engine cannot serve yet: its wait counts, the client's does not.
    engine = FakeEngine(slots=1)
    traffic = engine.run([Call([1], 3, i) for i in range(3)], at_once=2).traffic
    assert traffic.seconds == 9 and traffic.ttft is not None
    # Sent at 0, 0 and 3; first tokens at 1, 4, 7.
    assert traffic.ttft.mean == pytest.approx(3000) and traffic.ttft.most == pytest.approx(4000)
    assert traffic.itl is not None and traffic.itl.most == 1000


def test_requests_arrive_when_they_are_due() -> None:
    engine = FakeEngine(slots=9)
    run = engine.run(
        [Call([1], 2, 0, due=0.5), Call([1], 2, 1, due=1.25), Call([1], 1, 2, 5)], None
    )
    # The first one waits for nobody; the second for the step that was under way until 1.5; the
    # third finds nobody there.
    assert engine.slept == [0.5, 5 - 3.5]
    assert run.traffic.ttft is not None and run.traffic.ttft.most == pytest.approx(1250)
    assert run.traffic.seconds == 6
    # With a bound, what counts is when there was a place.
    engine = FakeEngine(slots=9)
    bounded = engine.run([Call([1], 2, 0, due=0.5), Call([1], 2, 1, due=1.25)], 1)
    assert engine.most == 1 and bounded.traffic.ttft is not None
    assert bounded.traffic.ttft.most == pytest.approx(1000)


def test_rounds_are_told_apart_by_kind_with_their_time() -> None:
    engine = FakeEngine(slots=1)
    clock = RoundClock(cast(Any, engine), engine.clock)
    engine.add(
        engine.make_request("a", [1], SamplingParams(max_tokens=9, seed=0, ignore_eos=True), OFF)
    )
    for seconds in (1.0, 2.0, 4.0):
        engine.step_seconds = seconds
        clock.step()
    engine.step = lambda: setattr(engine, "now", engine.now + 0.5) or []  # type: ignore[method-assign]
    clock.step()
    found = {kind: (entry.rounds, entry.seconds) for kind, entry in clock.kinds.items()}
    assert found == {"even": (2, 5.0), "odd": (1, 2.0), IDLE: (0, 0.5)}
    assert shares(clock.kinds)["odd"]["share"] == pytest.approx(1 / 3)
    assert shares(clock.kinds)["even"]["time_share"] == pytest.approx(5 / 7.5)

    def two_at_once() -> list[Any]:
        engine.now += 3.0
        engine.stats.rounds_by_kind = {"even": 3, "odd": 2, "other": 1}
        return []

    engine.step = two_at_once  # type: ignore[method-assign]
    clock.step()
    found = {kind: (entry.rounds, entry.seconds) for kind, entry in clock.kinds.items()}
    assert found == {"even": (3, 6.0), "odd": (2, 3.0), "other": (1, 1.0), IDLE: (0, 0.5)}


def test_ratios_are_taken_pass_by_pass() -> None:
    def runs(*seconds: float) -> list[Run]:
        lines = [Timeline(chunks=[each], tokens=12) for each in seconds]
        return [Run(summarise([line])) for line in lines]

    results: Any = {0: runs(1, 2, 3), "auto": runs(2, 2, 4)}
    ratio = ratio_to_plain(results, "auto")
    assert ratio is not None and (ratio.low, ratio.median, ratio.high) == (0.5, 0.75, 1)
    assert ratio_to_plain(results, 0) is None
    report = mode_json(results, "auto")
    assert report["output_throughput"] == 6 and report["low_high"]["output_throughput"] == [3, 6]


# --- synthetic acceptance in every kind of round --------------------------------------------------

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
        before = engine.stats.rounds_by_kind
        progress = step()
        now = engine.stats.rounds_by_kind
        [kind] = [kind for kind in now if now[kind] != before[kind]] or [IDLE]
        for item in progress:
            texts[item.request.request_id] = item.request.output
            for place in range(item.drafting.drafted):
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


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("models"))


QUICK = ["--backend", "torch", "--dtype", "float32", "--threads", "1"]
SMALL = ["--requests", "8", "--at-once", "3", "--max-tokens", "4-24", "--repeats", "2"]


def bench(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(item) for item in arguments)])


def report(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_traffic_on_random_weights(model: Path) -> None:
    line = [
        "--dummy-weights",
        model,
        "--synthetic-acceptance",
        "0.9,0.6",
        "--modes",
        "plain,2,auto",
    ]
    result = bench("--traffic", *line, *SMALL, "--prompt-tokens", "5-60", *QUICK)
    found = report(result)
    modes = {entry["mode"]: entry for entry in found["modes"]}
    assert list(modes) == ["plain", "2", "auto"]
    for mode, entry in modes.items():
        assert len(entry["runs"]) == 2 and entry["completed"] == 8 and entry["failed"] == 0
        assert entry["p50_itl_ms"] <= entry["p90_itl_ms"] <= entry["p99_itl_ms"]
        low, high = entry["low_high"]["output_throughput"]
        assert 0 < low <= entry["output_throughput"] <= high
        assert sum(kind["share"] for kind in entry["rounds"].values()) == pytest.approx(1)
        ratio = entry["of_plain"]
        assert ratio is None if mode == "plain" else ratio["count"] == 2
        assert entry["total_output_tokens"] == modes["plain"]["total_output_tokens"]
    assert modes["plain"]["accepted_length"] == 1 < modes["2"]["accepted_length"]
    assert found["settings"]["at_once"] == 3 and found["settings"]["prompt_tokens"] == [5, 60]
    assert found["engine"]["max_num_seqs"] == 3 and found["engine"]["max_model_len"] == 84
    assert "8 requests, at most 3 at once" in result.stdout


def test_traffic_on_a_model_with_prompts_that_arrive(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat sat on the mat"}\n{"turns": ["the dog"]}\n')
    line = ["-m", model, "--prompts", prompts, "--requests", "6", "--rate", "50", "--no-json"]
    result = bench("--traffic", *line, "--max-tokens", "8", "--repeats", "1", *QUICK)
    assert result.exit_code == 0, result.output
    assert "6 requests, 50 arriving a second; prompts of" in result.stdout
    assert "outputs of 48; 1 pass of" in result.stdout and not result.stdout.endswith("}\n")


REFUSED = [
    ("--requests 4", "--requests"),
    ("--at-once 4", "--at-once"),
    ("--rate 4", "--rate"),
    ("--url http://x", "--url"),
    ("--vocab-size 9", "--vocab-size"),
    ("--concurrency 2 --rate 4", "--rate"),
    ("--traffic --concurrency 2", "--concurrency"),
    ("--traffic --batch-size 2", "--batch-size"),
    ("--traffic --show-drafts", "--show-drafts"),
    ("--traffic --prefix-caching", "--prefix-caching"),
    ("--traffic --parts", "--parts"),
    ("--traffic --plot x.png", "--plot"),
    ("--traffic --speculation off", "--speculation"),
    ("--traffic --draft-policy fixed", "--draft-policy"),
    ("--traffic --categories a", "--categories"),
    ("--traffic --requests 0", "--requests"),
    ("--traffic --at-once 0", "--at-once"),
    ("--traffic --rate 0", "--rate"),
    ("--traffic --rate nan", "--rate"),
    ("--traffic --repeats 0", "--repeats"),
    ("--traffic --prompt-tokens 9-3", "--prompt-tokens"),
    ("--traffic --prompt-tokens 3-9-12", "--prompt-tokens"),
    ("--traffic --max-tokens 0-4", "--max-tokens"),
    ("--traffic --max-tokens many", "--max-tokens"),
    ("--max-tokens 4-8", "--max-tokens"),
    ("--concurrency 1 --prompt-tokens 4-8", "--prompt-tokens"),
    ("--traffic --modes often", "--modes"),
    ("--traffic --vocab-size 9", "--vocab-size"),
    ("--traffic --dummy-weights x --model y", "--dummy-weights"),
    ("--traffic --synthetic-acceptance 0.5 --proposer ngram", "--proposer"),
    ("--traffic --url http://x --dummy-weights x", "--dummy-weights"),
    ("--traffic --url http://x --synthetic-acceptance 0.5", "--synthetic-acceptance"),
    ("--traffic --url http://x --device cuda", "--device"),
    ("--traffic --url http://x --modes 3", "--modes"),
    ("--traffic --url http://x --vocab-size 0", "--vocab-size"),
    ("--traffic --url ftp://x", "--url"),
    ("--traffic --url http://x:port", "--url"),
    ("--traffic --url http://127.0.0.1:9", "--url"),
]


@pytest.mark.parametrize(("line", "option"), REFUSED)
def test_options_that_do_not_apply_are_refused_by_name(line: str, option: str) -> None:
    result = bench(*line.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option}: ") and result.stderr.count("\n") == 1


def test_prompts_go_with_a_tokenizer_only(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    for option in ("--dummy-weights", "--prompt-tokens", "--vocab-size"):
        result = bench("--traffic", "--url", "http://127.0.0.1:9", "--prompts", prompts, option, 5)
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {option}: ")
