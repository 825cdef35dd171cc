"""``surefoot serve``: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Annotated, Any

import typer

from surefoot.cli.options import engine_options, generation_config_option, option
from surefoot.cli.terminal import progress_bars
from surefoot.cli.values import read_size
from surefoot.cli.verb import verb
from surefoot.config import EngineConfig
from surefoot.errors import SurefootError

API_KEY = "SUREFOOT_API_KEY"
_server = functools.partial(option, panel="Server")


@verb(engine=engine_options, generation_config=generation_config_option)
def serve(
    engine: dict[str, Any],
    generation_config: str,
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")
    ] = None,
    host: Annotated[
        str, _server(help="Address to listen on; 0.0.0.0 for all.", show_default=True)
    ] = "127.0.0.1",
    port: Annotated[
        int, _server(help="Port to listen on; 0 takes a free one.", show_default=True)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _server(
            metavar="NAME",
            help="What requests call the model (repeatable). (default: its own name)",
        ),
    ] = None,
    uds: Annotated[
        str | None,
        _server(metavar="PATH", help="Listen on this Unix socket, not on host and port."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _server(
            envvar=API_KEY,
            help="Ask for this key (repeatable; in the variable, separated by spaces). Better set "
            "the variable: arguments are seen by all users.",
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        _server(
            metavar="NAME",
            help="Names by which requests may call this server, *.example.com for all below "
            "(repeatable). (default: localhost where only this machine reaches it, else any)",
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None, _server(metavar="FILE", help="Serve TLS with this certificate.")
    ] = None,
    ssl_keyfile: Annotated[
        str | None, _server(metavar="FILE", help="The certificate's key, if in another file.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _server(metavar="ORIGIN", help="Let pages of this origin call the server (repeatable)."),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        _server(
            metavar="NAME",
            help="How the model writes calls of tools: hermes, llama3_json, mistral or json. "
            "(default: as its chat template says)",
        ),
    ] = None,
    max_queue: Annotated[
        int, _server(help="Most texts that wait; more get 429.", show_default=True)
    ] = 256,
    max_body: Annotated[
        str, _server(metavar="SIZE", help="Largest request.", show_default=True)
    ] = "8MiB",
    request_timeout: Annotated[
        float | None,
        _server(metavar="SECONDS", help="End requests that take longer. (default: never)"),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        _server(
            metavar="SECONDS",
            help="On SIGTERM, how long to wait for what runs.",
            show_default=True,
        ),
    ] = 30.0,
    chat_template: Annotated[
        str | None,
        _server(metavar="FILE", help="Render conversations with this template, not the model's."),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        _server(
            "--trust-request-chat-template", help="Let requests bring chat templates of their own."
        ),
    ] = False,
    replicas: Annotated[
        int | None,
        _server(
            metavar="N",
            help="Run N engines on this machine, under Ray Serve; requests that share a prefix go "
            "to the same one. (default: one engine, without Ray)",
        ),
    ] = None,
    access_log: Annotated[
        bool, _server("--access-log", help="Log every request on the standard output.")
    ] = False,
    access_log_json: Annotated[
        bool, _server("--access-log-json", help="The same, as lines of JSON.")
    ] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI does.

    Ends with status 1 when the engine dies. docs/server.md describes endpoints and fields.
    """
    if model_name is not None:
        if "model" in engine:
            raise SurefootError("model", "is given twice", "drop one of them")
        engine["model"] = model_name
    engine["generation_config"] = generation_config
    if not api_key and API_KEY in os.environ:
        # Somebody meant to set a key, and would serve everybody.
        raise SurefootError("api_key", f"{API_KEY} is empty", "unset it to serve without a key")
    if access_log and access_log_json:
        raise SurefootError("access_log", "does not go with --access-log-json", "drop one of them")
    serve_, ServerConfig = _load_server()
    config = ServerConfig(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        api_keys=tuple(api_key or ()),
        uds=uds,
        allowed_hosts=tuple(allowed_hosts or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        cors_origins=tuple(cors_origin or ()),
        tool_call_parser=tool_call_parser,
        max_queue=max_queue,
        max_body_bytes=read_size(max_body, "max_body"),
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        chat_template=chat_template,
        trust_request_chat_template=trust_request_chat_template,
        access_log="json" if access_log_json else "text" if access_log else None,
    )
    with contextlib.ExitStack() as loading:
        progress = loading.enter_context(progress_bars())
        progress("Starting", 0, 0)
        settings = EngineConfig.from_dict(engine)
        if replicas is None:
            status = serve_(settings, config, progress, loading.close)
        else:
            from surefoot.ray.local import serve_replicas

            status = serve_replicas(settings, config, replicas, loading.close)
    raise typer.Exit(status)


def _load_server() -> tuple[Any, Any]:
    try:
        from surefoot.server.serve import ServerConfig, serve
    except ImportError as error:
        raise SurefootError(
            "serve",
            f"needs {error.name}, which is not installed",
            "pip install 'surefoot[server]'",
        ) from None
    return serve, ServerConfig
