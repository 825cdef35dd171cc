"""Stop strings in a growing text: which one ends it, where, and what waits until that is known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from surefoot.engine.output import TextStream
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.request import Request, SamplingParams, SpeculationParams
from tiny_models import tiny_tokenizer_json


class Words:
    """A detokenizer of one piece of text per token."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return ""


def stream(pieces: list[str], **params: Any) -> TextStream:
    request = Request("r", (1,), SamplingParams(**params), SpeculationParams(), 0, 99)
    made = TextStream(request, Tokenizer(Backend.from_str(tiny_tokenizer_json())))
    made._detokenizer = Words(pieces)  # type: ignore[assignment]
    request.output += range(len(pieces))
    return made


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "by"),
    [
        # Both in one token: the earlier one, whichever is asked for first or is longer.
        (["a cat, a dog"], ["dog", "cat"], "a ", "cat"),
        (["a cat, a dog"], ["cat", "dog"], "a ", "cat"),
        (["a cat, a hound"], ["hound", "cat"], "a ", "cat"),
        # At one place the longer one.
        (["so cats"], ["cat", "cats"], "so ", "cats"),
        # One that began earlier and ends in the new token.
        (["a ca", "t dog"], ["dog", "cat"], "a ", "cat"),
        (["one", " two"], ["three"], "one two", None),
    ],
)
def test_the_earliest_stop_string_ends_a_text(
    pieces: list[str], stop: list[str], text: str, by: str | None, keep: bool
) -> None:
    made = stream(pieces, stop=stop, include_stop_str_in_output=keep)
    made.push(range(len(pieces)), last=True)
    assert made.stopped_by == by
    assert made.text == (text + by if keep and by else text)


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        # Tails that may begin one of them: the longest waits.
        ("x abcd", ["cdZ", "abcdY"], "x "),
        ("x abcd", ["dZ", "cdZ", "zz"], "x ab"),
        ("x abcd", ["zz", "yy"], "x abcd"),
        ("x abab", ["abc", "babZ"], "x a"),
        # Not the whole stop string, which would have ended the text, nor more than there is.
        ("ab", ["abc", "abcd"], ""),
    ],
)
def test_what_may_begin_any_stop_string_waits(
    text: str, stop: list[str], shown: str, turn: int
) -> None:
    made = stream([text, "!"], stop=stop[::turn])
    made.push([0], last=False)
    assert "".join(piece for piece, _ in made.take(final=False)) == shown
    made.push([1], last=False)
    assert "".join(piece for piece, _ in made.take(final=False)) == text[len(shown) :] + "!"


def test_as_much_waits_as_may_begin_a_stop_string() -> None:
    draw = random.Random(0)
    for _ in range(300):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(3)]
        pieces = ["".join(draw.choices("abc", k=draw.randint(0, 3))) for _ in range(12)]
        made, shown = stream(pieces, stop=stops), ""
        for token in range(len(pieces)):
            made.push([token], last=False)
            shown += "".join(piece for piece, _ in made.take(final=False))
            tails = [made.text[at:] for at in range(len(made.text))]
            begins = [
                tail
                for tail in tails
                if any(stop.startswith(tail) and stop != tail for stop in stops)
            ]
            if made.stopped_by is None:
                assert shown + max(begins, key=len, default="") == made.text


def test_no_more_is_taken_than_was_asked_for() -> None:
    pieces = ["one", " two", "", " three", " four"]
    made = stream(pieces, stop=["fours"])
    made.push(range(5), last=False)
    taken = ["".join(text for text, _ in made.take(False, last)) for last in (1, 1, 3, 5)]
    assert taken == ["one", "", " two", " three "]
    assert [text for text, _ in made.take(True, 5)] == ["four"]
