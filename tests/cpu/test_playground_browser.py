"""The playground page as a person uses it, in headless Chromium; skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server_harness import LOOP, Server, emoji_model, offline, only, running_server

sync_api = pytest.importorskip("playwright.sync_api")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SETTINGS = {"temperature": "0", "max_tokens": "60", "seed": "7"}
MARKUP = f"<img src=x onerror=alert(1)> {LOOP}"
CHAT = "**/v1/chat/completions"
LONGEST = 60_000
"""Milliseconds that anything may take, on a machine that others use."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Room for an answer that a person can stop before it ends.
    return emoji_model(tmp_path_factory.mktemp("model"), max_positions=8192)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def bias(model: Path) -> dict[str, float]:
    """Makes texts of few tokens that repeat themselves, so that drafts are right."""
    return {str(token): value for token, value in only(offline(model), "🙂é a").items()}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    with sync_api.sync_playwright() as tools:
        path = found[0] if found else None
        try:
            browser = tools.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"there is no Chromium: {error}")
        yield browser
        browser.close()


@pytest.fixture
def open_page(server: Server, browser: Any, bias: dict[str, float]) -> Iterator[Callable[..., Any]]:
    """Opens the page. It must ask nobody but the server, and report no error by itself."""
    complaints: list[str] = []
    contexts = []

    def biased(route: Any) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"logit_bias": bias}))

    def check_request(request: Any) -> None:
        if not request.url.startswith(server.url):
            complaints.append(request.url)

    def check_console(message: Any) -> None:
        # The browser's own words for answers that are errors, which some tests want.
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def opened(width: int = 1100, prepare: Any = None, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        context.set_default_timeout(LONGEST)
        sync_api.expect.set_options(timeout=LONGEST)
        context.route(CHAT, biased)
        page = context.new_page()
        page.on("request", check_request)
        page.on("console", check_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if prepare is not None:
            prepare(page)
        page.goto(server.url)
        if prepare is None:
            sync_api.expect(page.locator("#model")).not_to_be_empty()
            # Hidden fields of a narrow window can be set all the same.
            for name, value in SETTINGS.items():
                page.evaluate(f"document.getElementById('{name}').value = '{value}'")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def ask(page: Any, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator("#send")).to_be_visible()


def answers(server: Server, text: str, bias: dict[str, float]) -> list[tuple[str, str | None]]:
    """The API's own answer: each token's text and who proposed it."""
    body: dict[str, Any] = {name: json.loads(value) for name, value in SETTINGS.items()}
    body |= {"messages": [{"role": "user", "content": text}], "surefoot": {"proposed_by": True}}
    answer = server.post("/v1/chat/completions", **body, logit_bias=bias).json()
    [choice] = answer["choices"]
    content, about = choice["message"]["content"], choice["surefoot"]
    ends = [*about["text_offset"][1:], len(content)]
    texts = [content[at:end] for at, end in zip(about["text_offset"], ends, strict=True)]
    return list(zip(texts, about["proposed_by"], strict=True))


def tokens(page: Any, selector: str) -> list[str]:
    """Texts of the tokens inside an element; half a character would not survive."""
    return page.locator(f"{selector} .t").all_text_contents()


def shown(page: Any, selector: str) -> str:
    """Text of an element as it stands in the document."""
    return page.locator(selector).last.text_content()


def test_chat_shows_the_text_and_where_it_comes_from(
    server: Server, open_page: Callable[..., Any], bias: dict[str, float]
) -> None:
    page = open_page()
    ask(page, MARKUP)
    expected = answers(server, MARKUP, bias)
    content = "".join(text for text, _ in expected)
    assert shown(page, ".message.user .text") == MARKUP
    assert shown(page, ".message.assistant .text") == content
    # Tokens without a text of their own are not shown.
    assert max(content) > "\uffff", "no character of several tokens"
    assert tokens(page, ".message.assistant") == [text for text, _ in expected if text]
    drafted = page.locator(".message.assistant .t:not(.target)")
    assert drafted.count() == sum(bool(text and name) for text, name in expected) > 0
    assert page.locator("#legend li").all_inner_texts() == ["target", "ngram"]
    numbers = shown(page, ".message.assistant .numbers")
    for part in ("tok/s", "accepted length", "drafts accepted", f"{len(expected)} tokens"):
        assert part in numbers
    assert content in page.locator("#announcer").text_content()
    drafted.first.hover()
    details = page.locator("#details").inner_text()
    for part in ("ngram", "no. 1 of its round", "Probability", " %"):
        assert part in details
    # The line ends where the last rounds' mean is: somewhere between nothing and all drafts.
    points = page.locator(".message.assistant .graph polyline").get_attribute("points").split()
    assert len(points) >= 2 and all(0 <= float(p.split(",")[1]) <= 28 for p in points)
    ask(page, "and then")
    assert page.locator(".message").count() == 4
    written = page.locator(".message .text").all_text_contents()
    ngrams = page.locator(".message.assistant .t.p0").all_text_contents()
    page.reload()
    sync_api.expect(page.locator("#model")).not_to_be_empty()
    assert page.locator(".message .text").all_text_contents() == written
    assert "".join(page.locator(".message.assistant .t.p0").all_text_contents()) == "".join(ngrams)
    with page.expect_request(CHAT) as sent:
        ask(page, "go on")
    said = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert said == [*written, "go on"]
    page.click("#clear")
    page.reload()
    sync_api.expect(page.locator("#welcome")).to_be_visible()
    assert page.locator(".message").count() == 0


def test_keyboard(server: Server, open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.evaluate("document.getElementById('max_tokens').value = '8000'")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.input_value("#prompt") == "a\nb"
    # Esc as soon as there is something to see, and to move along.
    page.evaluate(
        """new MutationObserver((_, observer) => {
            if (document.querySelectorAll(".message.assistant .t").length < 3) return;
            observer.disconnect();
            document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
        }).observe(document.getElementById("transcript"), {childList: true, subtree: true})"""
    )
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".message .end").last).to_have_text("stopped")
    server.wait_idle()
    # Backwards from the prompt to the answer's tokens, and along them.
    page.focus(".message.assistant .t")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    second = page.locator(".message.assistant .t").nth(1).text_content()
    assert f"Token\n{second.replace(' ', '␣')}\n" in page.locator("#details").inner_text()
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#details")).to_be_hidden()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#compare-prompt")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "tab-compare"


@pytest.mark.parametrize("order", ["sequence", "together"])
def test_side_by_side_is_identical(
    server: Server, open_page: Callable[..., Any], bias: dict[str, float], order: str
) -> None:
    page = open_page()
    page.click("#tab-compare")
    page.fill("#compare-prompt", LOOP)
    page.select_option("#compare-order", order)
    page.click("#compare-run")
    verdict = page.locator("#verdict")
    sync_api.expect(verdict).to_be_visible()
    expected = answers(server, LOOP, bias)
    assert f"Identical: the same {len(expected)} tokens" in verdict.inner_text()
    texts = [text for text, _ in expected if text]
    assert tokens(page, "#plain-text") == tokens(page, "#drafted-text") == texts
    assert "no drafts" in page.locator("#plain-numbers").inner_text()
    assert page.locator("#plain-text .t:not(.target)").count() == 0
    assert page.locator("#drafted-text .t:not(.target)").count() > 0


def test_green_is_for_what_is_clearly_faster(open_page: Callable[..., Any]) -> None:
    page = open_page()

    def verdict(plain: float | None, drafted: float | None, verified: int) -> list[str]:
        code = f"""import("/playground/compare.js").then((all) => all.speeds(
            {{pace: {json.dumps(plain)}}},
            {{pace: {json.dumps(drafted)}, verified: {verified}}},
        ))"""
        return page.evaluate(code)

    for plain, drafted, verified, kind, words in (
        (100, 143, 30, "faster", "1.43 times as fast in this one pair of runs (100 and 143 tok/s)"),
        (100, 91, 30, "slower", "0.91 times as fast in this one pair"),
        (100, 104, 30, "same", "About the same speed (100 and 104 tok/s)"),
        (100, 96, 30, "same", "About the same speed"),
        (100, 143, 0, "same", "No drafts verified"),
        (None, 100, 3, "same", "Too short"),
    ):
        found = verdict(plain, drafted, verified)
        assert found[0] == kind and words in found[1], found

    colour = "getComputedStyle(document.getElementById('verdict')).color"
    colours = set()
    for kind in ("faster", "same", "slower"):
        page.evaluate(f"document.getElementById('verdict').className = 'verdict {kind}'")
        colours.add(page.evaluate(colour))
        if kind == "same":
            quiet = "getComputedStyle(document.getElementById('keys')).color"
            assert page.evaluate(colour) == page.evaluate(quiet)
    assert len(colours) == 3


@pytest.mark.parametrize("change", [{"temperature": 1, "seed": 8}, {"max_tokens": 5}])
def test_side_by_side_is_loud_about_a_difference(
    open_page: Callable[..., Any], change: dict[str, Any]
) -> None:
    page = open_page()

    def other(route: Any) -> None:
        body = route.request.post_data_json
        if body["speculation"]["method"] != "off":
            body |= change
        route.continue_(post_data=json.dumps(body))

    page.route(CHAT, other)
    page.click("#tab-compare")
    page.fill("#compare-prompt", LOOP)
    page.click("#compare-run")
    sync_api.expect(page.locator("#verdict.different")).to_contain_text("differ from token")
    assert page.locator(".differs").count() == 2 and page.locator(".after").count() > 2
    if "max_tokens" in change:
        assert "from token 6 on" in page.locator("#verdict").inner_text()
        assert tokens(page, "#drafted-text")[-1] == "ends here"


def test_thoughts_and_calls_are_shown(open_page: Callable[..., Any]) -> None:
    """As the API tells them: beside what was written, in chunks of their own."""
    page = open_page()
    tokens = ["<think>", "hm", "m</think>", "Yes", "<tool_call>…"]
    deltas = [
        [],
        [{"reasoning_content": "hm"}],
        [{"reasoning_content": "m"}],
        [{"content": "Yes"}],
        [
            {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "now"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"utc"'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        ],
    ]
    chunks, offset = [], 0
    for token, told in zip(tokens, deltas, strict=True):
        about = {"proposed_by": [None], "draft_positions": [None], "text_offset": [offset]}
        about["pieces"] = [[token, None]]
        offset += len(token)
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in told or [{}]]
        choices[-1]["surefoot"] = about
        chunks += [{"choices": [choice]} for choice in choices]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(status=200, body=body))
    ask(page, LOOP)
    assert shown(page, ".message.assistant .text") == "".join(tokens)
    thought = page.locator(".message.assistant .t.thought").all_text_contents()
    assert thought == ["<think>", "hm", "m</think>"]
    assert shown(page, ".message.assistant .calls") == 'now({"utc": 1})'
    # What was thought is not sent back.
    with page.expect_request(CHAT) as sent:
        ask(page, "and then")
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Yes"}


def test_the_graph_has_the_last_rounds_means(open_page: Callable[..., Any]) -> None:
    """However close its points are; of those within 50 ms the last one is kept."""
    page = open_page()
    means = page.evaluate(
        """import("/playground/graph.js").then(({ Graph }) => {
            const graph = new Graph();
            for (let at = 1; at <= 40; at++) {
                graph.add(10 * at, { rounds: at, accepted: at > 20 ? 3 * (at - 20) : 0 });
            }
            return graph.means;
        })"""
    )
    found = dict(means)
    assert list(found) == list(range(40, 401, 40))
    assert [found[at] for at in (40, 200, 240, 280, 400)] == [0, 0, 1.5, 3, 3]


@contextmanager
def answering(page: Any, status: int, error: dict[str, Any], **headers: str) -> Iterator[None]:
    body = json.dumps({"error": error})
    page.route(CHAT, lambda route: route.fulfill(status=status, body=body, headers=headers))
    yield
    page.unroute(CHAT)


def test_errors_are_readable_and_can_be_tried_again(open_page: Callable[..., Any]) -> None:
    page = open_page()
    problem = page.locator("#problem")
    busy = {"message": "the queue is full, try again in 3 s", "param": None, "code": "overloaded"}
    with answering(page, 429, busy, **{"Retry-After": "3"}):
        ask(page, LOOP)
    assert "The server is busy" in problem.inner_text() and "3 s" in problem.inner_text()
    assert shown(page, ".message.user .end") == "not answered"
    died = {"message": "the engine has died: x", "param": None, "code": "engine_died"}
    with answering(page, 503, died, **{"Retry-After": "10"}):
        problem.get_by_role("button", name="Try again").click()
        sync_api.expect(problem).to_contain_text("The engine is not available")
    wrong = {"message": "top_p: 2 is out of range", "param": "top_p", "code": "invalid_value"}
    with answering(page, 400, wrong):
        problem.get_by_role("button", name="Try again").click()
        sync_api.expect(problem).to_contain_text("top_p: 2 is out of range")
    assert page.locator("#top_p").get_attribute("aria-invalid") == "true"
    page.route(CHAT, lambda route: route.abort())
    problem.get_by_role("button", name="Try again").click()
    sync_api.expect(problem).to_contain_text("The server cannot be reached")
    page.unroute(CHAT)
    cut = 'data: {"choices":[{"index":0,"delta":{"content":"hal"},"finish_reason":null,"surefoot":'
    cut += '{"proposed_by":[null],"draft_positions":[null],"text_offset":[0],'
    cut += '"pieces":[["hal",null]]}}]}\n\n'
    page.route(CHAT, lambda route: route.fulfill(status=200, body=cut))
    problem.get_by_role("button", name="Try again").click()
    sync_api.expect(problem).to_contain_text("The connection broke")
    assert shown(page, ".message.assistant .text") == "hal"
    page.unroute(CHAT)
    assert page.locator(".message").count() == 2
    ask(page, LOOP)
    sync_api.expect(problem).to_be_hidden()


def test_a_key_is_asked_for(open_page: Callable[..., Any]) -> None:
    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            return route.continue_()
        error = {"message": "the API key is missing or wrong", "param": None}
        route.fulfill(status=401, body=json.dumps({"error": error}))

    def guarded(page: Any) -> None:
        for path in ("**/v1/**", "**/metrics"):
            page.route(path, guard)

    page = open_page(prepare=guarded)
    problem = page.locator("#problem")
    sync_api.expect(problem).to_contain_text("asks for an API key")
    assert page.evaluate("document.activeElement.id") == "api-key"
    page.fill("#api-key", "wrong")
    page.keyboard.press("Enter")
    sync_api.expect(problem).to_contain_text("asks for an API key")
    page.fill("#api-key", "secret")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#model")).not_to_be_empty()
    sync_api.expect(problem).to_be_hidden()
    page.fill("#max_tokens", "5")
    ask(page, "a")
    # The random model may end its text earlier.
    assert " token" in shown(page, ".message.assistant .numbers")


def test_a_phone(open_page: Callable[..., Any]) -> None:
    page = open_page(width=360, color_scheme="dark", has_touch=True)
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == 360
    ask(page, "x" * 100)
    assert page.evaluate(wide) == 360
    sync_api.expect(page.locator("#settings")).to_be_hidden()
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#temperature")).to_be_visible()
    assert page.evaluate("document.getElementById('settings').scrollWidth") == 360
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#settings")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.click("#tab-compare")
    page.click("#compare-run")
    sync_api.expect(page.locator("#verdict")).to_be_visible()
    assert page.evaluate(wide) == 360


def test_settings_and_colours_are_kept(open_page: Callable[..., Any]) -> None:
    page = open_page(color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.click("#theme")
    light = page.evaluate(colour)
    assert dark != light
    page.fill("#system", "Be brief.")
    page.select_option("#method", "ngram")
    page.uncheck("#colours")
    page.reload()
    sync_api.expect(page.locator("#model")).not_to_be_empty()
    assert page.evaluate(colour) == light
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("#method") == "ngram"
    page.fill("#max_tokens", "5")
    with page.expect_request(CHAT) as sent:
        ask(page, "a")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["speculation"] == {"method": "ngram"} and body["max_tokens"] == 5
    page.fill("#temperature", "-1")
    page.fill("#prompt", "b")
    page.press("#prompt", "Enter")
    assert page.input_value("#prompt") == "b", "sent with a setting that is no valid number"
