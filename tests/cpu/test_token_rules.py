"""``bad_words`` and ``allowed_token_ids``: masks by brute force, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import VOCAB, Job, run_jobs, tiny_decoder
from structured_harness import ENDS, check_rules, grammars, structured_engine, word
from surefoot.errors import SurefootError
from surefoot.request import FinishReason, SamplingParams
from surefoot.sampling.token_rules import RuledText, TokenRules, follow, word_tokens

tokens = st.integers(2, 6)
sequences = st.lists(tokens, min_size=1, max_size=4)


def allowed_in(bits: np.ndarray) -> list[set[int]]:
    flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in flags]


@settings(max_examples=60)
@given(
    words=st.lists(sequences, max_size=5),
    allowed=st.none() | st.sets(tokens, min_size=1),
    output=st.lists(tokens, max_size=8),
    drafts=st.lists(tokens, max_size=4),
)
def test_masks_are_those_of_brute_force(
    words: list[list[int]], allowed: set[int] | None, output: list[int], drafts: list[int]
) -> None:
    text = RuledText(
        TokenRules(VOCAB, None if allowed is None else sorted(allowed), words), None, ENDS
    )
    text.sync(output)

    def fit(before: list[int]) -> set[int]:
        rest = set(range(VOCAB)) if allowed is None else set(allowed)
        return {t for t in rest if all([*before, t][-len(bad) :] != bad for bad in words)}

    bits = np.full((len(drafts) + 1, -(-VOCAB // 32)), 0x5A5A5A5A, dtype=np.int32)
    text.write_masks(drafts, bits)
    assert allowed_in(bits) == [fit([*output, *drafts[:n]]) for n in range(len(drafts) + 1)]
    wrong = [n for n, token in enumerate(drafts) if token not in fit([*output, *drafts[:n]])]
    assert text.allowed_prefix(drafts) == (wrong[0] if wrong else len(drafts))


def test_texts_of_drafts_keep_to_the_rules() -> None:
    """Right drafts are accepted and wrong ones cut, in the text that plain decoding gives."""
    base: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    ruled: list[dict[str, Any]] = [
        {"allowed_token_ids": [5, 6, 7], "bad_words": [word(5, 6), word(7)]},
        {"bad_words": [word(n, n) for n in range(2, VOCAB)], "temperature": 0},
        {"allowed_token_ids": [5, 6, 0], "ignore_eos": False, "min_tokens": 10},
    ]
    jobs = [Job((3, 4), SamplingParams(**{**base, **more, "seed": 7})) for more in ruled]
    plain = run_jobs(structured_engine(tiny_decoder(), max_draft_tokens=0), jobs)
    texts = {"texts": tuple((*request.prompt, *request.output) for request in plain)}
    engine = structured_engine(
        tiny_decoder(),
        proposers=("meddler",),
        proposer_options={"meddler": texts},
        draft_policy="fixed",
    )
    requests = run_jobs(engine, jobs)
    for want, got in zip(plain, requests, strict=True):
        assert got.output == want.output
        check_rules(got)
    every = [request.stats for request in requests]
    assert all(stats.accepted for stats in every)
    assert sum(s.accepted for s in every) < sum(s.verified for s in every)
    assert sum(s.verified for s in every) < sum(s.offered for s in every)
    assert len(plain[2].output) >= 10 and set(plain[2].output) <= {5, 6, 0}


def test_a_grammar_that_rules_leave_nothing_of_ends_its_text() -> None:
    params = SamplingParams.from_dict(
        {
            "structured_outputs": {"choice": ["abc1"]},
            "bad_words": [word(4)],
            "allowed_token_ids": [2, 3],
        }
    )
    [request] = run_jobs(structured_engine(tiny_decoder()), [Job((3,), params)])
    assert request.finish_reason is FinishReason.ABORT
    assert "no token that fits" in str(request.stop_reason)
    assert request.output[-1] in ENDS and set(request.output[:-1]) <= {2, 3}


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"bad_words": "text"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["x" * 9000]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words": [word(5)]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "bad_words": [word(5, 6), word(6, 5)]}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [0, 5], "stop_token_ids": [5], "min_tokens": 1},
            "allowed_token_ids",
        ),
    ],
)
def test_what_would_leave_no_token_is_refused(values: dict[str, Any], option: str) -> None:
    engine = structured_engine(tiny_decoder())
    with pytest.raises(SurefootError) as caught:
        engine.make_request("r", (3,), SamplingParams(**values))
    assert caught.value.option == option


def test_words_are_ruled_out_behind_a_space_too() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    tokenizer: Any = Letters()
    found = ["".join(map(chr, ids)) for ids in word_tokens(tokenizer, ["cat", " dog", "\n"])]
    assert found == ["cat", " cat", "dog", " dog", "\n"]


def test_choices_share_their_rules() -> None:
    params = SamplingParams(bad_words=[word(5)])
    first = follow(params, grammars(), VOCAB, ENDS)
    second = follow(params, None, VOCAB, ENDS, first)
    assert isinstance(first, RuledText) and isinstance(second, RuledText)
    assert second is not first and second.rules is first.rules
