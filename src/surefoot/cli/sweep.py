"""The part of ``surefoot bench`` that measures throughput against concurrency."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.cli.bench_kinds import (
    introduce,
    most_drafts,
    read_count,
    read_counts,
    read_modes,
    read_rates,
)
from surefoot.cli.terminal import progress_bars
from surefoot.request import SamplingParams

if TYPE_CHECKING:
    from surefoot.bench.prompts import BenchPrompt
    from surefoot.bench.subject import Subject
    from surefoot.bench.sweep import Point, SweepSettings
    from surefoot.config import EngineConfig
    from surefoot.engine.engine import Engine

DEFAULT_PROMPT_TOKENS = 512


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

    counts = tuple(sorted(set(read_counts("concurrency", given["concurrency"].split(",")))))
    wanted = read_modes(given["modes"], options.get("max_draft_tokens"))
    rates = read_rates(given["synthetic_acceptance"])
    subject = Subject(options, given["dummy_weights"], rates)
    times = {name: given[name] for name in ("repeats", "warmup") if given[name] is not None}
    settings = SweepSettings(counts, wanted, **times)
    if given["plot"] is not None:
        check_plot(given["plot"])
    texts = None if prompts is None else tokenize(options, prompts)
    length = read_count("prompt_tokens", given["prompt_tokens"], DEFAULT_PROMPT_TOKENS)
    longest = (max(map(len, texts)) if texts else length) + (params.max_tokens or 0)
    config = subject_config(subject, max(counts), longest, most_drafts(rates, wanted))
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
    from surefoot.bench.machine_load import LoadWatch
    from surefoot.bench.parts import round_parts
    from surefoot.bench.subject import build_subject
    from surefoot.bench.sweep import Load, mode_name, random_prompts, sweep
    from surefoot.bench.sweep_report import everything, workload
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
        caption = workload(engine, subject, settings, load)
        introduce(engine, subject)
        watch = LoadWatch()
        points = sweep(
            engine,
            settings,
            load,
            on_progress=lambda done, total: progress("Measuring", done, total),
        )
        busyness = watch.stop()
        if busyness.busy:
            caption.append(busyness.note())
        if given["parts"] is not False:
            for concurrency in settings.concurrency:
                for mode in settings.modes:
                    progress("Taking rounds apart", len(parts), len(points))
                    found = round_parts(engine, concurrency, mode, load)
                    parts[concurrency, mode_name(mode)] = found
    _print(engine, points, bandwidth, parts, caption)
    if given["plot"] is not None:
        from surefoot.bench.sweep_plot import plot

        plot(given["plot"], caption, points)
    if given["with_json"]:
        report = everything(engine, subject, settings, load, points, bandwidth, parts, busyness)
        print(json.dumps(report), flush=True)


def _print(
    engine: Engine,
    points: list[Point],
    bandwidth: Mapping[str, float],
    parts: Mapping[Any, Any],
    caption: list[str],
) -> None:
    from rich.console import Console

    from surefoot.bench.spread import about_range
    from surefoot.bench.sweep_report import parts_table, ratios_to_plain, sweep_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    print("", *caption, "", sep="\n")
    console.print(sweep_table(engine, points, bandwidth))
    print()
    if ratios_to_plain(points):
        print(about_range(len(points[0].passes)))
    print(
        "of copy (read) speed: bytes of the weights and of the requests' keys and values per "
        f"second of a round,\nof the {bandwidth['copy_tb_s']:.3g} ({bandwidth['read_tb_s']:.3g}) "
        "TB/s that a plain copy (reading) does here"
    )
    if any(parts.values()):
        print()
        console.print(parts_table(parts))
    if any(point.median.tokens_per_s is None for point in points):
        print("\nempty cells: a request ended before all had been decoding; raise --max-tokens")
