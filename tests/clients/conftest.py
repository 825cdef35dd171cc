"""Clients in an environment of their own, as they want other versions than the tests do: run by
``make test-clients``, and nothing to see elsewhere."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = {
    "test_guidellm.py": "guidellm",
    "test_litellm.py": "litellm",
    "test_lm_eval.py": "lm_eval",
}
# Nothing is asked of the network: prices, models, data sets.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
sys.path.append(str(HERE.parent / "cpu"))

from server_harness import Server, emoji_model, running_server  # noqa: E402

collect_ignore = [
    file for file, package in PACKAGES.items() if importlib.util.find_spec(package) is None
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Schemas in prompts are long where a character is a token.
    return emoji_model(tmp_path_factory.mktemp("model"), max_positions=2048)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with running_server(model) as running:
        yield running
