"""``surefoot bench``: speculation against plain decoding, in one process, on one engine; or, with
--concurrency, throughput by the number of requests (``sweep``); or, with --traffic, throughput and
latencies where requests come and go (``traffic``)."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.bench_kinds import SWEEP, TRAFFIC, choose_kind, read_count
from surefoot.cli.bench_report import INTRODUCTION, print_report, print_texts
from surefoot.cli.options import engine_options, option, speculation_option
from surefoot.cli.sweep import run_sweep
from surefoot.cli.terminal import DraftPainter, load, progress_bars
from surefoot.cli.traffic import run_traffic, traffic_options
from surefoot.cli.verb import OTHER_ERROR, verb
from surefoot.request import SamplingParams

if TYPE_CHECKING:
    from surefoot.bench.machine_load import MachineLoad
    from surefoot.bench.measure import Measured, Settings
    from surefoot.bench.prompts import BenchPrompt
    from surefoot.bench.report import Summary
    from surefoot.engine.llm import LLM

SHORT = 96
"""Tokens of an answer: short ones make many pairs of runs, which tell more than few long ones."""
_sweep = functools.partial(option, panel="Sweep over --concurrency")
_both = functools.partial(option, panel="With --concurrency or --traffic")


@verb(engine=engine_options, speculation=speculation_option, traffic=traffic_options)
def bench(
    engine: dict[str, Any],
    speculation: str,
    traffic: dict[str, Any],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON lines with "prompt", "messages" or "turns" (the first is asked), and an '
            'optional "category". Without it: three built-in samples; else random tokens.',
            show_default=False,
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Only these categories.", show_default=False),
    ] = None,
    per_category: Annotated[
        int | None, typer.Option(help="The first N of each category.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Most tokens of each answer; of traffic LOW-HIGH, drawn evenly. "
            "(default: 96; in a sweep 128; of traffic 64-448)",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Runs of each prompt, each way. (default: as many as fit into 24 s, from 3 to 30; "
            "in sweeps and traffic 3)"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts that run at once. (default: 1)")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Runs each way that are not counted: short ones; else whole passes. (default: 1)"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0, and random prompts.")] = 0,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="With it, all but the first run of a prompt skip its prefill. (default: no)",
            show_default=False,
        ),
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Print the texts, coloured by who proposed them.")
    ] = False,
    with_json: Annotated[
        bool,
        typer.Option("--json/--no-json", help="End stdout with one line of JSON: all results."),
    ] = True,
    concurrency: Annotated[
        str | None,
        _sweep(
            metavar="N1,N2,…",
            help="Measure throughput with so many requests at once, plain and with drafts.",
        ),
    ] = None,
    modes: Annotated[
        str | None,
        _both(
            metavar="A,B,…",
            help="plain, auto, and numbers of drafts that are always verified. "
            "(default: plain,4,auto)",
        ),
    ] = None,
    dummy_weights: Annotated[
        Path | None,
        _both(metavar="CONFIG", help="Random weights for this config.json, or a folder's."),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        _both(
            metavar="R1,R2,…",
            help="Drafts 1, 2, … are right in this share of all rounds, whatever the model: for "
            "measuring speed, the texts mean nothing.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        _both(
            metavar="N",
            help="Length of the random prompts; of traffic LOW-HIGH, lognormal in between. "
            "(default: 512; of traffic 32-2048)",
        ),
    ] = None,
    parts: Annotated[
        bool | None,
        _sweep(
            "--parts/--no-parts", help="Also take rounds apart: time by kernel. (default: parts)"
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        _sweep(metavar="FILE", help="Draw throughput against concurrency (png, svg, …)."),
    ] = None,
) -> None:
    """Measure how much faster speculation is, and check that the text stays the same.

    Each prompt runs plain (speculation off) and with speculation, in turn, REPEATS times. Speeds
    are generated tokens per second, from submission to the last token, prefill included; "without
    prefill" counts from the first token on. The ratio is the median over the pairs of runs, with
    its 95 % interval (for fewer than 6 the lowest and highest). A ratio whose interval holds 1 is
    no difference. Exit code 1 means that texts differed.

    With --concurrency it is a sweep instead: tokens per second while all of so many requests
    decode, and end to end, for every mode, with the lowest and highest; texts are not compared.

    With --traffic requests of many lengths come and go: output tokens per second, time to first
    token and gaps between tokens, as `vllm bench serve` defines them, for every mode; with --url
    on a server.

    What the model's generation_config.json recommends for sampling is not used.
    """
    given = {**locals(), **traffic}
    from surefoot.bench.prompts import builtin_prompts, load_prompts, select

    kind = choose_kind(given)
    names = None if categories is None else [name.strip() for name in categories.split(",")]
    chosen = None
    if prompts is not None:
        chosen = select(load_prompts(prompts), names, per_category)
    if kind == TRAFFIC:
        run_traffic(engine, chosen, given)
        return
    params = SamplingParams(
        max_tokens=read_count("max_tokens", max_tokens, 128 if kind == SWEEP else SHORT),
        temperature=temperature,
        seed=seed,
        ignore_eos=kind == SWEEP,
    )
    if kind == SWEEP:
        run_sweep(engine, params, chosen, given)
        return
    chosen = chosen or select(builtin_prompts(), names, per_category)
    size = 1 if batch_size is None else batch_size
    settings = _settings(params, speculation, repeats, size, 1 if warmup is None else warmup)
    engine.setdefault("max_num_seqs", max(size, 32))
    llm = load(engine, enable_prefix_caching=bool(prefix_caching), generation_config="none")
    from surefoot.bench.context import everything, workload

    results, lines, busyness = _run(llm, chosen, settings, show_drafts)
    print_report(lines, workload(llm, settings, results), busyness)
    if with_json:
        print(json.dumps(everything(llm, settings, results, busyness)), flush=True)
    if not lines[-1].identical:
        raise typer.Exit(OTHER_ERROR)


def _settings(
    params: SamplingParams, method: str, repeats: int | None, size: int, warm: int
) -> Settings:
    from surefoot.bench.measure import Settings

    return Settings(params, method, repeats, size, warm)


def _run(
    llm: LLM, prompts: list[BenchPrompt], settings: Settings, show_drafts: bool
) -> tuple[list[Measured], list[Summary], MachineLoad]:
    from surefoot.bench.machine_load import LoadWatch
    from surefoot.bench.measure import measure
    from surefoot.bench.report import summaries

    painter = DraftPainter(llm.engine.controller.names, sys.stdout)
    if show_drafts:
        print(f"\n{INTRODUCTION}\n({painter.legend()})")
    watch = LoadWatch()
    with progress_bars() as progress:

        def show(measured: Measured) -> None:
            if show_drafts:
                print_texts(measured, painter)

        def count(done: int, total: int) -> None:
            progress("Measuring", done, total)

        results = measure(llm, prompts, settings, show, count)
    return results, summaries(results), watch.stop()
