"""What ``surefoot bench`` prints of speculation against plain decoding: texts, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.cli.terminal import DraftPainter

if TYPE_CHECKING:
    from surefoot.bench.machine_load import MachineLoad
    from surefoot.bench.measure import Measured
    from surefoot.bench.report import Summary

INTRODUCTION = """\
Speculation: something cheap guesses the next few tokens, and the model checks all guesses in one
go. Only what it would have written anyway is kept, so the text is exactly the model's own. Each
prompt now runs without speculation and with it, in turn, several times; these are the texts of the
first time, confirmed guesses marked, and the speeds follow."""


def print_texts(measured: Measured, painter: DraftPainter) -> None:
    """The texts of a batch's first speculative run, and how its drafts fared."""
    from surefoot.bench.report import summarise

    run = measured.pairs[0].speculative
    for prompt, pieces in zip(measured.prompts, run.pieces, strict=True):
        words = " ".join(prompt.last_words.split())
        print(f"\n── {prompt.name}: {words[:70]}{'…' if len(words) > 70 else ''}\n")
        for text, source in pieces:
            painter.write(text, source)
        painter.close()
        print()
    line = summarise([measured])
    same = "the same text" if line.identical else "a DIFFERENT text"
    drafts = f"{line.accepted} of {line.verified} drafts verified were right"
    print(
        f"\n   {same} as without speculation; {drafts if line.verified else 'no drafts verified'}",
        flush=True,
    )


def print_report(lines: list[Summary], workload: str, busyness: MachineLoad) -> None:
    """The table, and what it says in words."""
    from rich.console import Console

    from surefoot.bench.table import build_table, speed_sentence

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    print()
    console.print(build_table(lines))
    overall = lines[-1]
    same = "and every text is identical." if overall.identical else "but TEXTS DIFFER:"
    for sentence in (
        "",
        "spec.: with speculation; tokens/round: what one pass of the model gave on average.",
        workload,
        *([busyness.note()] if busyness.busy else []),
        f"With speculation: {speed_sentence(overall)}, {same}",
        *(
            f"  {item.prompt}, {item.way} run {item.repeat + 1}: from token {item.position} on"
            for item in overall.differences
        ),
    ):
        console.print(sentence, markup=False)
