"""``surefoot bench``: speculation against plain decoding, in one process, on one engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot import __version__
from surefoot.cli.options import engine_options, speculation_option
from surefoot.cli.terminal import DraftPainter, load, progress_bars
from surefoot.cli.verb import OTHER_ERROR, verb
from surefoot.request import SamplingParams

if TYPE_CHECKING:
    from surefoot.bench.measure import Measured, Settings
    from surefoot.bench.prompts import BenchPrompt
    from surefoot.bench.report import Summary
    from surefoot.engine.llm import LLM

INTRODUCTION = """\
Speculation: something cheap guesses the next few tokens, and the model checks all guesses in one
go. Only what it would have written anyway is kept, so the text is exactly the model's own. Each
prompt now runs without speculation and with it, in turn; confirmed guesses are marked."""


@verb(engine=engine_options, speculation=speculation_option)
def bench(
    engine: dict[str, Any],
    speculation: str,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON lines with "prompt", "messages" or "turns" (the first is asked), and an '
            'optional "category". Without it: three built-in samples.',
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
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt, each way.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Prompts that run at once.")] = 1,
    warmup: Annotated[int, typer.Option(help="Short runs each way that are not counted.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="With it, all but the first run of a prompt skip its prefill.",
        ),
    ] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Print the texts, coloured by who proposed them.")
    ] = False,
    with_json: Annotated[
        bool,
        typer.Option("--json/--no-json", help="End stdout with one line of JSON: all results."),
    ] = True,
) -> None:
    """Measure how much faster speculation is, and check that the text stays the same.

    Each prompt runs plain (speculation off) and with speculation, in turn, REPEATS times. Speeds
    are generated tokens per second, from submission to the last token, prefill included; "without
    prefill" counts from the first token on. The ratio is that of the medians; beside it stand the
    lowest and highest ratio of single pairs of runs. Exit code 1 means that texts differed.
    """
    from surefoot.bench.prompts import builtin_prompts, load_prompts, select

    names = None if categories is None else [name.strip() for name in categories.split(",")]
    chosen = builtin_prompts() if prompts is None else load_prompts(prompts)
    chosen = select(chosen, names, per_category)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    settings = _settings(params, speculation, repeats, batch_size, warmup)
    engine.setdefault("max_num_seqs", max(batch_size, 32))
    llm = load(engine, enable_prefix_caching=prefix_caching)
    results, lines = _run(llm, chosen, settings, show_drafts)
    print_report(lines)
    if with_json:
        print(json.dumps(_everything(llm, settings, results)), flush=True)
    if not lines[-1].identical:
        raise typer.Exit(OTHER_ERROR)


def _settings(params: SamplingParams, method: str, repeats: int, size: int, warm: int) -> Settings:
    from surefoot.bench.measure import Settings

    return Settings(params, method, repeats, size, warm)


def _run(
    llm: LLM, prompts: list[BenchPrompt], settings: Settings, show_drafts: bool
) -> tuple[list[Measured], list[Summary]]:
    from surefoot.bench.measure import measure
    from surefoot.bench.report import summaries

    painter = DraftPainter([item.name for item in llm.engine.proposers], sys.stdout)
    if show_drafts:
        print(f"\n{INTRODUCTION}\n({painter.legend()})")
    with progress_bars() as progress:

        def show(measured: Measured) -> None:
            if show_drafts:
                print_texts(measured, painter)

        def count(done: int, total: int) -> None:
            progress("Measuring", done, total)

        results = measure(llm, prompts, settings, show, count)
    return results, summaries(results)


def print_texts(measured: Measured, painter: DraftPainter) -> None:
    """The texts of a batch's first speculative run, and how it compared."""
    from surefoot.bench.report import summarise

    run = measured.pairs[0].speculative
    for prompt, pieces in zip(measured.prompts, run.pieces, strict=True):
        words = " ".join(prompt.last_words.split())
        print(f"\n── {prompt.name}: {words[:70]}{'…' if len(words) > 70 else ''}\n")
        for text, source in pieces:
            painter.write(text, source)
        painter.close()
        print()
    line = summarise([measured])
    same = "the same text" if line.identical else "a DIFFERENT text"
    print(
        f"\n   plain {line.plain_speed:.1f} tokens/s, with speculation "
        f"{line.speculative_speed:.1f} ({line.ratio:.2f}×), {same}"
    )


def print_report(lines: list[Summary]) -> None:
    """The table, and what it says in words."""
    from rich.console import Console

    from surefoot.bench.table import build_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    print()
    console.print(build_table(lines))
    overall = lines[-1]
    print("\nspec.: with speculation; tokens/round: what one pass of the model gave on average.")
    print(f"With speculation: {overall.ratio:.2f} times as fast overall, ", end="")
    if overall.identical:
        print("and every text is identical.")
        return
    print("but TEXTS DIFFER:")
    for item in overall.differences:
        print(f"  {item.prompt}, {item.way} run {item.repeat + 1}: from token {item.position} on")


def _everything(llm: LLM, settings: Settings, results: list[Measured]) -> dict[str, Any]:
    from dataclasses import asdict

    from surefoot.bench.hardware import describe_hardware
    from surefoot.bench.report import to_json

    backend = llm.engine.decoder.backend
    return {
        "surefoot": __version__,
        "model": llm.config.model,
        "hardware": describe_hardware(),
        "engine": {
            **asdict(llm.config),
            "backend": backend.name,
            "weights": _weights(llm),
            "dtype": str(backend.dtype).removeprefix("torch."),
            "proposers": [item.name for item in llm.engine.proposers],
            "max_model_len": llm.engine.max_model_len,
        },
        "settings": asdict(settings),
        **to_json(results),
    }


def _weights(llm: LLM) -> str:
    """What ``auto`` came to."""
    if llm.config.weights != "auto":
        return llm.config.weights
    return "native" if llm.engine.decoder.backend.name == "native" else "dense"
