"""The report in the terminal: a table, and what it says in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.bench.report import OVERALL, Summary
from surefoot.bench.spread import ENOUGH, LEVEL

if TYPE_CHECKING:
    from rich.table import Table


def build_table(lines: Sequence[Summary]) -> Table:
    """One row a category, the overall row last. At most 80 characters wide for short names."""
    from rich.table import Table

    count = lines[-1].ratio.count
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in (
        "plain\ntok/s",
        "spec.\ntok/s",
        "speed-\nup",
        f"interval\n({LEVEL:.0%})" if count >= ENOUGH else "lowest–\nhighest",
        "without\nprefill",
        "tokens\n/round",
        "drafts\nright",
        "same\ntext",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", max_width=10)
    for line in lines:
        table.add_row(*_cells(line), style="bold" if line.category == OVERALL else "")
    return table


def _cells(line: Summary) -> list[str]:
    return [
        line.category,
        f"{line.plain_speed:.1f}",
        f"{line.speculative_speed:.1f}",
        f"{line.ratio.median:.2f}×",
        line.ratio.interval(),
        "" if line.decode_ratio is None else f"{line.decode_ratio.median:.2f}×",
        f"{line.accepted_length:.2f}",
        f"{line.accepted / line.verified:.0%}" if line.verified else "",
        "yes" if line.identical else "NO",
        line.verdict,
    ]


def speed_sentence(line: Summary) -> str:
    """How much faster, without a full stop."""
    ratio = line.ratio
    times = f"{ratio.median:.2f} times"
    if not line.verified:
        known = f"{times} ({ratio.described()})"
        return f"no drafts verified; {known} is noise or the cost of looking for drafts"
    if ratio.verdict == "no difference":
        return f"no difference in speed ({times}, {ratio.described()})"
    return f"{times} as fast ({ratio.described()})"
