"""``surefoot models``: list, fetch and inspect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.terminal import progress_bars
from surefoot.cli.verb import verb
from surefoot.errors import SurefootError

app = typer.Typer(help="List, fetch and inspect models.", no_args_is_help=True)

_JSON = typer.Option("--json", help="Print JSON.")


@app.command("list")
@verb()
def list_models(as_json: Annotated[bool, _JSON] = False) -> None:
    """List the models that can be named without a path."""
    from surefoot.models.loading import list_local_models

    models = list_local_models()
    if as_json:
        print(json.dumps(models))
        return
    width = max((len(model["name"]) for model in models), default=0)
    for model in models:
        where = model["path"] if model["local"] else "not here yet; fetched on first use"
        print(f"{model['name']:{width}}  {model['kind']:8}  {where}")


@app.command()
@verb()
def fetch(
    model: Annotated[str, typer.Argument(help="A name from `models list`, or a hub name.")],
) -> None:
    """Fetch a model now, so that the first use need not."""
    print(_inspect(model)["source"])


@app.command()
@verb()
def inspect(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, or a name.")],
    target: Annotated[
        str | None,
        typer.Option(help="For a drafter: the model that it should fit.", show_default=False),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show what a model, or a drafter of speculation, is made of.

    With --target the exit code is 1 if the drafter does not fit.
    """
    facts = _inspect_drafter(model, target)
    if facts is None:
        if target is not None:
            raise SurefootError("target", f"{model} is no folder with a drafter")
        facts = _inspect(model)
    if as_json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):{width}}  {_readable(value)}")
    if facts.get("fits_the_target") is False:
        raise typer.Exit(1)


def _inspect_drafter(path: str, target: str | None) -> dict[str, Any] | None:
    if not Path(path).expanduser().is_dir():
        return None
    from surefoot.models.loading import read_model_config
    from surefoot.speculation.registry import inspect_drafter

    with progress_bars() as progress:
        return inspect_drafter(
            path, None if target is None else read_model_config(target, progress)
        )


def _inspect(model: str) -> dict[str, Any]:
    from surefoot.models.loading import inspect_model

    with progress_bars() as progress:
        return inspect_model(model, progress)


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_readable(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_readable(item) for item in value)
    return "none" if value is None else str(value)
