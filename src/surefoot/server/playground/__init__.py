"""The page at ``/``: a chat that shows where tokens come from, from the package's own files.

The page talks to the server's public API only. Its policy lets the browser ask nobody else.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE = "index.html"
_NAMES = (
    _PAGE,
    "icon.svg",
    "style.css",
    "parts.css",
    "theme.js",
    "main.js",
    "api.js",
    "chat.js",
    "compare.js",
    "graph.js",
    "memory.js",
    "numbers.js",
    "problems.js",
    "proposers.js",
    "run.js",
    "server.js",
    "settings.js",
    "text.js",
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A newer server brings newer files under the same names.
    "Cache-Control": "no-cache",
}


def _path(name: str) -> str:
    return "/" if name == _PAGE else f"/playground/{name}"


PATHS = frozenset(map(_path, _NAMES))
"""What the page is made of. None of it is secret, so none of it needs a key."""


def add_playground(app: FastAPI) -> None:
    """Serve the page and its files."""
    for name in _NAMES:
        content = (files(__name__) / name).read_bytes()
        _add_file(app, _path(name), content, _TYPES[name.rsplit(".", 1)[1]])


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
