"""Which of several stop strings ends a text."""

from __future__ import annotations

import pytest
import tokenizers

from surefoot.engine.output import TextStream
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.request import Request, SamplingParams, SpeculationParams
from tiny_models import tiny_tokenizer_json


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("stops", "winner"),
    [(("at", "cat"), "cat"), (("ca", "cat"), "cat"), (("cat", "ca"), "cat"), (("t", "ca"), "ca")],
)
def test_of_stop_strings_in_one_token_the_first_and_of_these_the_longest(
    stops: tuple[str, ...], winner: str, kept: bool
) -> None:
    """The token brings them all at once: whichever is named first."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tiny_tokenizer_json()))
    # A token of several letters, and stop strings in it as they would be in "cat".
    token, piece = next(
        (token, text)
        for token in range(3, tokenizer.vocab_size)
        if len(text := tokenizer.decode([token])) == 3 and len(set(text)) == 3
    )
    letters = dict(zip("cat", piece, strict=True))
    named = ["".join(letters[letter] for letter in stop) for stop in stops]
    won = "".join(letters[letter] for letter in winner)
    params = SamplingParams(stop=named, include_stop_str_in_output=kept)
    before = tokenizer.encode("1234")
    request = Request("r", (5,), params, SpeculationParams(), 0, 99, output=[*before, token])
    stream = TextStream(request, tokenizer)
    stream.push(request.output, last=False)
    assert stream.stopped_by == won
    assert stream.text == "1234" + piece[: piece.index(won) + kept * len(won)]
