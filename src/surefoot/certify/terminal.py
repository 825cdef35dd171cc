"""The certificate as a summary in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.certify.certificate import PARITY, PASS, Certificate, seen_from
from surefoot.certify.findings import NEAR
from surefoot.certify.jobs import CROWD

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SHOWN_REASONS = 12
COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def show(certificate: Certificate, console: Console) -> None:
    """Print the sections, the proposers' drafts, the self-test and the result."""
    for part in (_sections(certificate), _proposers(certificate)):
        console.print(part)
        console.print()
    for line in _statements(certificate):
        console.print(line, markup=False)
    for heading, sentences in (
        ("Covered:", certificate.covered),
        ("Not covered:", certificate.not_covered),
    ):
        console.print(heading)
        for sentence in sentences:
            console.print(f"  {sentence}", markup=False)
    console.print()
    colour = COLOURS[certificate.result]
    console.print(f"[bold {colour}]{certificate.result}[/]", end="")
    if certificate.result == PASS and certificate.trials is None:
        console.print(" (without a self-test: whether defects would have been seen is unknown)")
    else:
        console.print()
    for reason in certificate.reasons[:SHOWN_REASONS]:
        console.print(f"  {reason}", markup=False)
    if len(certificate.reasons) > SHOWN_REASONS:
        console.print(f"  … and {len(certificate.reasons) - SHOWN_REASONS} more")


def _sections(certificate: Certificate) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("positions", "ties", "divergences", "problems", "seconds"):
        table.add_column(heading, justify="right")
    for section in certificate.sections:
        parity = section.name in PARITY
        table.add_row(
            section.name,
            f"{section.positions:,}" if section.positions else "",
            str(len(section.ties)) if parity else "",
            str(len(section.divergences)) if parity else "",
            str(len(section.problems)),
            f"{section.seconds:.0f}",
        )
    return table


def _proposers(certificate: Certificate) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("drafts by", no_wrap=True)
    for heading in ("verified", "accepted", "spans with a rejection"):
        table.add_column(heading, justify="right")
    setup = certificate.setup
    for name in (*setup["proposers"], *setup["probes"]):
        counts = [
            certificate.total(counter, (name,))
            for counter in ("verified", "accepted", "rejections")
        ]
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def _statements(certificate: Certificate) -> list[str]:
    noise, size = certificate.noise, certificate.size
    lines = [noise.statement, compared(certificate)]
    if certificate.more:
        lines.append(
            f"Counts were too small at first: {certificate.more} batches of further texts "
            f"({size.more} at most)."
        )
    for section in certificate.sections:
        if section.name == "distribution" and section.details:
            tests = section.details["tests"]
            lines.append(
                f"Distribution: {len(tests)} chi-square tests, false discovery rate "
                f"{section.details['q']}; {len(section.details['rejected_once'])} rejected once, "
                f"{len(section.problems)} again on fresh seeds. A shift of "
                f"{section.details['smallest_shift']:.1%} of the mass would have been seen by "
                f"the sharpest test, of {section.details['largest_smallest_shift']:.1%} by the "
                "bluntest."
            )
        lines += section.notes
    if certificate.trials is None:
        lines.append("Self-test: not made.")
    else:
        caught = sum(trial.caught for trial in certificate.trials)
        lines.append(f"Self-test: {caught} of {len(certificate.trials)} known defects found.")
    return lines


def compared(certificate: Certificate) -> str:
    """What was compared, and from where on a defect would have been seen."""
    lenient = certificate.lenient_acceptance_seen
    near = certificate.refusals.near
    taken = "no runner-up was offered"
    if lenient is not None:
        taken = (
            f"so would a judge that takes runners-up within {lenient:.2g} of the best token, or "
            f"within more ({near} of those offered were within {NEAR})"
        )
    return (
        f"Compared with plain decoding: {certificate.parity_positions:,} positions (at least "
        f"{certificate.size.min_positions:,} needed). A wrong draft accepted in "
        f"{certificate.wrong_acceptance_seen:.2%} of rejections or more would have been seen "
        f"({seen_from(certificate.total_of('crowded')):.2%} beside more than {CROWD} requests); "
        f"{taken}."
    )
