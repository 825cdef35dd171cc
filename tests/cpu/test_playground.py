"""The playground page without a browser: its files, its policy, and what it asks the server for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_harness import LOOP, Server, emoji_model, offline, only, running_server, sse
from server_scripted import uncounted
from surefoot.server import playground
from surefoot.server.app import create_app

FOLDER = Path(playground.__file__).parent
SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in FOLDER.iterdir()
    if path.is_file() and path.suffix != ".py"
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg"}


class Page(HTMLParser):
    """Ids, references to files, and what a strict policy would not run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.pointers: list[str] = []
        self.inline: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._script = tag in ("script", "style")
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [given[name] for name in ("src", "href", "action") if name in given]
        for name in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
            self.pointers += given.get(name, "").split()

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(data)


def get_all(paths: Any, **options: Any) -> dict[str, httpx.Response]:
    """Answers of an application that has no engine behind it."""
    app = create_app(uncounted(), **options)

    async def ask() -> dict[str, httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return {path: await client.get(path) for path in paths}

    return asyncio.run(ask())


@pytest.mark.parametrize("key", [None, "secret"])
def test_every_file_is_served_without_a_key(key: str | None) -> None:
    expected = {"/" if name == "index.html" else f"/playground/{name}" for name in SOURCES}
    assert set(playground.PATHS) == expected
    for path, answer in get_all(expected, api_keys=[key] if key else []).items():
        name = path.removeprefix("/playground").strip("/") or "index.html"
        assert answer.status_code == 200 and answer.text == SOURCES[name]
        assert answer.headers["content-type"].startswith(TYPES[Path(name).suffix])
        assert answer.headers["x-content-type-options"] == "nosniff"
        header = answer.headers["content-security-policy"]
        policy = dict(part.strip().split(" ", 1) for part in header.split(";"))
        assert policy.pop("default-src") == "'none'" == policy["frame-ancestors"]
        assert set(policy.values()) == {"'none'", "'self'"}


def test_a_key_still_guards_everything_else() -> None:
    closed = ("/v1/models", "/metrics", "/docs", "/playground", "/playground/", "/playground/x.js")
    for path, answer in get_all(closed, api_keys=["secret"]).items():
        assert answer.status_code == 401, path
    inside = ("/playground/__init__.py", "/playground/../app.py", "/playground/%2e%2e/app.py")
    for path, answer in get_all(inside).items():
        assert answer.status_code == 404, path


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name, text in SOURCES.items():
        # A namespace is a name, not an address.
        text = text.replace('"http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|wss?://|[\"'(]\s*//|@import|url\(|\bimport\(", text), name
    page = Page(SOURCES["index.html"])
    assert not page.inline, "the policy forbids scripts and styles inside the page"
    files = [link for link in page.links if not link.startswith("#")]
    assert {f"/{link}" for link in files} <= {*playground.PATHS, "/docs"}
    for name, text in SOURCES.items():
        for imported in re.findall(r'^import .*? from "(.*)";$', text, re.M):
            assert imported.removeprefix("./") in SOURCES, f"{name} imports {imported}"


def test_what_the_scripts_look_for_is_on_the_page() -> None:
    page = Page(SOURCES["index.html"])
    assert len(page.ids) == len(set(page.ids))
    looked_for = {*page.pointers, *(link[1:] for link in page.links if link.startswith("#"))}
    for name, text in SOURCES.items():
        if name.endswith(".js"):
            looked_for |= set(re.findall(r'(?:\$|getElementById)\("([\w-]+)"\)', text))
    assert len(looked_for) > 40 and looked_for <= set(page.ids), looked_for - set(page.ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emoji_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running_server(model) as running:
        yield running


def test_the_model_card_lists_the_methods(server: Server) -> None:
    [card] = server.get("/v1/models").json()["data"]
    offered = card["speculation"]
    assert offered["methods"] == ["auto", "off", "ngram"] and offered["max_draft_tokens"] == 4
    assert card["deterministic"] is False  # The torch backend's sums depend on the batch.
    for method in offered["methods"]:
        server.complete(prompt="a", max_tokens=1, speculation={"method": method})


@pytest.mark.parametrize("text", ["🙂🙃é a", "the cat"])
def test_tokens_are_told_with_their_place(server: Server, model: Path, text: str) -> None:
    llm = offline(model)
    bias = {str(token): value for token, value in only(llm, text).items()}
    body: dict[str, Any] = {"temperature": 0.5, "seed": 1, "logit_bias": bias}
    body |= {"max_tokens": 60, "surefoot": {"proposed_by": True}, "return_token_ids": True}
    body["messages"] = [{"role": "user", "content": LOOP}]
    options = {"include_usage": True}
    answer = server.post("/v1/chat/completions", **body, stream=True, stream_options=options)
    content, tokens, told = "", [], []
    *events, end = sse(answer.text)
    for event in events:
        [choice] = event["choices"]
        content += choice["delta"].get("content", "")
        about = choice["surefoot"]
        names = ("proposed_by", "draft_positions", "text_offset")
        tokens += zip(*(about[name] for name in names), choice["token_ids"], strict=True)
        told.append(about["speculation"])
    assert len(tokens) == 60 and told[-1] == end["usage"]["speculation"]
    rounds = [counts["rounds"] for counts in told]
    assert rounds == sorted(rounds) and rounds[0] < rounds[-1]
    place = 0
    for index, (name, position, offset, _) in enumerate(tokens):
        # A round's drafts come first, and the target's own token ends it.
        place = place + 1 if name else 0
        assert position == (place or None)
        before = llm.tokenizer.decode([token for *_, token in tokens[:index]])
        # A character that is not whole yet has no place in the text.
        assert len(before.rstrip("\ufffd")) <= offset <= len(before)
        assert content[:offset] == before[:offset]
    assert any(name for name, *_ in tokens)
    [whole] = server.post("/v1/chat/completions", **body).json()["choices"]
    assert whole["message"]["content"] == content
    assert whole["surefoot"]["text_offset"] == [offset for *_, offset, _ in tokens]
