"""The report as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.bench.report import OVERALL, Summary

if TYPE_CHECKING:
    from rich.table import Table


def build_table(lines: Sequence[Summary]) -> Table:
    """One row a category, the overall row last."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in (
        "plain\ntok/s",
        "spec.\ntok/s",
        "speed-\nup",
        "lowest–\nhighest",
        "without\nprefill",
        "tokens\n/round",
        "drafts\nright",
        "same\ntext",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*_cells(line), style="bold" if line.category == OVERALL else "")
    return table


def _cells(line: Summary) -> list[str]:
    return [
        line.category,
        f"{line.plain_speed:.1f}",
        f"{line.speculative_speed:.1f}",
        f"{line.ratio:.2f}×",
        f"{line.ratio_low:.2f}–{line.ratio_high:.2f}",
        "" if line.decode_ratio is None else f"{line.decode_ratio:.2f}×",
        f"{line.accepted_length:.2f}",
        f"{line.accepted / line.drafted:.0%}" if line.drafted else "",
        "yes" if line.identical else "NO",
    ]
