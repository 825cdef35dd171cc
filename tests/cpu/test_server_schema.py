"""Generated requests after the OpenAPI document: whatever comes, the server answers in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from server_harness import Server, emoji_model, running_server

EXAMPLES = 14


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = emoji_model(tmp_path_factory.mktemp("model"))
    with running_server(model, max_model_len=48) as running:
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
    assert len(operations) == 14
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
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=every_check,
            )(check)(statuses=statuses)
    assert statuses[200] >= 10 and statuses[400] >= 20, statuses


def answer_in_order(case: Any, statuses: Counter[int]) -> None:
    """No status from 500 on, and errors as OpenAI's clients, or Anthropic's, read them."""
    response = case.call(timeout=60)
    statuses[response.status_code] += 1
    case.validate_response(response, checks=(not_a_server_error,))
    if response.status_code >= 400:
        anthropic = case.operation.path.startswith("/v1/messages")
        rest = set() if anthropic else {"param", "code"}
        assert set(response.json()["error"]) == {"message", "type"} | rest
