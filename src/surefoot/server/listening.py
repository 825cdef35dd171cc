"""Where a server listens: addresses, Unix sockets, certificates, and the hosts it answers for."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Generator, Sequence

from surefoot.errors import SurefootError

LOOPBACK = ("localhost", "*.localhost", "127.0.0.1", "::1")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: mistakes show before the model is loaded."""
    try:
        [family, kind, protocol, _, place] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SurefootError("host", f"{host!r} is no address here: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
    except OSError as error:
        listener.close()
        taken = error.errno in (errno.EACCES, errno.EADDRINUSE)
        raise SurefootError(
            "port" if taken else "host",
            f"cannot listen on {host}:{port}: {error.strerror}",
            "choose another",
        ) from None
    return listener


def bind_path(path: str) -> socket.socket:
    """The same for a Unix socket. One that a server left behind is replaced; only this user may
    connect, unless the umask says otherwise."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        problem = f"cannot listen on {path}: {error.strerror or error}"
        raise SurefootError("uds", problem, "choose another") from None
    return listener


def _is_abandoned(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(path) == errno.ECONNREFUSED


@contextlib.contextmanager
def listening(listener: socket.socket) -> Generator[None, None, None]:
    """Closes ``listener`` at the end, and removes its path."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    try:
        yield
    finally:
        listener.close()
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def address(listener: socket.socket, secure: bool) -> str:
    """For people, and for clients."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def hosts(allowed: Sequence[str], listener: socket.socket) -> tuple[str, ...] | None:
    """The hosts that requests may name, by ``ServerConfig.allowed_hosts``; None for any."""
    if "*" in allowed:
        return None
    if allowed:
        # Whoever can listen on a loopback address needs no trick to reach the server.
        return (*allowed, *LOOPBACK)
    # A page cannot reach a Unix socket, whatever its name leads to.
    loopback = is_local(listener) and listener.family != socket.AF_UNIX
    return (*LOOPBACK, listener.getsockname()[0]) if loopback else None


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Refuse what uvicorn could not serve with. A certificate's file may hold its key."""
    if certificate is None:
        if key is not None:
            raise SurefootError("ssl_keyfile", "does nothing without a certificate")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise SurefootError("ssl_certfile", f"cannot be used: {error}") from None
