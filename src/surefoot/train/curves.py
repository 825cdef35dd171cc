"""The course of a run: a line of JSON for each entry, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINES = "curves.jsonl"
PICTURE = "curves.png"


class Curves:
    """Entries of a run, by step. One that goes on from ``step`` drops what came after it."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LINES
        kept = []
        if self.path.is_file():
            entries = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
            kept = [entry for entry in entries if entry["step"] <= step]
        self.entries: list[dict[str, Any]] = kept
        text = "".join(json.dumps(entry) + "\n" for entry in kept)
        self.path.write_text(text, encoding="utf-8")

    def add(self, entry: Mapping[str, Any]) -> None:
        """``entry`` is JSON-ready and has a ``step``."""
        self.entries.append(dict(entry))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def of(self, key: str) -> tuple[list[float], list[float]]:
        """(millions of tokens, values) of the entries that have ``key``."""
        found = [entry for entry in self.entries if key in entry]
        return [entry["tokens"] / 1e6 for entry in found], [entry[key] for entry in found]


def draw(curves: Curves, path: Path, title: str) -> bool:
    """Write the picture; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2)
    kinds = (
        ("loss", "loss"),
        ("agreement", "first draft is the target's likeliest token"),
        ("length", "accepted length, held out"),
        ("learning_rate", "learning rate"),
    )
    for axes, (key, label) in zip(panels.flat, kinds, strict=True):
        axes.plot(*curves.of(key), label="training" if key == "agreement" else None)
        axes.set_title(label, fontsize="medium")
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
    panels[0][1].plot(*curves.of("held_out_agreement"), marker="o", label="held out")
    panels[0][1].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
