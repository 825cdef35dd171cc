"""Grammars of answers with calls of tools: whatever they allow is read as calls that fit."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import IncrementalDetokenizer, Tokenizer
from surefoot.sampling.grammar import Grammars
from surefoot.server.answer_events import Answer
from surefoot.server.chat_style import ChatPrompt, ChatStyle
from surefoot.server.tool_choice import CallGrammar
from surefoot.structured import StructuredOutputsParams
from tiny_models import tiny_tokenizer_json

END = 2
COLOUR = {
    "type": "object",
    "properties": {"c": {"enum": ["r", "g"]}},
    "required": ["c"],
    "additionalProperties": False,
}
TOOLS: list[tuple[str, dict[str, Any] | None]] = [("paint", COLOUR), ("wait", None)]
SCHEMAS = {"paint": COLOUR, "wait": {"type": "object"}}
MARKERS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[THINK]", "[/THINK]"]
# What the templates of some models have in them.
TEMPLATES = {
    "hermes": "{{ tools }}<tool_call></think>{{ '<think>' }}",
    "llama": '{{ tools }}{"name": function name, "parameters": dictionary of them}',
    "mistral": "{{ tools }}[TOOL_CALLS] [{",
    "mistral 13": "{{ tools }}[TOOL_CALLS][ARGS][/THINK]",
    "mistral 11": "{{ tools }}[TOOL_CALLS][CALL_ID][ARGS]",
    "json": "{{ tools }}",
}


@functools.cache
def tokenizer(special: bool) -> Tokenizer:
    """With the markers as special tokens, or not."""
    backend = Backend.from_str(tiny_tokenizer_json())
    if special:
        backend.add_special_tokens(MARKERS)
    return Tokenizer(backend)


@functools.cache
def grammars(special: bool) -> Grammars:
    return Grammars(tokenizer(special), tokenizer(special).vocab_size, (END,))


@functools.cache
def style(template: str, special: bool) -> ChatStyle:
    return ChatStyle.of(TEMPLATES[template], tokenizer(special))


@functools.cache
def call_grammar(template: str, special: bool, many: bool, forced: bool) -> StructuredOutputsParams:
    written = style(template, special)
    assert written.tools is not None
    made = CallGrammar(written.tools, written.special, TOOLS, many)
    return made.required() if forced else made.free()


def ids(text: str, special: bool, spelled: bool = False) -> list[int]:
    """Of a text, with its markers as special tokens, if there are any, or ``spelled``."""
    encode = tokenizer(special).encode
    return [i for letter in text for i in encode(letter)] if spelled else encode(text)


def answer(template: str, special: bool, tokens: list[int], inside: bool = False) -> Answer:
    written = style(template, special)
    text = IncrementalDetokenizer(tokenizer(special), True, frozenset(written.special.values()))
    parser = written.parser(list(SCHEMAS), inside)
    events = [event for token in tokens for event in parser.feed(text.push(token), final=False)]
    return Answer.of([*events, *parser.feed(text.flush(), final=True)])


def allows(wanted: StructuredOutputsParams, special: bool, tokens: list[int]) -> bool:
    return grammars(special).start(wanted).allowed_prefix([*tokens, END]) == len(tokens) + 1


RED, GREEN, BLUE = (f'{{"c": "{letter}"}}' for letter in "rgb")
ONE = {
    "hermes": '<tool_call>\n{"name": "paint", "arguments": %s}\n</tool_call>',
    "llama": '{"name": "paint", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "paint", "arguments": %s}]',
    "mistral 13": "[TOOL_CALLS]paint[ARGS]%s",
    "mistral 11": "[TOOL_CALLS]paint[CALL_ID]abcDEF123[ARGS]%s",
    "json": '{"name": "paint", "arguments": %s}',
}
TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "llama": ONE["llama"] + "; " + ONE["llama"],
    "mistral": ONE["mistral"][:-1] + ', {"name": "paint", "arguments": %s}]',
    "mistral 13": ONE["mistral 13"] * 2,
    "mistral 11": ONE["mistral 11"] * 2,
    "json": f"[{ONE['json']}, {ONE['json']}]",
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_as_templates_write_them(template: str, special: bool) -> None:
    for many in (False, True):
        forced = call_grammar(template, special, many, True)
        free = call_grammar(template, special, many, False)
        one, wrong = ids(ONE[template] % RED, special), ids(ONE[template] % BLUE, special)
        two = ids(TWO[template] % (RED, GREEN), special)
        for wanted in (forced, free):
            assert allows(wanted, special, one) and not allows(wanted, special, wrong)
            assert allows(wanted, special, two) == many
        assert not allows(forced, special, ids("Hi", special))
        assert allows(free, special, ids("Hi", special)) and allows(free, special, [])
    calls = answer(template, special, two).calls
    assert [(call.name, call.arguments) for call in calls] == [("paint", RED), ("paint", GREEN)]
    assert all(len(call.id) == 9 for call in calls) == template.startswith("mistral")


def test_reasoning_may_come_first() -> None:
    for template, special in (("hermes", False), ("mistral 13", False), ("mistral 13", True)):
        written = style(template, special)
        assert written.reasoning is not None
        opening, closing = written.reasoning.opening, written.reasoning.closing
        one, wrong = ONE[template] % RED, ONE[template] % BLUE
        for forced in (True, False):
            wanted = call_grammar(template, special, True, forced)
            may = written.behind_reasoning(wanted, ChatPrompt([], False, True))
            must = written.behind_reasoning(wanted, ChatPrompt([], True, True))
            closed = written.behind_reasoning(wanted, ChatPrompt([], False, False))
            assert may is not None and must is not None and closed == wanted
            for begun, thinking in ((opening, may), ("", must)):
                text = f"{begun}no {one[:8]}{closing}\n\n"
                if thinking is must or forced:
                    assert allows(thinking, special, ids(text + one, special))
                assert not allows(thinking, special, ids(text + wrong, special))
                if forced:
                    assert not allows(thinking, special, ids(begun + "hm", special))
            tokens = ids(f"hm{closing}\n\n{one}", special)
            assert allows(may, special, [*ids(opening, special), *tokens])
            assert allows(may, special, ids(one, special))
            assert not allows(must, special, ids(one, special))
            read = answer(template, special, tokens, inside=True)
            assert (read.reasoning, read.content, len(read.calls)) == ("hm", "", 1)


PIECES = ["Hi", " ", "\n", "{", "[", "; ", ", ", "]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
PIECES += ["<|python_tag|>", "paint", "[ARGS]", BLUE, RED, '{"name": "paint", "arguments": ']


@example("mistral", False, True, [(2, False), (4, False)])
@example("mistral 13", True, True, [(2, False), (", ", False), (4, False)])
@example("llama", False, True, [(3, False), ("; ", False), (5, False)])
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    special=st.booleans(),
    many=st.booleans(),
    pieces=st.lists(
        st.tuples(st.sampled_from([*PIECES, *range(1, 6)]), st.booleans()), min_size=1, max_size=6
    ),
)
@settings(max_examples=400)
def test_what_is_allowed_is_read_as_calls_that_fit(
    template: str, special: bool, many: bool, pieces: Any
) -> None:
    whole = {1: ONE[template] % BLUE, 2: ONE[template] % RED, 3: "<|python_tag|>" + ONE["llama"]}
    whole |= {4: ONE["json"] % BLUE, 5: ONE["llama"] % BLUE}
    tokens = []
    for piece, spelled in pieces:
        text = whole[piece] if isinstance(piece, int) else piece
        tokens += ids(text % RED if "%s" in text else text, special, spelled)
    wanted = call_grammar(template, special, many, False)
    # The longest beginning that may be all of an answer.
    state = grammars(special).start(wanted)
    tokens = tokens[: state.allowed_prefix(tokens)]
    while not allows(wanted, special, tokens):
        tokens.pop()
    read = answer(template, special, tokens)
    assert many or len(read.calls) <= 1
    for call in read.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    state = grammars(special).start(call_grammar(template, special, many, True))
    state.sync(tokens)
    if state.accepting:
        assert read.calls and not read.content


@pytest.mark.parametrize(("template", "special"), [("hermes", False), ("mistral 11", True)])
def test_masks_behind_drafts_are_those_of_the_text(template: str, special: bool) -> None:
    """Also where a draft ends a lazy part of the grammar, which has to be taken back."""
    written, size = style(template, special), -(-tokenizer(special).vocab_size // 32)
    made = call_grammar(template, special, True, False)
    for wanted in (made, written.behind_reasoning(made, ChatPrompt([], True, True))):
        assert wanted is not None
        thought = "" if wanted is made or written.reasoning is None else written.reasoning.closing
        tokens = ids(f"hm{thought} {ONE[template] % RED}\nSo", special)
        state = grammars(special).start(wanted)
        masks, bits = np.zeros((len(tokens) + 1, size), np.int32), np.zeros((1, size), np.int32)
        for known in (0, 3):
            state.sync(tokens[:known])
            assert state.allowed_prefix(tokens[known:]) == len(tokens) - known
            state.write_masks(tokens[known:], masks[known:])
            for row in range(known, len(tokens) + 1):
                fresh = grammars(special).start(wanted)
                fresh.sync(tokens[:row])
                fresh.write_masks([], bits)
                assert (masks[row] == bits[0]).all(), tokenizer(special).decode(tokens[:row])


@pytest.mark.parametrize("wrong", [["<think>"], "ab", ["", ""], [1, "x"], 5])
def test_markers_of_reasoning_are_two(wrong: Any) -> None:
    with pytest.raises(SurefootError, match="reasoning"):
        StructuredOutputsParams(regex="a", reasoning=wrong)


def test_every_kind_of_structure_goes_behind_reasoning() -> None:
    for kind, text in (
        ({"json": {"type": "object"}}, "{}"),
        ({"json_object": True}, "{}"),
        ({"regex": "a+"}, "aa"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"grammar": 'start: "x" start "y" | "z"\n'}, "xzy"),
        ({"grammar": 'root ::= "x" root | "y"\n'}, "xxy"),
    ):
        for special, first, last in ((False, "<think>", "</think>"), (True, "[THINK]", "[/THINK]")):
            wanted = StructuredOutputsParams.of({**kind, "reasoning": [first, last]})
            assert wanted is not None
            assert allows(wanted, special, ids(text, special))
            assert allows(wanted, special, ids(f"{first}hm\n{last}\n\n{text}", special))
            assert not allows(wanted, special, ids(f"{first}hm{last}!", special))
            # Without a bound, small models fill their texts with white space.
            assert not allows(wanted, special, ids(f"\n\n\n{first}hm{last}{text}", special))
            wanted = StructuredOutputsParams.of({**kind, "reasoning": ["", last]})
            assert wanted is not None
            assert allows(wanted, special, ids(f"hm{last}{text}", special))
            assert not allows(wanted, special, ids(text, special))
