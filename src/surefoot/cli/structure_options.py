"""Options that say what a text has to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from surefoot.cli.options import option
from surefoot.errors import SurefootError
from surefoot.structured import StructuredOutputsParams


def _structure(*names: str, **settings: Any) -> Any:
    return option(*names, panel="Structured output", **settings)


def structure_options(
    json_schema: Annotated[
        Path | None,
        _structure(metavar="FILE", help="The text is JSON that fits the schema in this file."),
    ] = None,
    regex: Annotated[
        str | None, _structure(help="The text as a whole matches this regular expression.")
    ] = None,
    choice: Annotated[
        list[str] | None, _structure(metavar="TEXT", help="The text is one of these (repeatable).")
    ] = None,
    grammar: Annotated[
        Path | None, _structure(metavar="FILE", help="The text fits this grammar (Lark or GBNF).")
    ] = None,
) -> StructuredOutputsParams | None:
    """What the text has to fit."""
    given: list[tuple[str, str, Any]] = []
    if json_schema is not None:
        given.append(("json_schema", "json", _read("json_schema", json_schema)))
    if regex is not None:
        given.append(("regex", "regex", regex))
    if choice:
        given.append(("choice", "choice", choice))
    if grammar is not None:
        given.append(("grammar", "grammar", _read("grammar", grammar)))
    if len(given) > 1:
        raise SurefootError(given[1][0], f"does not go with {given[0][0]}", "drop one of them")
    if not given:
        return None
    [(_, kind, value)] = given
    return StructuredOutputsParams(**{kind: value})


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SurefootError(option, f"cannot be read: {error}") from None
