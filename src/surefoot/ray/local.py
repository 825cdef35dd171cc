"""``surefoot serve --replicas N``: a Ray of its own on this machine, which ends with the
command."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.bench.hardware import usable_cores
from surefoot.errors import SurefootError
from surefoot.ray import require
from surefoot.ray.prefixes import BLOCK_BYTES, MOST_BLOCKS
from surefoot.server.listening import bind, is_local
from surefoot.server.serve import TERMINATED

if TYPE_CHECKING:
    from surefoot.config import EngineConfig
    from surefoot.server.serve import ServerConfig

NAME = "surefoot"
OBJECT_STORE_BYTES = 128 << 20
"""Ray's store for objects, of which serving makes none."""
DEREGISTER_SECONDS = 1
"""How long a replica that is to end stays reachable for proxies that have not heard of it."""
ROUTER_BUFFER_BYTES = MOST_BLOCKS * BLOCK_BYTES
"""HAProxy's buffers: how much of a request it reads before it asks for a replica, and as much of a
text as the router looks at. Its default with a router, 8 MiB, costs every request 6 ms."""
LONGEST_STREAM_SECONDS = 24 * 3600
"""How long HAProxy finishes what it was serving when replicas came or went."""
_NOT_HERE = ("uds", "ssl_certfile", "ssl_keyfile")


def serve_replicas(
    engine: EngineConfig,
    server: ServerConfig,
    replicas: int,
    loaded: Callable[[], None] = lambda: None,
) -> int:
    """Serve with that many replicas until SIGINT or SIGTERM; then finish what runs, up to
    ``shutdown_timeout``. ``loaded`` is called once they are ready; then the address is printed on
    stderr. Returns the exit status: 0, or 1 if replicas could not be started. Raises
    SurefootError for what the user can put right."""
    if replicas < 1:
        raise SurefootError("replicas", f"is {replicas}", "use 1 or more")
    for name in _NOT_HERE:
        if getattr(server, name) is not None:
            fix = "drop it, or put a proxy that has it in front"
            raise SurefootError(name, "does not go with --replicas, where HAProxy listens", fix)
    with bind(server.host, server.port) as listener:
        # Mistakes show now; HAProxy takes the port once the replicas are ready.
        port, local = listener.getsockname()[1], is_local(listener)
    cores = engine.threads or max(1, usable_cores() // replicas)
    try:
        with _ray(replicas * cores, local), _interruptible() as stopped:
            app = _application(engine, server, replicas, cores)
            _run(app, server.host, port)
            loaded()
            print(f"{replicas} replicas, {cores} threads each", file=sys.stderr)
            print(f"Listening on http://{server.host}:{port}", file=sys.stderr, flush=True)
            stopped()
            _drain()
    except _Stopped:
        return TERMINATED
    return 0


class _Stopped(BaseException):
    """A signal arrived while nothing runs that could be finished, or a second one."""


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM raise _Stopped, but for the first one after the function was called that
    this yields: it waits for that. Afterwards they are ignored: what remains takes seconds, and has
    to be done. (Entered after Ray's start, which sets handlers of its own.)"""
    stop = threading.Event()
    waits = False

    def handle(*_: object) -> None:
        if not waits or stop.is_set():
            raise _Stopped
        stop.set()

    def wait() -> None:
        nonlocal waits
        waits = True
        stop.wait()

    _handle(handle)
    try:
        yield wait
    finally:
        _handle(signal.SIG_IGN)


def _handle(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _application(engine: EngineConfig, server: ServerConfig, replicas: int, cores: int) -> Any:
    from surefoot.ray.application import application

    return application(engine, server, replicas, ray_actor_options={"num_cpus": cores})


def _run(app: Any, host: str, port: int) -> None:
    """Returns once all replicas are ready."""
    from ray import serve

    serve.start(http_options={"host": host, "port": port})
    serve.run(app, name=NAME, route_prefix="/")


def _drain() -> None:
    """Take no more requests, and wait for those that run."""
    from ray import serve

    serve.delete(NAME)


@contextlib.contextmanager
def _ray(processors: int, local: bool) -> Iterator[None]:
    """Ray with Serve's HAProxy on this machine, for replicas with so many processors altogether;
    its processes end with the context. ``local``: nothing of it listens beyond the loopback
    address."""
    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder:
        for name, value in _settings(Path(folder)).items():
            os.environ.setdefault(name, str(value))
        # Serve reads the variables when it is imported.
        require()
        import ray
        from ray import serve

        options: dict[str, Any] = {"_node_ip_address": "127.0.0.1"} if local else {}
        ray.init(
            address="local",
            num_cpus=processors,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            **options,
        )
        try:
            yield
        finally:
            serve.shutdown()
            ray.shutdown()
            _end_processes(folder)


def _end_processes(name: str) -> None:
    """End what has ``name`` among its arguments: HAProxy outlives the actor that started it, if
    that could not end in good order."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _settings(folder: Path) -> dict[str, object]:
    """Environment variables of Ray and of Serve's HAProxy, whose files and ports are to be this
    server's alone."""
    stats, metrics = _free_ports(2)
    proxy = "RAY_SERVE_HAPROXY_"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": 1,
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": 1,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": DEREGISTER_SECONDS,
        # One event loop per replica: a request is not handed from thread to thread.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": 1,
        f"{proxy}INGRESS_REQUEST_ROUTER_BUFSIZE": ROUTER_BUFFER_BYTES,
        # What a replica ended without a byte of an answer is asked of another one.
        f"{proxy}RETRY_ON": "conn-failure empty-response",
        f"{proxy}HARD_STOP_AFTER_S": LONGEST_STREAM_SECONDS,
        f"{proxy}CONFIG_FILE_LOC": folder / "haproxy.cfg",
        f"{proxy}SOCKET_PATH": folder / "admin.sock",
        f"{proxy}SERVER_STATE_BASE": folder,
        f"{proxy}SERVER_STATE_FILE": folder / "server-state",
        f"{proxy}METRICS_SOCKET_PATH": folder / "metrics.sock",
        f"{proxy}STATS_PORT": stats,
        f"{proxy}METRICS_PORT": metrics,
        # Its default, 15, is for computations on machines that people work on.
        "RAY_worker_niceness": 0,
        "RAY_USAGE_STATS_ENABLED": 0,
        "GRPC_VERBOSITY": "ERROR",
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        listeners = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in listeners]
