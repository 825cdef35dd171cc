"""A picture of a sweep. matplotlib is imported when needed, and optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.bench.sweep import Pass, Point
from surefoot.errors import SurefootError


def check_plot(path: Path) -> None:
    """Refuse what would only be found out after all the measuring."""
    try:
        import matplotlib
    except ImportError:
        raise SurefootError(
            "plot", "needs matplotlib, which is not installed", "pip install 'surefoot[plot]'"
        ) from None
    matplotlib.use("Agg")
    if not path.absolute().parent.is_dir():
        raise SurefootError("plot", f"{path.parent} is no folder")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise SurefootError("plot", f"{path.name} is no picture", f"use one of {', '.join(kinds)}")


def plot(path: Path, caption: Sequence[str], points: Sequence[Point]) -> None:
    """Decoding speed against concurrency, one line a mode: medians over the passes, with bars from
    the lowest to the highest. ``caption``: lines for above the picture, the first as its title."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    ticks = sorted({point.concurrency for point in points})
    modes = list(dict.fromkeys(point.mode for point in points))
    for index, mode in enumerate(modes):
        own = [p for p in points if p.mode == mode and p.median.tokens_per_s is not None]
        # Side by side, or their bars would hide each other.
        shift = 2 ** (0.04 * (index - (len(modes) - 1) / 2))
        counts = [point.concurrency * shift for point in own]
        label = mode if not mode.isdigit() else f"{mode} draft{'s' * (mode != '1')}"
        speeds = [_speed(point.median) for point in own]
        below = [_speed(point.median) - _speed(point.lowest) for point in own]
        above = [_speed(point.highest) - _speed(point.median) for point in own]
        axes.errorbar(counts, speeds, yerr=[below, above], marker="o", capsize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xticks(ticks)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens a second, all decoding (bars: lowest to highest pass)")
    title, *lines = caption
    figure.suptitle(title, wrap=True)
    axes.set_title("\n".join(lines), fontsize="small", wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _speed(item: Pass) -> float:
    assert item.tokens_per_s is not None
    return item.tokens_per_s
