"""The part of ``surefoot bench`` that measures traffic, in this process or on a server."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.bench_kinds import introduce, most_drafts, read_modes, read_range, read_rates
from surefoot.cli.options import option
from surefoot.cli.terminal import progress_bars
from surefoot.cli.verb import OTHER_ERROR
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.bench.prompts import BenchPrompt
    from surefoot.bench.sweep import Mode
    from surefoot.bench.traffic import TrafficSettings
    from surefoot.bench.traffic_report import Results
    from surefoot.bench.workload import Shape

REQUESTS, AT_ONCE, VOCAB_SIZE = 256, 64, 32000
_traffic = functools.partial(option, panel="Traffic")


def traffic_options(
    traffic: Annotated[
        bool,
        _traffic("--traffic", help="Measure requests of many lengths that come and go."),
    ] = False,
    requests: Annotated[
        int | None, _traffic(help=f"Requests of a pass. (default: {REQUESTS})")
    ] = None,
    at_once: Annotated[
        int | None,
        _traffic(
            help="Most requests under way: the next is sent when one has ended. "
            f"(default: {AT_ONCE}; no bound with --rate)"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        _traffic(help="Requests a second that arrive, as a Poisson process."),
    ] = None,
    url: Annotated[
        str | None,
        _traffic(
            help="Send them to the server at this address, of OpenAI's API; --model is then its "
            "name there. OPENAI_API_KEY goes along."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        _traffic(help=f"With --url: random prompts' token ids are below. (default: {VOCAB_SIZE})"),
    ] = None,
) -> dict[str, Any]:
    """What ``--traffic`` is about."""
    return {
        "traffic": traffic,
        "requests": requests,
        "at_once": at_once,
        "rate": rate,
        "url": url,
        "vocab_size": vocab_size,
    }


def run_traffic(
    options: Mapping[str, Any], prompts: list[BenchPrompt] | None, given: Mapping[str, Any]
) -> None:
    """Measure, print tables, and the line of JSON; exit code 1 where requests failed. ``options``
    are the engine's; ``prompts`` as chosen from a file; ``given`` are the parameters of ``surefoot
    bench``."""
    from surefoot.bench.workload import Shape

    requests, rate = given["requests"], given["rate"]
    shape = Shape(
        REQUESTS if requests is None else requests,
        read_range("prompt_tokens", given["prompt_tokens"], Shape.prompt_tokens),
        read_range("max_tokens", given["max_tokens"], Shape.output_tokens),
        rate,
        given["seed"],
    )
    on_server = given["url"] is not None
    if not on_server and given["vocab_size"] is not None:
        raise SurefootError("vocab_size", "is for servers", "give --url, or drop it")
    report = (_on_server if on_server else _in_process)(options, shape, prompts, given)
    if given["with_json"]:
        print(json.dumps(report), flush=True)
    if any(run["failed"] for mode in report["modes"] for run in mode["runs"]):
        raise typer.Exit(OTHER_ERROR)


def _settings(given: Mapping[str, Any], modes: tuple[Mode, ...]) -> TrafficSettings:
    from surefoot.bench.traffic import TrafficSettings

    at_once = given["at_once"]
    if at_once is None and given["rate"] is None:
        at_once = AT_ONCE
    times = {name: given[name] for name in ("repeats", "warmup") if given[name] is not None}
    return TrafficSettings(modes, at_once, temperature=given["temperature"], **times)


def _in_process(
    options: Mapping[str, Any],
    shape: Shape,
    prompts: list[BenchPrompt] | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """On an engine of its own."""
    from surefoot.bench import traffic
    from surefoot.bench.machine_load import LoadWatch
    from surefoot.bench.subject import (
        Subject,
        build_subject,
        describe_subject,
        subject_config,
        title,
        tokenize,
    )
    from surefoot.bench.sweep import check_modes
    from surefoot.bench.traffic_report import describe_load, everything
    from surefoot.bench.workload import draw_calls

    modes = read_modes(given["modes"], options.get("max_draft_tokens"))
    rates = read_rates(given["synthetic_acceptance"])
    subject, settings = Subject(options, given["dummy_weights"], rates), _settings(given, modes)
    texts = [] if prompts is None else tokenize(options, prompts)
    longest = max(map(len, texts), default=shape.prompt_tokens[1]) + shape.output_tokens[1]
    most = min(shape.requests, settings.at_once or AT_ONCE)
    config = subject_config(subject, most, longest, most_drafts(rates, modes))
    with progress_bars() as progress:
        progress("Starting", 0, 0)
        engine = build_subject(subject, config, progress)
        check_modes(engine, modes)
        introduce(engine, subject)
        calls = draw_calls(shape, engine.decoder.config.vocab_size, texts)
        watch = LoadWatch()
        results = traffic.measure(
            engine, calls, settings, lambda done, total: progress("Measuring", done, total)
        )
        busyness = watch.stop()
    _print(results, f"{title(engine, subject)}: {describe_load(results, shape, settings)}")
    if busyness.busy:
        print(f"\n{busyness.note()}")
    about = {**describe_subject(engine, subject), "machine_load": busyness.to_json()}
    return everything(about, shape, settings, calls, results)


def _on_server(
    options: Mapping[str, Any],
    shape: Shape,
    prompts: list[BenchPrompt] | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Over HTTP."""
    from surefoot.bench import http_traffic
    from surefoot.bench.traffic_report import describe_load, everything
    from surefoot.bench.workload import draw_calls

    for name in (*options, "dummy_weights", "synthetic_acceptance"):
        if name != "model" and (name in options or given[name] is not None):
            raise SurefootError(name, "is the server's own affair", "drop it, or --url")
    modes = read_modes(given["modes"], None) if given["modes"] else (http_traffic.DEFAULT,)
    if any(isinstance(mode, int) and mode for mode in modes):
        raise SurefootError("modes", "a server decides how many drafts", "use plain and auto")
    vocab_size = VOCAB_SIZE if given["vocab_size"] is None else given["vocab_size"]
    if vocab_size < 1:
        raise SurefootError("vocab_size", f"{vocab_size} is below 1")
    settings = _settings(given, modes)
    server = http_traffic.Server(given["url"], options.get("model"))
    with progress_bars() as progress:
        results = http_traffic.measure(
            server,
            lambda variant: draw_calls(shape, vocab_size, prompts or (), variant),
            settings,
            lambda done, total: progress("Measuring", done, total),
        )
    _print(results, f"{server.client.url}: {describe_load(results, shape, settings)}")
    about = {"url": server.client.url, "model": server.model}
    calls = draw_calls(shape, vocab_size, prompts or ())
    return everything(about, shape, settings, calls, results)


def _print(results: Results, caption: str) -> None:
    from rich.console import Console

    from surefoot.bench.traffic_report import rounds_table, traffic_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    print()
    console.print(traffic_table(results))
    print(
        f"\n{caption}\n"
        "first token: from sending a request; gaps: from what came at once to what comes next;\n"
        "ms a token: from a request's first token to its last, divided by its tokens less one"
    )
    if (rounds := rounds_table(results)) is not None:
        print()
        console.print(rounds)
    for mode, runs in results.items():
        errors = dict.fromkeys(error for run in runs for error in run.errors)
        if failed := sum(run.traffic.failed for run in runs):
            print(f"\n{failed} requests of mode {mode} FAILED: {'; '.join(errors)}")
