"""The benchmark's library: prompt files, and reports on made-up runs and processor loads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

from surefoot.bench import machine_load, measure
from surefoot.bench.machine_load import LoadWatch, MachineLoad
from surefoot.bench.measure import Measured, Pair, Run, Settings
from surefoot.bench.prompts import BenchPrompt, builtin_prompts, load_prompts, select
from surefoot.bench.report import first_difference, summaries, summarise, to_json
from surefoot.bench.spread import about_range, spread
from surefoot.bench.table import build_table, speed_sentence
from surefoot.engine.output import CompletionOutput
from surefoot.errors import SurefootError
from surefoot.request import SamplingParams, SpeculationStats


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_prompt_formats(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "once upon\u2028a time"}',
        "",
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"]}',
        '{"id": "x", "messages": [{"role": "system", "content": "s"}, {"role": "user"}]}',
    )
    plain, turns, messages = load_prompts(path)
    assert (plain.name, plain.category, plain.text) == ("1", "all", "once upon\u2028a time")
    assert (turns.name, turns.category) == ("81", "writing")
    assert turns.messages == ({"role": "user", "content": "first"},)
    assert messages.name == "x" and len(messages.messages) == 2
    assert turns.last_words == "first" and plain.last_words == plain.text


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": 3}',
        '{"prompt": ""}',
        '{"prompt": "a", "turns": ["b"]}',
        '{"turns": []}',
        '{"turns": [3]}',
        '{"messages": "a"}',
        '{"messages": [{"content": "a"}]}',
    ],
)
def test_bad_prompts_are_refused_by_line(line: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "good"}', line)
    with pytest.raises(SurefootError, match="line 2") as caught:
        load_prompts(path)
    assert caught.value.option == "prompts"


def test_empty_and_missing_files(tmp_path: Path) -> None:
    for path in (write(tmp_path, "", ""), tmp_path / "missing"):
        with pytest.raises(SurefootError):
            load_prompts(path)


def test_selection() -> None:
    prompts = [BenchPrompt(str(i), "ab"[i % 2], text="t") for i in range(6)]
    assert [item.name for item in select(prompts)] == ["0", "2", "4", "1", "3", "5"]
    assert [item.name for item in select(prompts, ["b"], 2)] == ["1", "3"]
    with pytest.raises(SurefootError, match="known: a, b"):
        select(prompts, ["c"])


def test_builtin_prompts_are_three_kinds() -> None:
    assert len({prompt.category for prompt in builtin_prompts()}) == 3


def test_settings_are_checked() -> None:
    with pytest.raises(SurefootError, match="repeats"):
        Settings(SamplingParams(), repeats=0)


def fake_run(tokens: list[int], seconds: float, accepted: int = 0, rounds: int = 1) -> Run:
    stats = SpeculationStats(
        rounds=rounds,
        offered=3 * accepted,
        verified=2 * accepted,
        accepted=accepted,
        accepted_by_proposer={"some": accepted} if accepted else {},
    )
    text = " ".join(map(str, tokens))
    output = CompletionOutput(0, text, tokens, "length", speculation=stats)
    return Run(
        seconds=seconds,
        decode_seconds=seconds / 2,
        decode_tokens=len(tokens) - 1,
        outputs=(output,),
        pieces=(((text, None),),),
    )


def fake_batch(
    category: str, plain: list[float], speculative: list[float], accepted: int = 6
) -> Measured:
    tokens = list(range(10))
    pairs = tuple(
        Pair(fake_run(tokens, a), fake_run(tokens, b, accepted=accepted, rounds=4))
        for a, b in zip(plain, speculative, strict=True)
    )
    return Measured(category, (BenchPrompt(category, category, text="t"),), pairs)


@pytest.mark.parametrize(
    ("count", "rank", "confidence"),
    # From tables of the sign test: two-sided chances of fewer than `rank` heads.
    [
        (1, 1, 0.0),
        (2, 1, 0.5),
        (3, 1, 0.75),
        (5, 1, 0.9375),
        (6, 1, 0.96875),
        (8, 1, 0.9922),
        (9, 2, 0.9609),
        (12, 3, 0.9614),
        (20, 6, 0.9586),
    ],
)
def test_intervals_of_medians_are_those_of_the_sign_test(
    count: int, rank: int, confidence: float
) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(count).shuffle(values)
    found = spread(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.median == (count + 1) / 2 and found.count == count
    assert found.confidence == pytest.approx(confidence, abs=1e-4)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    # Slow spells: most ratios lie near the true median 1.1, some are far off to one side.
    chooser = random.Random(3)
    found = [
        spread([1.1 * 2 ** (chooser.choice([-1, 1]) * chooser.expovariate(2)) for _ in range(9)])
        for _ in range(2000)
    ]
    share = sum(item.low <= 1.1 <= item.high for item in found) / len(found)
    assert share == pytest.approx(found[0].confidence, abs=0.015)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.43], "one run"),
        ([0.99, 1.2, 1.3], "no difference"),
        ([1.1, 1.2, 1.3], "faster in all 3"),
        ([0.7, 0.9], "slower in all 2"),
        ([1.1, 1.2, 1.3, 1.2, 1.2, 1.2], "faster"),
        ([0.9, 0.8, 0.9, 0.9, 0.7, 0.6], "slower"),
        ([0.9, 1.8, 1.9, 1.9, 1.7, 1.6], "no difference"),
        # One bad pair in nine does not hide what the others show.
        ([0.3, 1.8, 1.9, 1.9, 1.7, 1.6, 1.8, 1.8, 1.8], "faster"),
        # What is printed is 1.00.
        ([1.004, 1.1, 1.1, 1.1, 1.1, 1.1], "no difference"),
        ([0.996, 0.9, 0.9, 0.9, 0.9, 0.9], "no difference"),
    ],
)
def test_a_ratio_inside_its_spread_is_no_difference(ratios: list[float], verdict: str) -> None:
    assert spread(ratios).verdict == verdict
    line = summarise([fake_batch("a", ratios, [1.0] * len(ratios))])
    assert line.verdict == verdict
    assert speed_sentence(line).startswith("no difference in speed (") == (
        verdict == "no difference"
    )


def test_without_verified_drafts_no_ratio_is_a_gain() -> None:
    line = summarise([fake_batch("a", [1.43] * 6, [1.0] * 6, accepted=0)])
    assert line.verified == 0 and line.verdict == "no drafts verified"
    assert speed_sentence(line).startswith("no drafts verified; 1.43 times (95% interval")
    assert speed_sentence(line).endswith("is noise or the cost of looking for drafts")


def test_sentences_tell_how_sure_a_ratio_is() -> None:
    def sentence(count: int) -> str:
        return speed_sentence(summarise([fake_batch("a", [3.0, 2.0] * count, [1.0] * 2 * count)]))

    assert sentence(3) == "2.50 times as fast (95% interval 2.00–3.00)"
    assert "2.00–3.00 in 2 pairs of runs; 95% confidence takes 6" in sentence(1)
    single = speed_sentence(summarise([fake_batch("a", [2.0], [1.0])]))
    assert single == "2.00 times as fast (one pair of runs; the noise shows with 6 or more)"


def test_tables_of_few_turns_say_what_noise_alone_would_do() -> None:
    assert "highest of 3 turns" in about_range(3) and "25% of cases" in about_range(3)
    assert "none" in about_range(1) and "95% interval" in about_range(6)


def test_ratios_are_of_pairs() -> None:
    # Pairs: 2.0, 1.0 and 4.0 times.
    line = summarise([fake_batch("a", [2.0, 1.0, 4.0], [1.0, 1.0, 1.0])], "a")
    assert line.plain_speed == 5 and line.speculative_speed == 10
    assert (line.ratio.median, line.ratio.low, line.ratio.high) == (2, 1, 4)
    assert line.decode_plain_speed == 9 and line.decode_ratio == line.ratio
    assert line.accepted_length == (4 + 6) / 4
    assert (line.offered, line.verified, line.accepted) == (54, 36, 18)
    assert line.accepted_by_proposer == {"some": 18} and line.identical


def test_overall_weighs_by_time_pass_by_pass() -> None:
    results = [fake_batch("a", [2.0, 4.0], [1.0, 1.0]), fake_batch("b", [8.0, 8.0], [8.0, 5.0])]
    first, second, overall = summaries(results)
    assert (first.category, second.category, overall.category) == ("a", "b", "overall")
    # 10 seconds against 9, 12 against 6.
    assert (overall.ratio.low, overall.ratio.high) == pytest.approx((10 / 9, 2))
    assert (overall.prompts, overall.tokens, overall.ratio.count) == (2, 20, 2)


def test_passes_are_as_many_as_fit_unless_said() -> None:
    unsaid, said = Settings(SamplingParams()), Settings(SamplingParams(), repeats=2)
    for done, seconds, expected in (
        (0, 0.0, 3),
        (1, 3.0, 8),
        (4, 14.0, 6),
        (1, 100.0, 3),
        (5, 100.0, 5),
        (1, 0.01, 30),
    ):
        assert unsaid.passes(done, seconds) == expected
        assert said.passes(done, seconds) == 2


def test_passes_go_through_all_batches_and_turn_around(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str]] = []

    def fake(_: Any, prompts: Any, params: Any, method: str) -> Run:
        [name] = prompts
        order.append((name, method))
        return fake_run([1], 1.0)

    class Stub:
        class config:
            max_num_seqs = 1

    monkeypatch.setattr(measure, "run_batch", fake)
    monkeypatch.setattr(measure, "_tokenize", lambda llm, prompt: prompt.name)
    monkeypatch.setattr(measure, "_check", lambda *_: None)
    prompts = [BenchPrompt(name, name, text="t") for name in "ab"]
    settings = Settings(SamplingParams(), repeats=2, warmup=0)
    first: list[int] = []
    steps: list[tuple[int, int]] = []
    results = measure.measure(
        cast(Any, Stub()),
        prompts,
        settings,
        lambda measured: first.append(len(measured.pairs)),
        lambda done, total: steps.append((done, total)),
    )
    a, b, off, auto = "a", "b", "off", "auto"
    assert order == [
        *[(a, off), (a, auto), (b, auto), (b, off)],
        *[(a, auto), (a, off), (b, off), (b, auto)],
    ]
    assert [len(item.pairs) for item in results] == [2, 2] and first == [1, 1]
    assert steps == [(2, 8), (4, 8), (6, 8), (8, 8)]


def test_differences_are_found_and_located() -> None:
    same, other = fake_run([1, 2, 3], 1.0), fake_run([1, 5, 3], 1.0)
    prompt = BenchPrompt("p", "a", text="t")
    batch = Measured("a", (prompt,), (Pair(same, same), Pair(same, other), Pair(other, same)))
    found = summarise([batch]).differences
    assert [(item.prompt, item.way, item.repeat, item.position) for item in found] == [
        ("p", "speculative", 1, 1),
        ("p", "plain", 2, 1),
    ]
    assert not to_json([batch])["overall"]["identical"]


def test_a_shorter_text_and_another_ending_differ() -> None:
    whole = CompletionOutput(0, "ab", [1, 2], "length")
    assert first_difference(whole, CompletionOutput(0, "ab", [1, 2], "length")) is None
    assert first_difference(whole, CompletionOutput(0, "a", [1], "stop")) == 1
    assert first_difference(whole, CompletionOutput(0, "ab", [1, 2], "stop")) == 2


def test_texts_of_one_token_have_no_decode_speed() -> None:
    run = fake_run([1], 1.0)
    line = summarise([Measured("a", (BenchPrompt("p", "a", text="t"),), (Pair(run, run),))])
    assert line.decode_ratio is None and line.ratio.median == 1


def test_report_is_json_and_the_table_says_no() -> None:
    from rich.console import Console

    results = [
        fake_batch("quick", [2.0] * 6, [1.0] * 6),
        fake_batch("even", [1.1, 0.9] * 3, [1.0] * 6),
        fake_batch("undrafted", [1.0] * 6, [0.9] * 6, accepted=0),
    ]
    found = json.loads(json.dumps(to_json(results)))
    assert [item["verdict"] for item in found["categories"]] == [
        "faster",
        "no difference",
        "no drafts verified",
    ]
    assert found["categories"][0]["ratio"] == {
        "median": 2,
        "low": 2,
        "high": 2,
        "confidence": 0.96875,
        "count": 6,
    }
    console = Console(width=80)
    with console.capture() as captured:
        console.print(build_table(summaries(results)))
    text = captured.get()
    for words in ("2.00×", "2.00–2.00", "(95%)", "faster", "difference", "verified", "yes"):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def stat(*fields: str) -> str:
    return "".join(f"{line}\n" for line in ("cpu 9 9 9 9 9 9 9 9 0 0", *fields, "intr 5"))


def test_other_processes_and_steal_are_counted_on_the_cores_that_are_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "stat"
    # Fields: user nice system idle iowait irq softirq steal guest guest_nice, in ticks.
    now = {"wall": 5.0, "own": 1.0}
    monkeypatch.setattr(machine_load, "PROC_STAT", path)
    monkeypatch.setattr(machine_load, "_core_ids", lambda: [0, 2])
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(machine_load.time, "process_time", lambda: now["own"])
    monkeypatch.setattr(machine_load.os, "getloadavg", lambda: (1.5, 0, 0))
    path.write_text(
        stat("cpu0 100 0 0 50 0 0 0 10 0 0", "cpu1 0 0 0 0 0 0 0 0 0 0", "cpu2 0 0 0 0 0 0 0 0 0 0")
    )
    watch = LoadWatch()
    now |= {"wall": 15.0, "own": 9.0}
    path.write_text(
        stat(
            "cpu0 600 100 100 950 7 50 50 110 3 3",
            "cpu1 999 0 0 0 0 0 0 0 0 0",
            "cpu2 400 0 0 400 0 0 0 0 0 0",
        )
    )
    found = watch.stop()
    # 8 + 4 seconds of work of 2 x 10, 8 of them our own; one stolen.
    assert (found.seconds, found.cores, found.load_average) == (10, 2, 1.5)
    assert (found.others, found.steal) == pytest.approx((0.2, 0.05))
    assert found.to_json()["busy"]
    for words in ("20%", "2 cores", "steal 5.0%", "load average 1.5"):
        assert words in found.note()
    path.unlink()
    unknown = LoadWatch().stop()
    assert (unknown.others, unknown.steal, unknown.busy) == (None, None, False)


@pytest.mark.parametrize(
    ("others", "steal", "average", "busy"),
    [
        (0.02, 0.0, 8.0, False),
        (0.2, 0.0, 0.1, True),
        (0.02, 0.05, 0.1, True),
        (None, None, 2.5, True),
        (None, None, 1.9, False),
        (None, None, None, False),
    ],
)
def test_what_counts_as_busy(
    others: float | None, steal: float | None, average: float | None, busy: bool
) -> None:
    load = MachineLoad(1.0, 2, others, steal, average)
    assert load.busy == busy == bool(load.note())
    assert ("load average" in load.note()) == (busy and average is not None)
