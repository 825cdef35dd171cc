"""A picture of a sweep. matplotlib is imported when needed, and optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.bench.sweep import Point
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


def plot(path: Path, title: str, points: Sequence[Point]) -> None:
    """Decoding speed against concurrency, one line a mode; a band from lowest to highest."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for mode in dict.fromkeys(point.mode for point in points):
        own = [p for p in points if p.mode == mode and p.median.tokens_per_s is not None]
        counts = [point.concurrency for point in own]
        label = mode if not mode.isdigit() else f"{mode} draft{'s' * (mode != '1')}"
        speeds, lows, highs = (
            [getattr(point, kind).tokens_per_s for point in own]
            for kind in ("median", "lowest", "highest")
        )
        axes.plot(counts, speeds, marker="o", label=label)
        axes.fill_between(counts, lows, highs, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens a second, all decoding")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
