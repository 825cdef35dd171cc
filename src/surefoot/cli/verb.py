"""What every verb has in common: shared groups of options, and errors that are one line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from typer.models import ArgumentInfo

from surefoot.errors import SurefootError

USAGE_ERROR = 2
OTHER_ERROR = 1
INTERRUPTED = 130

# Where an option of the library goes by another name on the command line.
_ALIASES = {
    "proposer_options": "proposer_option",
    "proposers": "proposer",
    "speculation.max_draft_tokens": "max_draft_tokens",
    "speculation.method": "speculation",
    "stop_token_ids": "stop_token_id",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
}


def verb(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command. A group is a function whose parameters are options; they join
    the command's own, and the group's result reaches the command under the group's name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [item for item in own.values() if item.name not in groups]
        members = {}
        for name, group in groups.items():
            added = inspect.signature(group, eval_str=True).parameters
            members[name] = list(added)
            parameters += added.values()
        spellings = _spellings(parameters)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            try:
                for name, group in groups.items():
                    values[name] = group(**{key: values.pop(key) for key in members[name]})
                command(**values)
            except SurefootError as error:
                raise typer.Exit(report(error, spellings)) from None
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [item.replace(kind=keyword) for item in parameters]
        run.__dict__.pop("__wrapped__")
        run.__dict__["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


def _spellings(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """How each parameter of a command is written on the command line."""
    spellings = {}
    for item in parameters:
        details = getattr(item.annotation, "__metadata__", ())
        argument = any(isinstance(detail, ArgumentInfo) for detail in details)
        spellings[item.name] = item.name if argument else f"--{item.name.replace('_', '-')}"
    return spellings


def report(error: SurefootError, spellings: Mapping[str, str]) -> int:
    """Print ``error`` as one line; return the exit code: 2 if it names an option of the verb."""
    option, usage = spelled(error.option, spellings)
    message = f"{option}: {error.problem}"
    if error.fix:
        message += f"; {error.fix}"
    print("error:", " ".join(message.split()), file=sys.stderr)
    return USAGE_ERROR if usage else OTHER_ERROR


def spelled(option: str, spellings: Mapping[str, str]) -> tuple[str, bool]:
    """An option of the library as the command line spells it, and whether it has it."""
    name = _ALIASES.get(option, option)
    if name == "model" and name not in spellings:
        # Verbs that train call the model by its part.
        name = "target"
    if name in spellings:
        return spellings[name], True
    owner, _, rest = name.partition(".")
    if rest == "path" and owner in spellings:
        return spellings[owner], True
    if rest and "proposer_option" in spellings:
        return f"{spellings['proposer_option']} {name}", True
    return option, False
