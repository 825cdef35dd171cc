"""Throughput sweeps: ``surefoot bench --concurrency`` on tiny engines, and the arithmetic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness import make_engine, tiny_decoder
from surefoot.bench.bandwidth import kv_bytes_per_token, round_bytes, weight_bytes
from surefoot.bench.parts import attribute, group_of
from surefoot.bench.sweep import (
    Load,
    Pass,
    Point,
    SweepSettings,
    drafting,
    random_prompts,
    run_pass,
    submit,
    summarise,
    sweep,
)
from surefoot.bench.sweep_report import ratios_to_plain, verdict
from surefoot.cli.main import app
from surefoot.engine import recording
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.models.decoder import expected_shapes
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.fixed import FixedPlanner
from tiny_models import tiny_hf_model

QUICK = ["--backend", "torch", "--dtype", "float32", "--threads", "1"]
SHORT = ["--prompt-tokens", "12", "--max-tokens", "40"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("models"))


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(item) for item in arguments)])


def report(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_synthetic_acceptance_on_random_weights(model: Path) -> None:
    line = ["--dummy-weights", model, "--synthetic-acceptance", "0.8,0.5,0", "--repeats", "2"]
    result = run("--concurrency", "3,1", *line, *QUICK, *SHORT, "--modes", "plain,2,auto")
    found = report(result)
    points = {(item["concurrency"], item["mode"]): item for item in found["points"]}
    assert list(points) == [(c, mode) for c in (1, 3) for mode in ("plain", "2", "auto")]
    for (concurrency, mode), point in points.items():
        assert len(point["passes"]) == 2 and point["tokens_per_s"] > 0
        assert point["accepted_length"] == 1 or mode != "plain"
        assert 0 < point["bandwidth_share"]["copy"] < 1
        parts = point["parts_ms"]
        assert min(parts.values()) >= 0 and set(parts) == {"layers", "head", "rest"}
        if mode == "2":
            assert point["drafts_per_round"] == pytest.approx(2 * concurrency, rel=0.2)
            # 1 + 0.8 + 0.5 in the long run.
            assert 1.6 < point["accepted_length"] < 2.9
    assert found["synthetic_acceptance"] == [0.8, 0.5, 0.0] and found["model"] is None
    assert found["engine"]["rounds"] == "called"
    assert found["engine"]["max_draft_tokens"] == 3 and found["hardware"]["cores"] >= 1
    assert found["machine_load"]["cores"] == found["hardware"]["cores"]
    assert all(
        (point["of_plain"] is None) == (mode == "plain")
        and bool(point["verdict"]) != (mode == "plain")
        for (_, mode), point in points.items()
    )
    assert "12 prompt + 40 output tokens; drafts accepted at rates 0.8, 0.5, 0; 2 passes" in (
        result.stdout
    )
    assert "lowest to the highest of 2 turns" in result.stdout
    assert "TB/s" in result.stdout and "quests" in result.stdout


def test_a_drafter_of_random_weights_drafts_what_is_then_accepted_at_given_rates(
    model: Path,
) -> None:
    line = ["--dummy-weights", model, "--synthetic-acceptance", "0.8,0.6", *SHORT]
    line += ["--proposer", "eagle3=dummy", "--concurrency", 2, *QUICK]
    found = report(run(*line, "--modes", "plain,1,2,auto"))
    points = {item["mode"]: item for item in found["points"]}
    assert found["engine"]["proposers"] == ["eagle3"]
    for drafts in (1, 2):
        assert points[str(drafts)]["drafts_per_round"] == pytest.approx(2 * drafts, rel=0.25)
    assert points["plain"]["accepted_length"] == 1
    # 1 + 0.8 + 0.6 in the long run.
    assert 1.6 < points["2"]["accepted_length"] < 2.95


def test_real_prompts_on_a_model(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "the cat sat on the mat", "category": "a"}\n'
        '{"turns": ["the dog"], "category": "b"}\n'
    )
    line = ["-m", model, "--prompts", prompts, "--max-tokens", "24", "--no-parts", *QUICK]
    found = report(run("--concurrency", "2", *line))
    assert [item["mode"] for item in found["points"]] == ["plain", "4", "auto"]
    assert found["settings"]["prompts"] == 2 and found["settings"]["params"]["ignore_eos"]
    assert found["engine"]["rounds"] == "called"
    assert not any(item["parts_ms"] for item in found["points"])
    assert found["engine"]["max_model_len"] == found["settings"]["prompt_tokens"][1] + 24
    only = report(run("--concurrency", "1", *line, "--categories", "b", "--modes", "plain"))
    assert only["settings"]["prompts"] == 1


def test_a_picture_is_drawn(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    line = ["--concurrency", "1,2", "--dummy-weights", model / "config.json", "--no-parts"]
    found = report(run(*line, "--modes", "plain,1", "--plot", picture, *QUICK, *SHORT))
    assert picture.read_bytes().startswith(b"\x89PNG") and len(found["points"]) == 4
    assert [len(point["passes"]) for point in found["points"]] == [3] * 4


def test_a_picture_has_bars_and_the_workload(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from surefoot.bench import machine_load, sweep_plot

    drawn: list[Any] = []
    honest = figure.Figure.savefig

    def keep(self: Any, *arguments: Any, **options: Any) -> None:
        drawn.append(self)
        honest(self, *arguments, **options)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    speeds = [4.0, 5.0, 8.0]
    points = [summarise(2, mode, [Pass(1.0, value) for value in speeds]) for mode in (0, "auto")]
    sweep_plot.plot(tmp_path / "made-up.svg", ["a model", "a load", "a machine"], points)
    assert [text.get_text() for text in drawn[0].texts] == ["a model"]
    [axes] = drawn[0].axes
    assert axes.get_title() == "a load\na machine"
    for container in axes.containers:
        _, _, [bars] = container
        [bar] = bars.get_segments()
        assert bar[:, 1].tolist() == [4, 8]
    monkeypatch.setattr(machine_load, "BUSY_OTHERS", -1.0)
    line = ["--concurrency", "1", "--dummy-weights", model / "config.json", "--no-parts"]
    result = run(*line, "--modes", "plain", "--plot", tmp_path / "s.png", *QUICK, *SHORT)
    assert report(result)["machine_load"]["busy"] and "The machine was busy" in result.stdout
    caption = drawn[1].axes[0].get_title()
    for words in ("12 prompt + 40 output tokens", "3 passes a point", "core", "The machine was"):
        assert words in caption.replace("\n", " "), caption


REFUSED = [
    ("--modes plain", "--modes"),
    ("--dummy-weights x", "--dummy-weights"),
    ("--synthetic-acceptance 0.5", "--synthetic-acceptance"),
    ("--prompt-tokens 5", "--prompt-tokens"),
    ("--parts", "--parts"),
    ("--plot x.png", "--plot"),
    ("--concurrency 1 --batch-size 2", "--batch-size"),
    ("--concurrency 1 --show-drafts", "--show-drafts"),
    ("--concurrency 1 --prefix-caching", "--prefix-caching"),
    ("--concurrency 1 --speculation off", "--speculation"),
    ("--concurrency 1 --draft-policy fixed", "--draft-policy"),
    ("--concurrency 1 --categories a", "--categories"),
    ("--concurrency 1 --per-category 1", "--per-category"),
    ("--concurrency 0", "--concurrency"),
    ("--concurrency one", "--concurrency"),
    ("--concurrency 1 --modes often", "--modes"),
    ("--concurrency 1 --modes 0", "--modes"),
    ("--concurrency 1 --modes plain,64", "--modes"),
    ("--concurrency 1 --repeats 0", "--repeats"),
    ("--concurrency 1 --warmup -1", "--warmup"),
    ("--concurrency 1 --prompt-tokens 0", "--prompt-tokens"),
    ("--concurrency 1 --dummy-weights x --model y", "--dummy-weights"),
    ("--concurrency 1 --dummy-weights /does/not/exist", "--dummy-weights"),
    ("--concurrency 1 --dummy-weights x --weights native", "--weights"),
    ("--concurrency 1 --synthetic-acceptance 0.2,0.5", "--synthetic-acceptance"),
    ("--concurrency 1 --synthetic-acceptance 1.5", "--synthetic-acceptance"),
    ("--concurrency 1 --synthetic-acceptance x", "--synthetic-acceptance"),
    ("--concurrency 1 --synthetic-acceptance 0.5 --proposer ngram", "--proposer"),
    ("--concurrency 1 --plot /does/not/exist/x.png", "--plot"),
    ("--concurrency 1 --plot x.txtt", "--plot"),
]


@pytest.mark.parametrize(("line", "option"), REFUSED)
def test_options_that_do_not_apply_are_refused_by_name(line: str, option: str) -> None:
    result = run(*line.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option}: ") and result.stderr.count("\n") == 1


def test_prompts_go_with_a_tokenizer_only(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    for option, value in (("--dummy-weights", "x"), ("--prompt-tokens", "5")):
        result = run("--concurrency", "1", "--prompts", prompts, option, value)
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {option}: ")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        (["--modes", "3", "--max-draft-tokens", "2"], "--modes"),
        (["--max-num-seqs", "1"], "--concurrency"),
        (["--kv-cache-memory", "50000"], "--concurrency"),
        (["--max-model-len", "20"], "--max-tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(line: list[str], option: str, model: Path) -> None:
    result = run("--concurrency", "2", "--dummy-weights", model, *QUICK, *SHORT, *line)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith(f"error: {option}: ")
    assert result.stdout == ""


def test_a_missing_matplotlib_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--concurrency", "1", "--plot", "x.png")
    assert result.exit_code == 2 and "surefoot[plot]" in result.stderr


def test_rounds_are_prepared_before_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    honest = recording.time_called

    def measure(*arguments: Any) -> Any:
        seen.append("measured")
        return honest(*arguments)

    monkeypatch.setattr(recording, "time_called", measure)
    config = make_engine(tiny_decoder()).config
    seen.clear()
    Engine(tiny_decoder(), config, prepare=lambda round_: seen.append("prepared"))
    assert seen == ["prepared", "measured"]


def test_every_repeat_turns_the_order_around_after_the_warmup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(tiny_decoder(), max_num_seqs=2)
    order: list[Any] = []
    begun: list[int] = []

    def fake(_: Any, concurrency: int, mode: Any, load: Load) -> Pass:
        order.append(mode)
        begun.append(load.prompts[0][0])
        assert sorted(prompt[0] for prompt in load.prompts) == [3, 4, 5]
        return Pass(1.0 if len(order) <= 2 else 5.0, 10.0 * len(order))

    monkeypatch.setattr("surefoot.bench.sweep.run_pass", fake)
    load = Load([[3], [4], [5]], GREEDY)
    first, second = sweep(engine, SweepSettings((2,), (0, "auto"), 3, 1), load)
    # The first two passes warm up.
    assert order == ["auto", 0, 0, "auto", "auto", 0, 0, "auto"]
    # Two requests take two prompts; all modes of a turn have the same ones.
    assert begun == [3, 3, 5, 5, 4, 4, 3, 3]
    assert [item.tokens_per_s for item in first.passes] == [30, 60, 70]
    assert (first.mode, first.median.tokens_per_s, first.lowest.tokens_per_s) == ("plain", 60, 30)
    assert second.mode == "auto" and second.median.end_to_end_per_s == 5


def test_passes_without_a_steady_state_have_no_steady_numbers() -> None:
    point = summarise(3, "auto", [Pass(2.0), Pass(4.0, tokens_per_s=7.0)])
    assert (point.median.end_to_end_per_s, point.median.tokens_per_s) == (3, 7)
    assert summarise(3, 0, [Pass(2.0)]).median.tokens_per_s is None


def test_ratios_to_plain_are_of_turns_and_say_what_they_mean() -> None:
    def point(mode: Any, speeds: list[float | None], drafts: float = 1.0) -> Point:
        return summarise(
            4, mode, [Pass(1.0, value, drafts_per_round=drafts if mode else 0) for value in speeds]
        )

    plain = point(0, [10.0, 20.0, 40.0])
    # A machine that gets faster all the time: each turn's ratio is 1.2.
    steady, even = point("auto", [12.0, 24.0, 48.0]), point(2, [9.0, 20.0, 48.0])
    partly, idle = point(1, [11.0, None, None]), point(3, [12.0, 24.0, 48.0], drafts=0)
    ratios = ratios_to_plain([plain, steady, even, partly, idle])
    assert set(ratios) == {(4, mode) for mode in ("auto", "2", "1", "3")}
    found = ratios[4, "auto"]
    assert (found.median, found.low, found.high, found.count) == pytest.approx((1.2, 1.2, 1.2, 3))
    verdicts = [verdict(item, ratios.get((4, item.mode))) for item in (plain, steady, even)]
    assert verdicts == ["", "faster in all 3", "no difference"]
    assert verdict(partly, ratios[4, "1"]) == "one run"
    assert verdict(idle, ratios[4, "3"]) == "no drafts verified"
    assert ratios_to_plain([steady]) == {}


def test_a_pass_counts_what_was_decoded_and_leaves_the_engine_as_it_was() -> None:
    engine = make_engine(tiny_decoder(), max_num_seqs=2, max_draft_tokens=3)
    planner = engine.loop.planner
    with drafting(engine, 2) as wish:
        assert isinstance(engine.loop.planner, FixedPlanner)
        assert wish.max_draft_tokens == 2
    assert engine.loop.planner is planner
    result = run_pass(engine, 2, 0, Load(random_prompts(48, 1, 10), GREEDY))
    assert result.accepted_length == 1 and result.drafts_per_round == 0
    # 10 to 34 tokens each, two requests: their mean in the steady state is near the middle.
    assert result.context == pytest.approx(2 * 24.5, abs=4)
    assert not engine.has_work


def test_requests_of_a_pass_have_seeds_of_their_own() -> None:
    engine = make_engine(tiny_decoder(), max_num_seqs=3)
    load = Load([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4, seed=5))
    assert [request.seed for request in submit(engine, 3, load, SpeculationParams())] == [5, 6, 7]


def test_bytes_of_a_round() -> None:
    engine = make_engine(tiny_decoder())
    config = engine.decoder.config
    sizes = {name: 1 for name in expected_shapes(config)}
    for name, shape in expected_shapes(config).items():
        for length in shape:
            sizes[name] *= length
    # Tied: the table is the head.
    assert config.tied_embeddings and weight_bytes(engine.decoder) == 4 * sum(sizes.values())
    assert kv_bytes_per_token(engine) == 2 * config.layers * config.kv_heads * config.head_dim * 4
    assert round_bytes(engine, 10) == weight_bytes(engine.decoder) + 10 * kv_bytes_per_token(engine)


def test_kernels_belong_to_parts() -> None:
    kernels = {
        "rows_kernel": "products",
        "product_kernel": "products",
        "nvjet_tst_128x64_64x8_2x1_v_bz_TNN": "products",
        "qkv_kernel": "products",
        "attention_kernel": "attention",
        "combine_kernel": "attention",
        "rope_kv_kernel": "norm and rope",
        "partial_argmax_kernel": "sampling",
        "draw_kernel": "sampling",
        "split_kernel": "control",
        "lay_out_kernel": "control",
        "void at::native::vectorized_elementwise_kernel<4>": "other",
        "Memcpy DtoH (Device -> Pinned)": "other",
    }
    assert {kernel: group_of(kernel) for kernel in kernels} == kernels


def test_time_is_split_over_kernels_without_counting_it_twice() -> None:
    kernels = [
        ("rows_kernel", 0.0, 4.0),
        ("attention_kernel", 3.0, 6.0),  # came in while the product ended
        ("combine_kernel", 6.5, 7.0),
        ("Memcpy DtoH", 6.8, 6.9),  # beside it
        ("split_kernel", 9.0, 10.0),
    ]
    found = {part: time for part, time in attribute(kernels[::-1]).items() if time}
    expected = {"products": 4.0, "attention": 2.5, "control": 1.0, "idle": 2.5}
    assert found == pytest.approx(expected)
    assert set(attribute([]).values()) == {0.0}


def test_every_kernel_of_ours_belongs_somewhere() -> None:
    import re

    import surefoot.kernels as kernels

    folder = Path(str(kernels.__file__)).parent / "triton"
    names = {
        name
        for file in folder.glob("*.py")
        if file.name != "losses.py"  # Of training, which has no rounds.
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert len(names) > 15
    lost = {name for name in names if group_of(name) == "other"}
    assert not lost, f"say in bench/parts.py, GROUPS, which part of a round they are: {lost}"


def test_impossible_prompts_are_refused_before_anything_runs() -> None:
    engine = make_engine(tiny_decoder(), max_num_seqs=2)
    with pytest.raises(SurefootError):
        sweep(engine, SweepSettings((1,), (0,)), Load([[3] * 400], GREEDY))
    assert engine.stats.rounds == 0
