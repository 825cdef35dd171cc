"""Runs a server: starts the core, listens, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

import uvicorn

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.models.loading import load_tokenizer
from surefoot.server.app import create_app
from surefoot.server.core_process import CoreProcess
from surefoot.server.front import Front
from surefoot.server.service import Service, ServiceSettings

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
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    access_log: bool = False

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
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise SurefootError("api_key", "is empty or has characters that no header can carry")
        if self.api_key == "":
            raise SurefootError("api_key", "is empty", "drop it to serve without a key")


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
    listener = bind(server.host, server.port)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_serve(engine, server, listener, progress, loaded))
        except asyncio.CancelledError:
            return TERMINATED


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: mistakes show before the model is loaded."""
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SurefootError("host", f"{host!r} is no address here: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        option = "port" if error.errno in (13, 98, 48) else "host"
        raise SurefootError(
            option, f"cannot listen on {host}:{port}: {error.strerror}", "choose another"
        ) from None
    return listener


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
        name, tokenizer = load_tokenizer(engine.model, progress)
        ready = await core.load(engine, progress)
        front = Front(core, ready, tokenizer, config.max_queue)
        names = config.names or (name,)
        service = Service(front, ServiceSettings(names, config.request_timeout))
        app = create_app(
            service,
            api_key=config.api_key,
            cors_origins=config.cors_origins,
            max_body_bytes=config.max_body_bytes,
        )
        http = _Http(
            uvicorn.Config(
                app,
                lifespan="off",
                log_level="info" if config.access_log else "warning",
                access_log=config.access_log,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                # For connections that are not read from; requests have ended before.
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + UNREAD_SECONDS,
            )
        )
        loaded()
        print(f"{names[0]}: {ready.description}", file=sys.stderr)
        return await _run(http, front, listener, config.shutdown_timeout)
    finally:
        await core.close()


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
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"Listening on http://{shown}:{port}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
