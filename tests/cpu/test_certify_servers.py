"""Two servers compared from outside: fakes that agree, tie, diverge, or lack something."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server_harness import LOOP, emoji_model, running_server
from surefoot.certify import blackbox
from surefoot.certify.blackbox import compare_servers
from surefoot.certify.openai_client import Server
from surefoot.cli.main import app
from surefoot.errors import SurefootError

Scores = Callable[[str], dict[str, float]]
"""Text so far -> logprobs of the next token."""
PROMPTS = ["ab", "b a", "aab"]


class Fake:
    """A completion server whose model is a function."""

    def __init__(self, scores: Scores, logprobs: bool = True, models: int = 1) -> None:
        fake = self
        self.requests: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                names = [{"id": f"model-{index}"} for index in range(models)]
                self.answer(200, {"data": names})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append(body)
                if self.path != "/v1/completions":
                    self.answer(404, {})
                elif "logprobs" in body and not logprobs:
                    self.answer(400, {"error": "no logprobs here"})
                else:
                    self.answer(200, complete(scores, body))

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def complete(scores: Scores, body: dict[str, Any]) -> dict[str, Any]:
    assert body["temperature"] == 0
    text, tokens, values, top = body["prompt"], [], [], []
    for _ in range(body["max_tokens"]):
        rated = scores(text)
        best = max(rated, key=lambda token: rated[token])
        tokens.append(best)
        values.append(rated[best])
        top.append(dict(sorted(rated.items(), key=lambda item: -item[1])[:5]))
        text += best
    choice: dict[str, Any] = {"text": "".join(tokens), "finish_reason": "length"}
    if "logprobs" in body:
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top}
    return {"choices": [choice]}


def plain(text: str) -> dict[str, float]:
    """Three tokens; which is best depends on the whole text."""
    turn = sum(map(ord, text)) * (len(text) + 1) % 3
    return {"abc"[(turn + i) % 3]: (-0.1, -2.5, -4.0)[i] for i in range(3)}


def tied(text: str) -> dict[str, float]:
    """``plain``, but at one length two tokens are as good as tied."""
    return _second(text, 20, -0.1 + 4e-5)


def tied_in_plain(text: str) -> dict[str, float]:
    return _second(text, 20, -0.1 - 4e-5)


def wrong(text: str) -> dict[str, float]:
    """``plain``, but at one length the second best token wins."""
    return _second(text, 20, 0.0)


def _second(text: str, length: int, value: float) -> dict[str, float]:
    rated = plain(text)
    if len(text) == length:
        rated[sorted(rated, key=lambda token: -rated[token])[1]] = value
    return rated


@pytest.fixture
def fakes() -> Iterator[Callable[..., Fake]]:
    running: list[Fake] = []

    def start(*args: Any, **options: Any) -> Fake:
        running.append(Fake(*args, **options))
        return running[-1]

    yield start
    for fake in running:
        fake.close()


def silent(label: str, done: int, total: int) -> None:
    pass


def compare(left: Fake, right: Fake) -> blackbox.Comparison:
    return compare_servers((Server(left.url), Server(right.url + "/v1/")), PROMPTS, 100, silent)


def test_equal_servers_pass(fakes: Any) -> None:
    comparison = compare(fakes(plain), fakes(plain))
    assert comparison.result == "PASS" and comparison.positions == 300
    assert comparison.models == ("model-0", "model-0")
    json.dumps(comparison.to_json(), allow_nan=False)


def test_ties_are_explained_and_what_follows_them_is_compared(fakes: Any) -> None:
    comparison = compare(fakes(tied_in_plain), fakes(tied))
    assert comparison.reasons == []
    assert len(comparison.ties) == 3 and comparison.positions == 300
    assert [tie.position for tie in comparison.ties] == [20 - len(text) for text in PROMPTS]


def test_divergences_behind_a_tie_are_found(fakes: Any) -> None:
    def worse(text: str) -> dict[str, float]:
        return _second(text, 60, 0.0) if len(text) == 60 else tied(text)

    comparison = compare(fakes(tied_in_plain), fakes(worse))
    assert comparison.result == "FAIL" and len(comparison.ties) == 3
    assert [item.position for item in comparison.divergences] == [60 - len(p) for p in PROMPTS]
    assert comparison.divergences[0].regrets[0] == pytest.approx(2.4)


def test_logprobs_that_differ_fail_though_the_text_is_the_same(fakes: Any) -> None:
    def louder(text: str) -> dict[str, float]:
        return {token: value * 1.1 for token, value in plain(text).items()}

    comparison = compare(fakes(plain), fakes(louder))
    assert comparison.result == "FAIL" and not comparison.divergences
    assert "logprobs" in comparison.reasons[0]


def test_a_difference_without_logprobs_is_inconclusive(fakes: Any) -> None:
    comparison = compare(fakes(plain), fakes(wrong, logprobs=False))
    assert comparison.result == "INCONCLUSIVE" and not comparison.logprobs
    assert len(comparison.unexplained) == 3


def test_texts_alone_can_pass(fakes: Any) -> None:
    left, right = fakes(plain, logprobs=False), fakes(plain, logprobs=False)
    assert compare(left, right).result == "PASS"
    # The refusal is remembered: one request too many, not one for each prompt.
    assert sum("logprobs" in body for body in left.requests) == 1


def test_too_few_positions_are_inconclusive(fakes: Any) -> None:
    left, right = fakes(plain), fakes(plain)
    comparison = compare_servers((Server(left.url), Server(right.url)), PROMPTS[:1], 5, silent)
    assert comparison.result == "INCONCLUSIVE" and "5 positions" in comparison.reasons[0]


def test_a_server_that_lacks_something_is_named(fakes: Any) -> None:
    with pytest.raises(SurefootError, match="cannot be reached"):
        Server("http://127.0.0.1:9")
    with pytest.raises(SurefootError, match="lists 2 models"):
        Server(fakes(plain, models=2).url)
    with pytest.raises(SurefootError, match="is not there"):
        server = Server(fakes(plain).url)
        server.url = server.url.replace("/v1", "/v2")
        server.complete("a", 3)


def test_command_line(fakes: Any, tmp_path: Path) -> None:
    good, bad = fakes(plain).url, fakes(wrong).url
    where, sheet = tmp_path / "result.json", tmp_path / "result.html"
    lines = [json.dumps({"prompt": text}) for text in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    common = ["--prompts", str(tmp_path / "prompts.jsonl")]
    common += ["--json", str(where), "--html", str(sheet)]
    result = CliRunner().invoke(app, ["certify", "--url", good, "--url", good, *common])
    assert result.exit_code == 0, result.output
    assert "PASS" in result.output and json.loads(where.read_text())["result"] == "PASS"
    result = CliRunner().invoke(app, ["certify", "--url", good, "--url", bad, *common])
    assert result.exit_code == 1, result.output
    assert "divergence" in sheet.read_text() and "FAIL" in sheet.read_text()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user"}]}))
    result = CliRunner().invoke(app, ["certify", "--url", good, "--url", good, *common])
    assert result.exit_code == 2 and "--prompts" in result.stderr


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("certify --url http://a", "--url"),
        ("certify --url a --url b --dtype float32", "--dtype"),
        ("certify --url a --url b --quick", "--quick"),
        ("certify --dtype int8", "--dtype"),
        ("certify --prompts /does/not/exist", "--prompts"),
        ("certify --proposer unheard-of", "--proposer"),
        ("certify --proposer-option ngram.colour=red", "--proposer-option ngram.colour"),
        ("certify --proposer-option other.size=3", "--proposer-option"),
        ("certify --max-draft-tokens 0", "--max-draft-tokens"),
        ("certify --json /does/not/exist.json", "--json"),
        ("certify --html /", "--html"),
        ("certify --json / --url a --url b", "--json"),
        ("certify --max-draft-tokens 64", "--max-draft-tokens"),
        ("certify /does/not/exist", "model"),
    ],
)
def test_mistakes_are_named_and_make_no_certificate(
    line: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.split()[-1] != "/does/not/exist":
        # What the command line alone shows is said before anything is loaded.
        monkeypatch.setattr("surefoot.cli.certifying._load", None)
    result = CliRunner().invoke(app, line.split())
    assert_one_error(result, option)


def assert_one_error(result: Any, option: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option}: "), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ("\n \n", "has no prompts"),
        ("no json", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: prompt is no text"),
    ],
)
@pytest.mark.parametrize("more", ["", " --url http://127.0.0.1:9 --url http://127.0.0.1:9"])
def test_prompts_that_cannot_be_read_are_named(
    text: str, words: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.cli.certifying._load", None)
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    result = CliRunner().invoke(app, ["certify", "--prompts", str(path), *more.split()])
    assert_one_error(result, "--prompts")
    assert words in result.stderr


def test_our_own_servers_agree_with_and_without_speculation(tmp_path: Path) -> None:
    model = emoji_model(tmp_path)
    where = tmp_path / "result.json"
    lines = [json.dumps({"prompt": text}) for text in (LOOP, "🙂🙃 é 🙂🙃 é 🙂🙃", "x y z x y z")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    with (
        running_server(model) as on,
        running_server(model, max_draft_tokens=0) as off,
    ):
        urls = ["--url", on.url, "--url", off.url]
        more = ["--prompts", str(tmp_path / "prompts.jsonl"), "--json", str(where)]
        result = CliRunner().invoke(app, ["certify", *urls, *more])
        assert result.exit_code == 0, result.output
        comparison = json.loads(where.read_text())
        assert comparison["positions"] >= 200 and comparison["logprobs"]
        assert not comparison["ties"]
        # The one did speculate, the other did not.
        assert on.metric("surefoot_draft_rows_total") > 0
        assert off.metric("surefoot_draft_rows_total") == 0
