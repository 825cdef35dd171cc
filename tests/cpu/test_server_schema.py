"""Generated requests after the OpenAPI document: whatever comes, the server answers in order."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from server_harness import Server, emoji_model, running_server
from server_scripted import uncounted
from surefoot.errors import SurefootError
from surefoot.params import RANGES
from surefoot.server.app import create_app
from surefoot.server.field_notes import DESCRIPTIONS
from surefoot.server.schema import CompletionRequest

EXAMPLES = 14
READ_ONLY = ("index", "budget_tokens")
"""Numbers that clients send and nothing depends on."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = emoji_model(tmp_path_factory.mktemp("model"))
    with running_server(model, backend="auto", max_model_len=48) as running:
        yield running
        running.wait_idle()
        assert (
            running.complete(prompt="a", max_tokens=2, ignore_eos=True)["usage"][
                "completion_tokens"
            ]
            == 2
        )
        assert running.stop() == 0


def test_no_request_breaks_the_server(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    results: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in results]
    documented = server.get("/openapi.json").json()["paths"]
    assert len(operations) == sum(map(len, documented.values())) >= 10
    statuses: Counter[int] = Counter()
    every_check: list[Any] = list(HealthCheck)
    for operation in operations:
        # Both what the document allows and what it does not.
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue
            check = given(case=operation.as_strategy(generation_mode=mode))(answer_in_order)
            count = EXAMPLES if operation.method == "post" else 3
            settings(
                max_examples=count,
                derandomize=True,
                database=None,
                suppress_health_check=every_check,
            )(check)(statuses=statuses)
    assert statuses[200] >= 10 and statuses[400] >= 20, statuses


def answer_in_order(case: Any, statuses: Counter[int]) -> None:
    """As the document says: no status from 500 on, none that it does not name, nothing accepted
    that it does not allow. (It cannot say which of its fields do not go together.) Errors are as
    OpenAI's clients, or Anthropic's, read them."""
    response = case.call(timeout=60)
    statuses[response.status_code] += 1
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    if response.status_code >= 400:
        anthropic = case.operation.path.startswith("/v1/messages")
        rest = set() if anthropic else {"param", "code"}
        assert set(response.json()["error"]) == {"message", "type"} | rest


def test_what_can_be_got_can_be_asked_about(server: Server) -> None:
    document = server.get("/openapi.json").json()
    paths = [path for path, found in document["paths"].items() if "get" in found]
    assert "/metrics" in paths
    for path in (*paths, "/", "/openapi.json"):
        url = server.url + path.replace("{model}", "llama-0")
        head = httpx.head(url)
        assert head.status_code == 200 and not head.content, path
        assert head.headers["content-type"] == httpx.get(url).headers["content-type"]


def test_every_field_is_described_with_its_range(server: Server) -> None:
    document = server.get("/openapi.json").json()
    page = server.get("/docs").text
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            text = about.get("description", "")
            assert text, f"{name}.{field}: write a docstring for it, or see field_notes"
            members = [*about.get("anyOf", ()), about]
            numbers = [m for m in members if m.get("type") in ("integer", "number")]
            for member in numbers if field not in READ_ONLY else ():
                assert {"minimum", "exclusiveMinimum"} & member.keys(), f"{name}.{field}"
                assert "maximum" in member, f"{name}.{field}"
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["temperature"]["default"] == 1.0 and fields["top_p"]["default"] == 1.0
    assert "number above 0 to 1" in page and html.escape(DESCRIPTIONS["top_p"]) in page


def test_what_cannot_be_answered_is_not_counted(server: Server) -> None:
    wrong: list[dict[str, Any]] = [{"temperature": -1}, {"speculation": {"max_draft_tokens": -1}}]
    for fields in ({}, *wrong):
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        answer = server.post("/v1/messages/count_tokens", **body)
        assert answer.status_code == (400 if fields else 200), answer.text


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_that_are_checked(name: str) -> None:
    """What the document allows at its borders is taken, and what is beyond them refused."""
    fields = CompletionRequest.model_json_schema()["properties"]
    [about] = [m for m in fields[name]["anyOf"] if m["type"] in ("integer", "number")]
    low = about.get("minimum", about.get("exclusiveMinimum"))
    step = 1 if about["type"] == "integer" else 0.01
    inside = [about["maximum"], low + step if "exclusiveMinimum" in about else low]
    for value in inside:
        CompletionRequest(prompt="a", **{name: value}).sampling({}, 99, as_sampling(name, value))
    for value in (about["maximum"] + step, low if "exclusiveMinimum" in about else low - step):
        with pytest.raises(SurefootError, match=name):
            CompletionRequest(prompt="a", **{name: value}).sampling(
                {}, 99, as_sampling(name, value)
            )


def as_sampling(name: str, value: Any) -> dict[str, Any]:
    """``logprobs`` is given to sampling apart, as chats have another field for it."""
    return {"logprobs": value} if name == "logprobs" else {}


def test_the_model_s_defaults_are_documented() -> None:
    service = uncounted()
    recommended = {"temperature": 0.6, "max_tokens": 99}
    service.front.ready = SimpleNamespace(sampling_defaults=recommended)
    schemas = create_app(service).openapi()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        assert schemas[name]["properties"]["temperature"]["default"] == 0.6
        assert schemas[name]["properties"]["max_tokens"].get("default") is None
