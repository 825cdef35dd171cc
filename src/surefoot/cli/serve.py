"""``surefoot serve``: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from surefoot.cli.options import engine_options, read_size
from surefoot.cli.terminal import progress_bars
from surefoot.cli.verb import verb
from surefoot.config import EngineConfig
from surefoot.errors import SurefootError

PANEL = "Server"


@verb(engine=engine_options)
def serve(
    engine: dict[str, Any],
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=PANEL)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=PANEL)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model (repeatable). (default: its own name)",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SUREFOOT_API_KEY",
            help="Ask for this key. Better set the variable: arguments are seen by all users.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let pages of this origin call the server (repeatable).",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Most texts that wait; more get 429.", rich_help_panel=PANEL)
    ] = 256,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest request.", rich_help_panel=PANEL)
    ] = "8MiB",
    request_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End requests that take longer. (default: never)",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="On SIGTERM, how long to wait for what runs.",
            rich_help_panel=PANEL,
        ),
    ] = 30.0,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log every request.", rich_help_panel=PANEL)
    ] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI does.

    Ends with status 1 when the engine dies. docs/server.md describes endpoints and fields.
    """
    if model_name is not None:
        if "model" in engine:
            raise SurefootError("model", "is given twice", "drop one of them")
        engine["model"] = model_name
    serve_, ServerConfig = _server()
    config = ServerConfig(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        api_key=api_key,
        cors_origins=tuple(cors_origin or ()),
        max_queue=max_queue,
        max_body_bytes=read_size(max_body, "max_body"),
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        access_log=access_log,
    )
    with contextlib.ExitStack() as loading:
        progress = loading.enter_context(progress_bars())
        progress("Starting", 0, 0)
        status = serve_(EngineConfig.from_dict(engine), config, progress, loading.close)
    raise typer.Exit(status)


def _server() -> tuple[Any, Any]:
    try:
        from surefoot.server.serve import ServerConfig, serve
    except ImportError as error:
        raise SurefootError(
            "serve",
            f"needs {error.name}, which is not installed",
            "pip install 'surefoot[server]'",
        ) from None
    return serve, ServerConfig
