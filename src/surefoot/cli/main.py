"""The ``surefoot`` command. Verbs import what is heavy only when they run."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from surefoot.cli.terminal import prepare_libraries, show_log
from surefoot.cli.verb import INTERRUPTED
from surefoot.cli.version import version_line

# What each verb's own help begins with, so that a list of them imports none.
_SUMMARIES = {
    "generate": "Complete a prompt; the text streams to the terminal.",
    "chat": "Talk to a model. Ctrl-C stops an answer, /help lists the commands.",
    "bench": "Measure how much faster speculation is, and check that the text stays the same.",
    "certify": "Check that speculation is lossless for a model, proposers, dtype and backend.",
    "serve": "Serve a model over HTTP, as OpenAI does.",
    "doctor": "Check what Surefoot needs on this machine, and say what to do where something is "
    "missing.",
    "models": "List, fetch and inspect models; prune the cache.",
    "train": "Train drafters for a model: first `data`, then a kind of drafter.",
}


class _Verbs(TyperGroup):
    """Imports a verb's module, which is named like it, when the verb is used.

    The module has a function of that name, or ``app`` with verbs of its own.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in _SUMMARIES.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself, with its options, in place of its name and summary."""
        _, listed, rest = super().resolve_command(ctx, args)
        name = listed.name if listed else None
        return name, name and _imported(name), rest


def _imported(name: str) -> Any:
    module = import_module(f"surefoot.cli.{name}")
    verbs = typer.Typer(add_completion=False)
    if app := getattr(module, "app", None):
        verbs.add_typer(app, name=name)
    else:
        verbs.command(name)(getattr(module, name))
    return typer.main.get_group(verbs).commands[name]


app = typer.Typer(
    name="surefoot",
    cls=_Verbs,
    help="LLM inference whose speculative decoding is exact and never slower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
