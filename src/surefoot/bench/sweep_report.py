"""A sweep as tables in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from surefoot import __version__
from surefoot.bench.bandwidth import kv_bytes_per_token, round_bytes, weight_bytes
from surefoot.bench.hardware import name_hardware
from surefoot.bench.machine_load import MachineLoad
from surefoot.bench.spread import Spread, spread
from surefoot.bench.subject import Subject, describe_subject, title
from surefoot.bench.sweep import PLAIN, Load, Point, SweepSettings, mode_name

if TYPE_CHECKING:
    from rich.table import Table

    from surefoot.engine.engine import Engine

Parts = Mapping[tuple[int, str], Mapping[str, float]]
"""Milliseconds of a round by part, by (concurrency, mode)."""


def shares(engine: Engine, point: Point, bandwidth: Mapping[str, float]) -> dict[str, float]:
    """What part of the measured copy and read bandwidth the bytes make up that the point's rounds
    cannot do without: 1 is a round that takes no longer than reading these."""
    steady = point.median
    if steady.round_ms is None or steady.context is None:
        return {}
    speed = round_bytes(engine, steady.context) / (steady.round_ms / 1000) / 1e12
    return {name.removesuffix("_tb_s"): speed / value for name, value in bandwidth.items()}


def ratios_to_plain(points: Sequence[Point]) -> dict[tuple[int, str], Spread]:
    """The spread of each point's speed over plain decoding's in the same turn, by (concurrency,
    mode); only for points that have it. Turns in which either had no steady state do not count."""
    plain = {point.concurrency: point for point in points if point.mode == mode_name(PLAIN)}
    found = {}
    for point in points:
        base = plain.get(point.concurrency)
        if base is None or base is point:
            continue
        ratios = [
            own.tokens_per_s / other.tokens_per_s
            for own, other in zip(point.passes, base.passes, strict=True)
            if own.tokens_per_s and other.tokens_per_s
        ]
        if ratios:
            found[point.concurrency, point.mode] = spread(ratios)
    return found


def verdict(point: Point, ratio: Spread | None) -> str:
    """The ratio's, or that there was nothing to compare."""
    if ratio is not None and not point.highest.drafts_per_round:
        return "no drafts verified"
    return "" if ratio is None else ratio.verdict


def workload(engine: Engine, subject: Subject, settings: SweepSettings, load: Load) -> list[str]:
    """What was measured, on what, and how often: lines for captions."""
    low, high = _lengths(load)
    length = f"{low}" if low == high else f"{low}–{high}"
    rates = ", ".join(f"{rate:g}" for rate in subject.rates)
    repeats = settings.repeats
    return [
        title(engine, subject),
        f"{length} prompt + {load.params.max_tokens} output tokens"
        + (f"; drafts accepted at rates {rates}" if rates else "")
        + f"; {repeats} pass{'es' * (repeats != 1)} a point",
        name_hardware(engine.config.device),
    ]


def _lengths(load: Load) -> tuple[int, int]:
    """Tokens of the shortest and the longest prompt."""
    lengths = [len(prompt) for prompt in load.prompts]
    return min(lengths), max(lengths)


def traffic_json(engine: Engine, bandwidth: Mapping[str, float]) -> dict[str, float]:
    """Bandwidths, and the bytes that shares are made of."""
    return {
        **bandwidth,
        "weight_bytes": weight_bytes(engine.decoder),
        "kv_bytes_per_token": kv_bytes_per_token(engine),
    }


def point_json(
    engine: Engine,
    point: Point,
    ratio: Spread | None,
    bandwidth: Mapping[str, float],
    parts: Parts,
) -> dict[str, Any]:
    """The point's medians, low and high speeds, ratio to plain decoding, shares and parts."""
    return {
        "concurrency": point.concurrency,
        "mode": point.mode,
        **asdict(point.median),
        "tokens_per_s_low_high": [point.lowest.tokens_per_s, point.highest.tokens_per_s],
        "of_plain": None if ratio is None else asdict(ratio),
        "verdict": verdict(point, ratio) or None,
        "bandwidth_share": shares(engine, point, bandwidth),
        "parts_ms": dict(parts.get((point.concurrency, point.mode), {})),
        "passes": [asdict(item) for item in point.passes],
    }


def sweep_table(engine: Engine, points: Sequence[Point], bandwidth: Mapping[str, float]) -> Table:
    """One row a point."""
    ratios = ratios_to_plain(points)
    table = _table("re-\nquests", "mode")
    for heading in (
        "decoding\ntok/s",
        "lowest–\nhighest",
        "of\nplain",
        "its\nrange",
        "end to end\ntok/s",
        "ms a\nround",
        "tokens\n/round",
        "drafts\n/round",
        "of copy\nspeed",
        "of read\nspeed",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for point in points:
        steady, ceiling = point.median, shares(engine, point, bandwidth)
        ratio = ratios.get((point.concurrency, point.mode))
        table.add_row(
            str(point.concurrency),
            point.mode,
            _cell(steady.tokens_per_s, ".0f"),
            f"{_cell(point.lowest.tokens_per_s, '.0f')}–{_cell(point.highest.tokens_per_s, '.0f')}"
            if len(point.passes) > 1
            else "",
            "" if ratio is None else f"{ratio.median:.2f}",
            "" if ratio is None else ratio.interval(),
            _cell(steady.end_to_end_per_s, ".0f"),
            _cell(steady.round_ms, ".2f"),
            _cell(steady.accepted_length, ".2f"),
            _cell(steady.drafts_per_round, ".1f"),
            *(_cell(ceiling.get(name), ".0%") for name in ("copy", "read")),
            verdict(point, ratio),
            end_section=point is points[-1]
            or points[points.index(point) + 1].concurrency != point.concurrency,
        )
    return table


def parts_table(parts: Parts) -> Table:
    """Milliseconds a round by part, one row a point."""
    names = list(dict.fromkeys(name for values in parts.values() for name in values))
    table = _table("re-\nquests", "mode")
    for name in (*names, "sum"):
        table.add_column(f"{name}\nms", justify="right", no_wrap=True)
    for (concurrency, mode), values in parts.items():
        cells = [_cell(values.get(name), ".3f") for name in names]
        table.add_row(str(concurrency), mode, *cells, _cell(sum(values.values()), ".3f"))
    return table


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def everything(
    engine: Engine,
    subject: Subject,
    settings: SweepSettings,
    load: Load,
    points: Sequence[Point],
    bandwidth: Mapping[str, float],
    parts: Parts,
    busyness: MachineLoad,
) -> dict[str, Any]:
    """All that was measured, and on what; JSON-ready."""
    ratios = ratios_to_plain(points)
    return {
        "surefoot": __version__,
        **describe_subject(engine, subject),
        "machine_load": busyness.to_json(),
        "settings": {
            **asdict(settings),
            "modes": [mode_name(mode) for mode in settings.modes],
            "prompts": len(load.prompts),
            "prompt_tokens": list(_lengths(load)),
            "params": asdict(load.params),
        },
        "traffic": traffic_json(engine, bandwidth),
        "points": [
            point_json(engine, point, ratios.get((point.concurrency, point.mode)), bandwidth, parts)
            for point in points
        ],
    }
