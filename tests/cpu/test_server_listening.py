"""Where a server listens, and for whom."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from server_scripted import uncounted
from surefoot.cli.main import app as cli
from surefoot.errors import SurefootError
from surefoot.server.app import create_app
from surefoot.server.listening import LOOPBACK, address, bind, bind_path, hosts, is_local, listening


def status(allowed: Any, host: str, origin: str | None = None, **options: Any) -> int:
    """Of a request for this host, from a page of this origin."""
    app = create_app(uncounted(), allowed_hosts=allowed, **options)

    async def ask() -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {"host": host} | ({"origin": origin} if origin else {})
            return (await client.get("/version", headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", None, 200),
        ("LOCALHOST", None, 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("[::1]:8000", "https://app.localhost", 200),
        ("127.0.0.1", "https://page", 200),
        ("127.0.0.1", "https://page.evil", 403),
        ("127.0.0.1", "null", 403),
        ("evil.example", None, 403),
        ("localhost.evil.example", None, 403),
        ("xlocalhost", None, 403),
        ("evil.example@localhost.evil", None, 403),
        ("[", None, 403),
        ("", None, 403),
    ],
)
def test_a_page_cannot_take_another_name(host: str, origin: str | None, expected: int) -> None:
    assert status(LOOPBACK, host, origin, cors_origins=["https://page"]) == expected


def test_allowed_hosts() -> None:
    for name in ("a.example", "x.b.example", "localhost"):
        assert status(hosts(("a.example", "*.b.example"), bind("0.0.0.0", 0)), name) == 200
    assert status(hosts(("a.example", "*.b.example"), bind("0.0.0.0", 0)), "b.example") == 403
    assert status(LOOPBACK, "localhost", "http://any", cors_origins=["*"]) == 200


def test_who_is_answered_by_default(tmp_path: Path) -> None:
    for host, local in (("127.0.0.1", True), ("127.0.0.2", True), ("0.0.0.0", False)):
        with listening(bind(host, 0)) as _, bind(host, 0) as listener:
            assert is_local(listener) == local
            allowed = hosts((), listener)
            assert (allowed is not None and host in allowed) if local else allowed is None
            assert hosts(("*",), listener) is None
    with bind_path(str(tmp_path / "socket")) as listener:
        assert is_local(listener) and hosts((), listener) is None


def test_a_unix_socket_replaces_one_that_was_left(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    bind_path(path).close()
    with listening_on(path) as first:
        assert address(first, False) == f"unix:{path}"
        with pytest.raises(SurefootError, match="uds"):
            bind_path(path)
    assert not Path(path).exists()
    Path(path).write_text("a file")
    with pytest.raises(SurefootError, match="uds"):
        bind_path(path)
    assert Path(path).read_text() == "a file"


class listening_on:
    """A Unix socket that listens."""

    def __init__(self, path: str) -> None:
        self.listener = bind_path(path)
        self.listener.listen()
        self._end = listening(self.listener)

    def __enter__(self) -> socket.socket:
        self._end.__enter__()
        return self.listener

    def __exit__(self, *error: object) -> None:
        self._end.__exit__(None, None, None)


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_no_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SUREFOOT_API_KEY", key)
    result = CliRunner().invoke(cli, ["serve", "nowhere"])
    assert result.exit_code == 2 and "SUREFOOT_API_KEY is empty" in result.stderr
