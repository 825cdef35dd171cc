"""Bar charts as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 340, 130
_BOTTOM, _TOP = 18, 14


@dataclass(frozen=True)
class Bar:
    label: str
    count: int


def bars(title: str, values: Sequence[Bar], nothing: str) -> str:
    """A figure with one bar per value, with its count; ``nothing`` is said if there are none."""
    if not values:
        return f"<figure><figcaption>{escape(title)}: {escape(nothing)}</figcaption></figure>"
    highest = max(1, *(bar.count for bar in values))
    step = WIDTH / len(values)
    shapes = []
    for index, bar in enumerate(values):
        height = (HEIGHT - _BOTTOM - _TOP) * bar.count / highest
        left, top = index * step, HEIGHT - _BOTTOM - height
        middle = left + step / 2
        shapes.append(
            f'<rect x="{left + step * 0.1:.1f}" y="{top:.1f}" width="{step * 0.8:.1f}" '
            f'height="{height:.1f}"/>'
            + _label(middle, HEIGHT - 5, bar.label)
            + _label(middle, top - 3, str(bar.count))
        )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg>'
        f"<figcaption>{escape(title)}</figcaption></figure>"
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
