"""``surefoot chat``: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from surefoot.cli.conversation import Conversation
from surefoot.cli.options import (
    engine_options,
    generation_config_option,
    sampling_options,
    speculation_option,
    with_temperature,
)
from surefoot.cli.terminal import load
from surefoot.cli.verb import OTHER_ERROR, verb
from surefoot.errors import SurefootError

COMMANDS = {
    "/help": "show this",
    "/reset": "start over",
    "/undo": "take back the last question and its answer",
    "/system TEXT": "set the system message and start over",
    "/seed N": "set the seed (/seed alone: a fresh one each time)",
    "/temperature T": "set the temperature; 0 is greedy",
    "/max-tokens N": "limit the answers (/max-tokens alone: as by default)",
    "/speculation METHOD": "auto, off, or the name of a proposer",
    "/drafts": "switch the colouring of accepted drafts on or off",
    "/stats": "switch the line of numbers after each answer on or off",
    "/exit": "leave (so does Ctrl-D)",
}


@verb(
    engine=engine_options,
    sampling=sampling_options,
    generation_config=generation_config_option,
    speculation=speculation_option,
)
def chat(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    generation_config: str,
    speculation: str,
    system: Annotated[
        str | None, typer.Option(help="The system message.", show_default=False)
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the text by who proposed it.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print numbers after each answer.")
    ] = False,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, /help lists the commands.

    When stdin is no terminal, each of its lines is a question. Sampling is as the model recommends
    (see --generation-config); where it recommends nothing, the temperature is 0.
    """
    llm = load(engine, generation_config=generation_config)
    sampling = with_temperature(sampling, llm.sampling_defaults.get("temperature", 0.0))
    talk = Conversation(llm, sampling, system, show_drafts, stats)
    talk.set_speculation(speculation)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # line editing where there is any
            import readline  # noqa: F401
        print("Type a question, or /help. Ctrl-C stops an answer, Ctrl-D leaves.")
        if show_drafts:
            print(f"({talk.painter.legend()})")
    while (line := _read_line(interactive)) is not None:
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if not run_command(talk, line.strip()):
                    break
            else:
                talk.ask(line, interruptible=interactive)
        except SurefootError as error:
            # In a conversation a mistake costs a line, not the conversation.
            print(f"error: {error}", file=sys.stderr)
            if not interactive:
                raise typer.Exit(OTHER_ERROR) from None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(" (stopped)")


def _read_line(interactive: bool) -> str | None:
    """The next line without its break; None at the end."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    while True:
        try:
            return input("\n> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", end="")


def run_command(talk: Conversation, line: str) -> bool:
    """Carry out a line that starts with a slash; False to leave. Raises SurefootError for an
    unknown one or a bad value."""
    name, _, value = line.partition(" ")
    value = value.strip()
    plain = {
        "/help": _print_help,
        "/reset": talk.reset,
        "/undo": talk.undo,
        "/drafts": talk.toggle_drafts,
        "/stats": talk.toggle_stats,
    }
    if name in ("/exit", "/quit"):
        return False
    if name in plain:
        if value:
            raise SurefootError(name, "takes no value")
        plain[name]()
    elif name == "/system":
        talk.system = value or None
        talk.reset()
    elif name == "/seed":
        talk.set_sampling("seed", _number(name, value, int) if value else None)
    elif name == "/max-tokens":
        talk.set_sampling("max_tokens", _number(name, value, int) if value else None)
    elif name == "/temperature":
        talk.set_sampling("temperature", _number(name, value, float))
    elif name == "/speculation":
        talk.set_speculation(value)
    else:
        raise SurefootError(name, "is no command", "see /help")
    return True


def _number(name: str, value: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise SurefootError(name, f"{value!r} is no number") from None


def _print_help() -> None:
    width = max(map(len, COMMANDS))
    for command, meaning in COMMANDS.items():
        print(f"{command:{width}}  {meaning}")
