"""One option for each kind of drafter that the registry knows: ``--NAME PATH``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from surefoot.speculation.registry import DRAFTERS, default


def with_drafters(group: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a group (see ``verb``) that has a ``proposer``, to which they add."""
    own = inspect.signature(group, eval_str=True)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    f"--{name}",
                    metavar="PATH",
                    help=f"Draft with the {label} checkpoint in this folder too.",
                    show_default=False,
                    rich_help_panel="Engine",
                ),
            ],
        )
        for name, label in DRAFTERS.items()
    ]

    @functools.wraps(group)
    def run(**values: Any) -> Any:
        paths = {name: values.pop(name, None) for name in DRAFTERS}
        named = [f"{name}={path}" for name, path in paths.items() if path is not None]
        if named:
            values["proposer"] = [*(values.get("proposer") or default()), *named]
        return group(**values)

    parameters = [
        item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own.parameters.values()
    ]
    run.__dict__["__signature__"] = inspect.Signature([*parameters, *added])
    return run
