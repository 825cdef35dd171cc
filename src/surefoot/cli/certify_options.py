"""What an engine that is certified can be told on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from surefoot.cli.drafters import with_drafters
from surefoot.cli.values import read_proposer_options
from surefoot.config import DEFAULT_MODEL, EngineConfig


def _option(*names: str, panel: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **settings)


@with_drafters
def engine_group(
    model: Annotated[
        str | None,
        typer.Argument(help=f"As for `surefoot generate`. (default: {DEFAULT_MODEL})"),
    ] = None,
    dtype: Annotated[
        str | None, _option(panel="Engine", help="auto, float32 or bfloat16. (default: auto)")
    ] = None,
    weights: Annotated[
        str | None, _option(panel="Engine", help="auto, native or dense. (default: auto)")
    ] = None,
    backend: Annotated[
        str | None,
        _option(panel="Engine", help="auto, native, triton or torch. (default: auto)"),
    ] = None,
    device: Annotated[
        str | None, _option(panel="Engine", help="cpu, cuda or cuda:N. (default: cpu)")
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        _option(
            "--enforce-eager",
            panel="Engine",
            help="On a GPU: certify called rounds, not recorded ones.",
        ),
    ] = None,
    threads: Annotated[
        int | None, _option(panel="Engine", help="Threads. (default: one per core)")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        _option(panel="Engine", help="Requests of the largest batch. (default: 32, GPU 128)"),
    ] = None,
    proposer: Annotated[
        list[str] | None,
        _option(
            panel="Engine", metavar="NAME", help="Certify this proposer of drafts (repeatable)."
        ),
    ] = None,
    proposer_option: Annotated[
        list[str] | None,
        _option(
            panel="Engine",
            metavar="NAME.OPTION=VALUE",
            help="Set an option of a proposer (repeatable).",
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int | None, _option(panel="Engine", help="Longest drafts tried. (default: the proposers')")
    ] = None,
) -> dict[str, Any]:
    """Fields of ``EngineConfig``, those that were given. Other sizes are the certificate's own."""
    values: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "backend": backend,
        "device": device,
        "enforce_eager": enforce_eager,
        "threads": threads,
        "max_num_seqs": max_num_seqs,
        "proposers": tuple(proposer) if proposer else None,
        "proposer_options": read_proposer_options(proposer_option) if proposer_option else None,
        "max_draft_tokens": max_draft_tokens,
    }
    given = {name: value for name, value in values.items() if value is not None}
    EngineConfig.from_dict(given)
    return given
