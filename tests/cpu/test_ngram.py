"""The ngram lookup against a loop over the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import needs_native, tiny_decoder
from surefoot.errors import SurefootError
from surefoot.speculation.proposer import read_options
from surefoot.speculation.proposers.ngram import NgramProposer
from surefoot.speculation.state import SlotState

DRAFTS = 5
BACKEND = "torch"


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the compiled lookup and on plain torch."""
    monkeypatch.setattr("test_ngram.BACKEND", request.param)


def offers(texts: list[list[int]], **options: Any) -> list[list[int]]:
    state = SlotState(len(texts) + 1, 60, DRAFTS, 4, 99, torch.device("cpu"))
    state.history.fill_(1)
    for slot, text in enumerate(texts):
        state.history[slot, : len(text)] = torch.tensor(text)
        state.length[slot] = len(text)
    proposer = NgramProposer(read_options(NgramProposer, options), state)
    proposer.load(tiny_decoder(BACKEND))
    drafts = proposer.propose(torch.arange(len(texts)))
    lengths = drafts.lengths.tolist()
    return [row[:size] for row, size in zip(drafts.tokens.tolist(), lengths, strict=True)]


def by_loop(text: list[int], min_ngram: int, max_ngram: int, window: int) -> list[int]:
    text = text[-window:]
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                longer = list(text)
                for step in range(DRAFTS):
                    longer.append(longer[start + size + step])
                return longer[len(text) :]
    return []


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(2, 50),
)
def test_lookup_equals_a_loop(texts: Any, low: int, more: int, window: int) -> None:
    high = low + more
    expected = [by_loop(text, low, high, window) for text in texts]
    assert offers(texts, min_ngram=low, max_ngram=high, window=window) == expected


def test_the_longest_match_wins_over_a_later_one() -> None:
    text = [1, 2, 3, 7, 7, 7, 9, 2, 3, 8, 8, 8, 1, 2, 3]
    assert offers([text], min_ngram=2, max_ngram=3)[0][:3] == [7, 7, 7]


def test_among_equal_matches_the_latest_wins() -> None:
    text = [2, 3, 7, 7, 7, 2, 3, 8, 8, 8, 2, 3]
    assert offers([text], min_ngram=2, max_ngram=2)[0][:3] == [8, 8, 8]


def test_a_loop_is_offered_at_full_length() -> None:
    assert offers([[5, 1, 2, 1, 2, 1]], min_ngram=2, max_ngram=5)[0] == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"min_ngram": 4, "max_ngram": 3}, {"n": 1}])
def test_bad_options_are_refused_by_name(options: Any) -> None:
    with pytest.raises(SurefootError, match=r"ngram\."):
        read_options(NgramProposer, options)
