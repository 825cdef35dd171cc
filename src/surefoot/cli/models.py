"""``surefoot models``: list, fetch, inspect and prune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.terminal import progress_bars
from surefoot.cli.verb import verb
from surefoot.errors import SurefootError

app = typer.Typer(help="List, fetch and inspect models; prune the cache.", no_args_is_help=True)

_OUTCOMES = {True: "verified", False: "DAMAGED", None: "not verified"}
_JSON = typer.Option("--json", help="Print JSON.")


@app.command("list")
@verb()
def list_models(as_json: Annotated[bool, _JSON] = False) -> None:
    """List the models that can be named without a path, and what the cache folder holds."""
    from surefoot.cache import cache_root, size_in_words
    from surefoot.models.loading import list_local_models, stored_entries
    from surefoot.speculation.shipped import shipped_drafters

    models, entries = list_local_models(), stored_entries()
    total = sum(entry.bytes for entry in entries)
    useless = sum(entry.bytes for entry in entries if entry.useless)
    if as_json:
        listed = [entry.as_dict() for entry in entries]
        shipped = [
            {"model": item.model, "proposer": item.proposer, "path": str(item.path)}
            for item in shipped_drafters()
        ]
        facts = {
            "drafters": shipped,
            "cache": str(cache_root()),
            "bytes": total,
            "useless_bytes": useless,
        }
        print(json.dumps({"models": models, **facts, "entries": listed}))
        return
    drafters = shipped_drafters()
    order = {model["name"]: place for place, model in enumerate(models)}
    rows = [
        (model["name"], model["kind"], model["bytes"], model["path"] or "fetched on first use")
        for model in models
    ]
    for entry in entries:
        if entry.name not in order:
            remark = entry.useless or ("being written" if entry.kind == "unfinished" else None)
            where = f"{entry.path} ({remark})" if remark else str(entry.path)
            rows.append((entry.model or "", entry.kind, entry.bytes, where))
    rows += [(item.model, item.proposer, item.size, str(item.path)) for item in drafters]
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    width = max(len(row[0]) for row in rows)
    for name, kind, size, where in rows:
        shown = "" if size is None else size_in_words(size)
        print(f"{name:{width}}  {kind:10}  {shown:>9}  {where}")
    prunable = f"; `surefoot models prune` frees {size_in_words(useless)}" if useless else ""
    print(f"{size_in_words(total)} in {cache_root()} (SUREFOOT_CACHE moves it){prunable}")


@app.command()
@verb()
def prune(
    name: Annotated[
        list[str] | None,
        typer.Argument(
            help="Remove this, too: a model or a file name from `models list`, or a kind such as "
            "converted or kernels.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all but wheels that were put there by hand.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
) -> None:
    """Remove what is of no more use from the cache folder.

    That is what interrupted writes left, converted weights whose GGUF file is gone or has changed,
    and compiled kernels for other sources, another compiler or CPU.
    """
    from surefoot.cache import cache_root, size_in_words
    from surefoot.models.loading import prune

    freed = 0
    for entry in prune(name or [], everything=everything, dry_run=dry_run):
        what = "kept, being written" if entry.busy else "would go" if dry_run else "removed"
        reason = f" ({entry.useless})" if entry.useless else ""
        print(f"{what}: {entry.path}, {size_in_words(entry.bytes)}{reason}")
        freed += 0 if entry.busy else entry.bytes
    print(f"{size_in_words(freed)} {'would be ' if dry_run else ''}freed in {cache_root()}")


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
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read all of a model's weights: compare the SHA-256 of its files and converted "
            "copies, and look for weights that are no numbers.",
        ),
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show what a model, or a drafter of speculation, is made of.

    The exit code is 1 if with --target the drafter does not fit, or if with --verify a file is not
    what it should be.
    """
    checks: list[dict[str, Any]] = []
    facts = _inspect_drafter(model, target)
    if facts is None:
        if target is not None:
            raise SurefootError("target", f"{model} is no folder or GGUF file with a drafter")
        facts = _inspect(model)
        checks = _verify(model) if verify else []
    elif verify:
        raise SurefootError(
            "verify", f"{model} is a drafter", "its weights were read and hold numbers only"
        )
    if as_json:
        print(json.dumps({**facts, "verified": checks} if verify else facts))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):{width}}  {_readable(value)}")
        for check in checks:
            print(f"{_OUTCOMES[check['good']]:{width}}  {check['path']}: {check['check']}")
    damaged = any(check["good"] is False for check in checks)
    if facts.get("fits_the_target") is False or damaged:
        raise typer.Exit(1)


def _inspect_drafter(path: str, target: str | None) -> dict[str, Any] | None:
    if not Path(path).expanduser().is_dir() and not path.lower().endswith(".gguf"):
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


def _verify(model: str) -> list[dict[str, Any]]:
    from surefoot.models.loading import verify_model

    with progress_bars() as progress:
        return verify_model(model, progress)


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
