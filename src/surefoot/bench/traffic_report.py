"""Traffic as tables in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from surefoot import __version__
from surefoot.bench.latency import PERCENTILES, Latency
from surefoot.bench.spread import ENOUGH, LEVEL, Spread, spread
from surefoot.bench.sweep import PLAIN, Mode, mode_name
from surefoot.bench.traffic import KindOfRounds, Run, TrafficSettings
from surefoot.bench.workload import Call, Shape

if TYPE_CHECKING:
    from rich.table import Table

Results = Mapping[Mode, Sequence[Run]]


def throughput(runs: Sequence[Run]) -> Spread:
    """Output tokens a second."""
    return spread([run.traffic.output_throughput for run in runs])


def ratio_to_plain(results: Results, mode: Mode) -> Spread | None:
    """Output tokens a second over those of plain decoding, pass by pass; None where that did not
    run."""
    if PLAIN not in results or mode == PLAIN:
        return None
    pairs = zip(results[mode], results[PLAIN], strict=True)
    ratios = [
        own.traffic.output_throughput / plain.traffic.output_throughput
        for own, plain in pairs
        if plain.traffic.output_throughput
    ]
    return spread(ratios) if ratios else None


def verdict(runs: Sequence[Run], ratio: Spread | None) -> str:
    """The ratio's, or that there was nothing to compare."""
    if ratio is None:
        return ""
    verified = [run.speculation.verified for run in runs if run.speculation is not None]
    return "no drafts verified" if verified and not any(verified) else ratio.verdict


def rounds_of(runs: Sequence[Run]) -> dict[str, KindOfRounds]:
    """All runs' rounds together, the kind that took the most time first."""
    found: dict[str, KindOfRounds] = {}
    for run in runs:
        for kind, entry in run.rounds.items():
            total = found.setdefault(kind, KindOfRounds())
            total.rounds += entry.rounds
            total.seconds += entry.seconds
            total.device_seconds += entry.device_seconds
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def traffic_table(results: Results) -> Table:
    """One row a mode: medians over its runs."""
    table = _table()
    table.add_column("mode", no_wrap=True)
    ranks = " / ".join(f"p{rank}" for rank in PERCENTILES)
    count = max(len(runs) for runs in results.values())
    interval = f"{LEVEL:.0%} in-\nterval" if count >= ENOUGH else "lowest–\nhighest"
    several = (interval,) if count > 1 else ()
    for heading in (
        "output\ntok/s",
        *several,
        "of\nplain",
        *(("its\nrange",) if several else ()),
        f"first token, ms\n{ranks}",
        f"gaps, ms\n{ranks}",
        f"ms a token\n{ranks}",
        "tokens\n/round",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for mode, runs in results.items():
        speed, ratio = throughput(runs), ratio_to_plain(results, mode)
        lengths = [run.speculation.accepted_length for run in runs if run.speculation is not None]
        table.add_row(
            mode_name(mode),
            f"{speed.median:.0f}",
            *((speed.interval(".0f"),) if several else ()),
            "" if ratio is None else f"{ratio.median:.2f}×",
            *(("" if ratio is None else ratio.interval(),) if several else ()),
            *(_latencies([getattr(r.traffic, name) for r in runs]) for name in LATENCIES),
            f"{mean(lengths):.2f}" if lengths else "",
            verdict(runs, ratio),
        )
    return table


LATENCIES = ("ttft", "itl", "tpot")


def _latencies(found: Sequence[Latency | None]) -> str:
    known = [latency.percentiles for latency in found if latency is not None]
    return " / ".join(_short(median(values)) for values in zip(*known, strict=True))


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def rounds_table(results: Results) -> Table | None:
    """Rounds by mode and kind; None where nothing is known of them."""
    if not any(run.rounds for runs in results.values() for run in runs):
        return None
    table = _table()
    for heading in ("mode", "rounds"):
        table.add_column(heading, no_wrap=True)
    for heading in ("share", "of the\ntime", "ms\neach", "on the\ndevice"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode, runs in results.items():
        kinds = rounds_of(runs)
        for kind, entry in shares(kinds).items():
            name = mode_name(mode) if kind == next(iter(kinds)) else ""
            table.add_row(
                name, kind, f"{entry['share']:.1%}", f"{entry['time_share']:.1%}",
                *_each(kinds[kind]),
            )  # fmt: skip
    return table


def _each(kind: KindOfRounds) -> tuple[str, str]:
    """Milliseconds of a round, by the clock and of the device's work."""
    if not kind.rounds:
        return "", ""
    by_clock, at_work = kind.seconds / kind.rounds, kind.device_seconds / kind.rounds
    return f"{1000 * by_clock:.2f}", f"{1000 * at_work:.2f}"


def shares(kinds: Mapping[str, KindOfRounds]) -> dict[str, dict[str, float]]:
    """By kind: its rounds and seconds, and their shares of all rounds and of the time."""
    rounds = sum(entry.rounds for entry in kinds.values()) or 1
    seconds = sum(entry.seconds for entry in kinds.values()) or 1.0
    return {
        kind: {
            **asdict(entry),
            "share": entry.rounds / rounds,
            "time_share": entry.seconds / seconds,
        }
        for kind, entry in kinds.items()
    }


def describe_load(results: Results, shape: Shape, settings: TrafficSettings) -> str:
    """What was asked for, in a sentence."""
    first = next(iter(results.values()))[0].traffic
    limits = []
    if shape.rate is not None:
        limits.append(f"{shape.rate:g} arriving a second")
    if settings.at_once is not None:
        limits.append(f"at most {settings.at_once} at once")
    passes = f"{settings.repeats} pass{'es' * (settings.repeats > 1)} of each mode"
    return (
        f"{shape.requests} requests, {', '.join(limits)}; prompts of {first.prompt_tokens} tokens "
        f"together, outputs of {first.output_tokens}; {passes}."
    )


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def mode_json(results: Results, mode: Mode) -> dict[str, Any]:
    """A mode: the median of each number over its runs, the lowest and highest, and every run."""
    runs = results[mode]
    every = [run_json(run) for run in runs]
    names = [name for name, value in every[0].items() if isinstance(value, int | float)]
    columns = {name: [entry[name] for entry in every if name in entry] for name in names}
    ratio = ratio_to_plain(results, mode)
    return {
        "mode": mode_name(mode),
        **{name: median(values) for name, values in columns.items()},
        "low_high": {name: [min(values), max(values)] for name, values in columns.items()},
        "of_plain": None if ratio is None else asdict(ratio),
        "verdict": verdict(runs, ratio) or None,
        "rounds": shares(rounds_of(runs)),
        "runs": every,
    }


def run_json(run: Run) -> dict[str, Any]:
    """One pass."""
    drafts = run.speculation
    speculation = {} if drafts is None else {
        "accepted_length": drafts.accepted_length,
        "drafts_verified": drafts.verified,
        "drafts_accepted": drafts.accepted,
    }  # fmt: skip
    return {
        **run.traffic.to_json(),
        **speculation,
        "preemptions": run.preemptions,
        "rounds": shares(run.rounds),
        "errors": list(run.errors),
    }


def everything(
    subject: Mapping[str, Any],
    shape: Shape,
    settings: TrafficSettings,
    calls: Sequence[Call],
    results: Results,
) -> dict[str, Any]:
    """All that was measured; JSON-ready. ``subject``: what it was measured on."""
    outputs = [call.output_tokens for call in calls]
    return {
        "surefoot": __version__,
        **subject,
        "settings": {
            **asdict(shape),
            **asdict(settings),
            "modes": [mode_name(mode) for mode in settings.modes],
            "mean_output_tokens": mean(outputs),
        },
        "modes": [mode_json(results, mode) for mode in results],
    }
