"""The benchmark's library: prompt files and the arithmetic of reports, on made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.bench.measure import Measured, Pair, Run, Settings
from surefoot.bench.prompts import BenchPrompt, builtin_prompts, load_prompts, select
from surefoot.bench.report import first_difference, summaries, summarise, to_json
from surefoot.bench.table import build_table
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
        drafted=2 * accepted,
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


def fake_batch(category: str, plain: list[float], speculative: list[float]) -> Measured:
    tokens = list(range(10))
    pairs = tuple(
        Pair(fake_run(tokens, a), fake_run(tokens, b, accepted=6, rounds=4))
        for a, b in zip(plain, speculative, strict=True)
    )
    return Measured(category, (BenchPrompt(category, category, text="t"),), pairs)


def test_ratios_are_of_medians_and_spread_of_pairs() -> None:
    # Medians: 2 s plain, 1 s speculative; pairs: 2.0, 1.0 and 4.0 times.
    line = summarise([fake_batch("a", [2.0, 1.0, 4.0], [1.0, 1.0, 1.0])], "a")
    assert line.plain_speed == 5 and line.speculative_speed == 10
    assert (line.ratio, line.ratio_low, line.ratio_high) == (2, 1, 4)
    assert line.decode_plain_speed == 9 and line.decode_ratio == 2
    assert line.accepted_length == (4 + 6) / 4
    assert (line.offered, line.drafted, line.accepted) == (54, 36, 18)
    assert line.accepted_by_proposer == {"some": 18} and line.identical


def test_overall_weighs_by_time() -> None:
    results = [fake_batch("a", [2.0], [1.0]), fake_batch("b", [8.0], [8.0])]
    first, second, overall = summaries(results)
    assert (first.category, second.category, overall.category) == ("a", "b", "overall")
    assert overall.ratio == pytest.approx(10 / 9)
    assert (overall.prompts, overall.tokens) == (2, 20)
    assert (overall.ratio_low, overall.ratio_high) == (1, 2)


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
    assert line.decode_ratio is None and line.ratio == 1


def test_report_is_json_and_the_table_says_no() -> None:
    from rich.console import Console

    results = [fake_batch("a", [2.0], [1.0])]
    assert json.loads(json.dumps(to_json(results)))["overall"]["ratio"] == 2
    console = Console(width=80)
    with console.capture() as captured:
        console.print(build_table(summaries(results)))
    assert "2.00×" in captured.get() and "yes" in captured.get()
