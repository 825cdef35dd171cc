"""The part of ``surefoot bench`` that measures throughput against concurrency."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.cli.terminal import progress_bars
from surefoot.errors import SurefootError
from surefoot.request import SamplingParams

if TYPE_CHECKING:
    from surefoot.bench.prompts import BenchPrompt
    from surefoot.bench.subject import Subject
    from surefoot.bench.sweep import Mode, Point, SweepSettings
    from surefoot.config import EngineConfig
    from surefoot.engine.engine import Engine

DEFAULT_DRAFTS = 4
DEFAULT_PROMPT_TOKENS = 512
SWEEP_ONLY = ("dummy_weights", "synthetic_acceptance", "modes", "prompt_tokens", "parts", "plot")
COMPARISON_ONLY = ("batch_size", "show_drafts", "prefix_caching")


def refuse_other_kind(concurrency: str | None, given: Mapping[str, Any]) -> None:
    """Options (those not given are None or False) that the chosen kind of benchmark lacks."""
    for name in SWEEP_ONLY if concurrency is None else COMPARISON_ONLY:
        if given[name] not in (None, False):
            kind = "only" if concurrency is None else "not"
            fix = "give that too" if concurrency is None else "drop one of them"
            raise SurefootError(name, f"is {kind} for sweeps over --concurrency", fix)
    if concurrency is None:
        return
    if given["speculation"] != "auto":
        raise SurefootError("speculation", "is not for sweeps over --concurrency", "use --modes")
    if "draft_policy" in given["engine"]:
        raise SurefootError("draft_policy", "is not for sweeps over --concurrency", "use --modes")
    if given["prompts"] is None:
        for name in ("categories", "per_category"):
            if given[name] is not None:
                raise SurefootError(name, "chooses among --prompts", "give that too")
        return
    for name in ("dummy_weights", "prompt_tokens"):
        if given[name] is not None:
            why = "have no tokenizer" if name == "dummy_weights" else "is for random prompts"
            raise SurefootError(name, f"{why}: does not go with --prompts", "drop one of them")


def read_concurrency(text: str) -> tuple[int, ...]:
    """``1,4,8``: rising counts of requests."""
    return tuple(sorted(set(_counts("concurrency", text.split(",")))))


def read_modes(text: str | None, most_drafts: int | None) -> tuple[Mode, ...]:
    """``plain,1,2,auto``; without them plain, a fixed number of drafts, and auto."""
    if text is None:
        fixed = min(DEFAULT_DRAFTS, DEFAULT_DRAFTS if most_drafts is None else most_drafts)
        return tuple(dict.fromkeys((0, fixed, "auto"))) if fixed else (0,)
    modes: list[Mode] = []
    for word in (word.strip() for word in text.split(",")):
        if word in ("plain", "auto"):
            modes.append(0 if word == "plain" else "auto")
        else:
            modes += _counts("modes", [word], ", plain or auto")
    return tuple(dict.fromkeys(modes))


def read_rates(text: str | None) -> tuple[float, ...]:
    """``0.4,0.2``: the share of rounds in which drafts 1, 2, … are accepted."""
    try:
        rates = tuple(float(word) for word in text.split(",")) if text is not None else ()
    except ValueError:
        rates = (-1.0,)
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    if not falling or not all(0 <= rate <= 1 for rate in rates):
        raise SurefootError(
            "synthetic_acceptance",
            f"{text!r} are no unconditional rates",
            "use numbers from 0 to 1 that never rise: draft 2 needs draft 1",
        )
    return rates


def _counts(option: str, words: list[str], others: str = "") -> list[int]:
    try:
        counts = [int(word) for word in words]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise SurefootError(
            option, f"{','.join(words)!r} is no count", f"use numbers from 1{others}"
        )
    return counts


def run_sweep(
    options: Mapping[str, Any],
    params: SamplingParams,
    prompts: list[BenchPrompt] | None,
    given: Mapping[str, Any],
) -> None:
    """Measure, print tables, and the line of JSON. ``options`` are the engine's; ``prompts`` as
    chosen from a file; ``given`` are the parameters of ``surefoot bench``."""
    from surefoot.bench.subject import Subject, subject_config, tokenize
    from surefoot.bench.sweep import SweepSettings
    from surefoot.bench.sweep_plot import check_plot

    counts = read_concurrency(given["concurrency"])
    wanted = read_modes(given["modes"], options.get("max_draft_tokens"))
    rates = read_rates(given["synthetic_acceptance"])
    subject = Subject(options, given["dummy_weights"], rates)
    repeats, warmup = given["repeats"], given["warmup"]
    settings = SweepSettings(
        counts, wanted, 1 if repeats is None else repeats, 1 if warmup is None else warmup
    )
    if given["plot"] is not None:
        check_plot(given["plot"])
    texts = None if prompts is None else tokenize(options, prompts)
    length = DEFAULT_PROMPT_TOKENS if given["prompt_tokens"] is None else given["prompt_tokens"]
    if length < 1:
        raise SurefootError("prompt_tokens", f"{length} is below 1")
    longest = max(map(len, texts)) if texts else length
    drafts = max([len(rates), *(mode for mode in wanted if isinstance(mode, int))])
    config = subject_config(
        subject, max(counts), longest + (params.max_tokens or 0), drafts or DEFAULT_DRAFTS
    )
    _measure(subject, config, settings, params, texts, length, given)


def _measure(
    subject: Subject,
    config: EngineConfig,
    settings: SweepSettings,
    params: SamplingParams,
    texts: list[list[int]] | None,
    length: int,
    given: Mapping[str, Any],
) -> None:
    from surefoot.bench.bandwidth import memory_bandwidth
    from surefoot.bench.parts import round_parts
    from surefoot.bench.subject import build_subject
    from surefoot.bench.sweep import Load, mode_name, random_prompts, sweep
    from surefoot.bench.sweep_report import everything
    from surefoot.engine.build import choose_backend

    parts: dict[tuple[int, str], dict[str, float]] = {}
    with progress_bars() as progress:
        progress("Starting", 0, 0)
        bandwidth = memory_bandwidth(choose_backend(config).device, config.threads)
        engine = build_subject(subject, config, progress)
        if texts is None:
            vocab = engine.decoder.config.vocab_size
            texts = random_prompts(vocab, max(settings.concurrency), length, params.seed or 0)
        load = Load(texts, params)
        _introduce(engine, subject)
        points = sweep(
            engine,
            settings,
            load,
            on_progress=lambda done, total: progress("Measuring", done, total),
        )
        if given["parts"] is not False:
            for concurrency in settings.concurrency:
                for mode in settings.modes:
                    progress("Taking rounds apart", len(parts), len(points))
                    found = round_parts(engine, concurrency, mode, load)
                    parts[concurrency, mode_name(mode)] = found
    _print(engine, points, bandwidth, parts)
    if given["plot"] is not None:
        from surefoot.bench.sweep_plot import plot

        plot(given["plot"], _title(engine, subject), points)
    if given["with_json"]:
        report = everything(engine, subject, settings, load, points, bandwidth, parts)
        print(json.dumps(report), flush=True)


def _title(engine: Engine, subject: Subject) -> str:
    backend = engine.decoder.backend
    model = engine.config.model if subject.dummy is None else f"random weights of {subject.dummy}"
    return f"{model}, {backend.name} backend, {str(backend.dtype).removeprefix('torch.')}"


def _introduce(engine: Engine, subject: Subject) -> None:
    """What was built, and the limits that hold, on stderr."""
    from surefoot.bench.subject import kind_of_rounds

    print(
        f"{_title(engine, subject)}; up to {engine.config.max_num_seqs} requests at once, "
        f"KV cache for {engine.kv_tokens} tokens; decoding rounds {kind_of_rounds(engine)}",
        file=sys.stderr,
    )
    for line in engine.memory.lines() if engine.memory else ():
        print(f"  {line}", file=sys.stderr)


def _print(
    engine: Engine, points: list[Point], bandwidth: Mapping[str, float], parts: Mapping[Any, Any]
) -> None:
    from rich.console import Console

    from surefoot.bench.sweep_report import parts_table, sweep_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    print()
    console.print(sweep_table(engine, points, bandwidth))
    print(
        "\nof copy (read) speed: bytes of the weights and of the requests' keys and values per "
        f"second of a round,\nof the {bandwidth['copy_tb_s']:.3g} ({bandwidth['read_tb_s']:.3g}) "
        "TB/s that a plain copy (reading) does here"
    )
    if any(parts.values()):
        print()
        console.print(parts_table(parts))
    if any(point.median.tokens_per_s is None for point in points):
        print("\nempty cells: a request ended before all had been decoding; raise --max-tokens")
