"""The ``surefoot`` command. Verbs import what is heavy only when they run."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from surefoot.cli import bench, certify, chat, doctor, generate, models, serve, train
from surefoot.cli.terminal import prepare_libraries, show_log
from surefoot.cli.verb import INTERRUPTED
from surefoot.cli.version import version_line

app = typer.Typer(
    name="surefoot",
    help="LLM inference whose speculative decoding is exact and never slower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("bench")(bench.bench)
app.command("certify")(certify.certify)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(train.app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version_line())
        raise typer.Exit


@app.callback()
def surefoot(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print version and commit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """LLM inference whose speculative decoding is exact and never slower."""
    prepare_libraries()
    show_log()


def main() -> None:
    """Entry point of the ``surefoot`` script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows a question mark instead of a traceback.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
