"""Runs a server: starts the core, listens, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from surefoot.config import EngineConfig
from surefoot.engine.garbage import only_new_garbage
from surefoot.errors import SurefootError
from surefoot.models.loading import load_tokenizer
from surefoot.models.loading.chat_template import read_chat_template
from surefoot.server.access import LogFormat, log_to_stdout
from surefoot.server.app import create_app
from surefoot.server.aside import SWITCH_SECONDS
from surefoot.server.connections import BoundedConnection
from surefoot.server.core_process import CoreProcess
from surefoot.server.front import Front
from surefoot.server.listening import (
    address,
    bind,
    bind_path,
    check_certificate,
    hosts,
    is_local,
    listening,
)
from surefoot.server.service import Service, ServiceSettings
from surefoot.server.tool_formats import FORMATS

ProgressCallback = Callable[[str, int, int], None]
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 30
UNREAD_SECONDS = 2
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class ServerConfig:
    """How to serve. ``port`` 0 takes a free one. ``max_queue`` bounds the texts that wait beside
    those that run. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    """What requests may call the model; none: its own name."""
    api_keys: tuple[str, ...] = ()
    """Any of these; none: none is asked for."""
    uds: str | None = None
    """Listen on this path, a Unix socket, instead of ``host`` and ``port``."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may use for this server; none: this machine's own if it listens on a
    loopback address, any if not. ``*`` stands for any, ``*.example.com`` for all below."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    cors_origins: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    """How the model writes calls of tools (``FORMATS``); None for what its template says."""
    max_queue: int = 256
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    access_log: LogFormat | None = None
    """None for none. Lines go to the standard output."""
    chat_template: str | None = None
    """A file with a chat template that replaces the model's."""
    trust_request_chat_template: bool = False
    """Whether requests may bring chat templates of their own."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise SurefootError("port", f"{self.port} is out of range", "use 0 to 65535")
        if self.max_queue < 0:
            raise SurefootError("max_queue", "is negative")
        if self.max_body_bytes < 1:
            raise SurefootError("max_body_bytes", "is below 1")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise SurefootError("request_timeout", "must be above 0")
        if not self.shutdown_timeout >= 0:
            raise SurefootError("shutdown_timeout", "is negative")
        for key in self.api_keys:
            if not key:
                raise SurefootError("api_key", "is empty", "drop it to serve without a key")
            if not (key.isascii() and key.isprintable()):
                raise SurefootError("api_key", "has characters that no header can carry")
        for name in self.allowed_hosts:
            if name != "*" and "*" in name.removeprefix("*."):
                raise SurefootError("allowed_hosts", f"{name!r} is no host", "use *.example.com")
        if self.tool_call_parser not in (None, *FORMATS):
            problem = f"{self.tool_call_parser!r} is unknown"
            raise SurefootError("tool_call_parser", problem, f"use {', '.join(FORMATS)}")
        check_certificate(self.ssl_certfile, self.ssl_keyfile)


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    progress: ProgressCallback | None = None,
    loaded: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGINT or SIGTERM; then finish what runs, up to ``shutdown_timeout``.

    ``loaded`` is called when there is no more ``progress``; then the limits and the address are
    printed on stderr. Returns the exit status: 0, 1 when the engine died, 143 for SIGTERM before
    the model was loaded. Raises SurefootError for what the user can put right.
    """
    listener = bind(server.host, server.port) if server.uds is None else bind_path(server.uds)
    sys.setswitchinterval(SWITCH_SECONDS)
    with listening(listener), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_serve(engine, server, listener, progress, loaded))
        except asyncio.CancelledError:
            return TERMINATED


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    engine: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    progress: ProgressCallback | None,
    loaded: Callable[[], None],
) -> int:
    core = CoreProcess()
    loading = asyncio.current_task()
    assert loading is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loading.cancel)
    try:
        await core.spawn()
        service = await load_service(core, engine, config, progress)
        front = service.front
        app = make_app(service, config, hosts(config.allowed_hosts, listener))
        http = _Http(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                ws="none",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                lifespan="off",
                log_level="warning",
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                # For connections that are not read from; requests have ended before.
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + UNREAD_SECONDS,
            )
        )
        if config.access_log is not None:
            log_to_stdout()
        loaded()
        print(f"{service.settings.names[0]}: {front.ready.description}", file=sys.stderr)
        if service.prompts.description:
            print(service.prompts.description, file=sys.stderr)
        if not config.api_keys and not is_local(listener):
            print(
                "warning: no API key is asked for, and other machines may reach this server; set "
                "SUREFOOT_API_KEY",
                file=sys.stderr,
            )
        gc.collect()
        with only_new_garbage():
            return await _run(http, front, listener, config.shutdown_timeout)
    finally:
        await core.close()


async def load_service(
    core: CoreProcess,
    engine: EngineConfig,
    config: ServerConfig,
    progress: ProgressCallback | None = None,
) -> Service:
    """Have a core that was spawned load the model, and return what answers for it. Its front does
    not ``listen`` yet. Raises SurefootError for a mistake in the configuration, and CoreDied."""
    name, tokenizer = load_tokenizer(engine.model, progress)
    if config.chat_template is not None:
        tokenizer.replace_chat_template(read_chat_template(config.chat_template))
    ready = await core.load(engine, progress)
    settings = ServiceSettings(
        config.names or (name,),
        config.request_timeout,
        config.tool_call_parser,
        config.trust_request_chat_template,
    )
    return Service(Front(core, ready, tokenizer, config.max_queue), settings)


def make_app(
    service: Service, config: ServerConfig, allowed_hosts: Sequence[str] | None
) -> FastAPI:
    """The HTTP surface of a service, guarded as configured. Without ``allowed_hosts`` any host may
    be meant."""
    return create_app(
        service,
        api_keys=config.api_keys,
        allowed_hosts=allowed_hosts,
        cors_origins=config.cors_origins,
        max_body_bytes=config.max_body_bytes,
        access_log=config.access_log,
    )


async def _run(http: _Http, front: Front, listener: socket.socket, patience: float) -> int:
    """Serve until a signal or the core's death; returns the exit status."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if http.should_exit:
            front.give_up()
        http.should_exit = True
        loop.call_later(patience, front.give_up)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    listening = asyncio.ensure_future(front.listen())
    listening.add_done_callback(lambda _: setattr(http, "should_exit", True))
    try:
        await http.serve([listener])
    finally:
        listening.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if front.dead is None:
        return 0
    print(f"error: the engine died: {front.dead}", file=sys.stderr)
    return 1


class _Http(uvicorn.Server):
    """Leaves signals to ``_run``, and tells where it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            shown = address(listener, self.config.is_ssl)
            print(f"Listening on {shown}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
