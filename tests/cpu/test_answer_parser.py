"""Answers cut into reasoning, content and calls of tools, however their text arrives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.server.answer_events import Answer, CallArguments, CallStart, Content, Event
from surefoot.server.answer_parser import AnswerParser
from surefoot.server.tool_formats import FORMATS, REASONING

THINK = REASONING[0]
NAMES = ("weather", "time")
Told = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and the calls' names and arguments."""


def events(form: str | None, pieces: Iterable[str], **reasoning: Any) -> list[Event]:
    """Of an answer that comes in these pieces."""
    parser = AnswerParser(FORMATS[form] if form else None, NAMES, **reasoning)
    found = [event for piece in pieces for event in parser.feed(piece, final=False)]
    found += parser.feed("", final=True)
    starts = [event for event in found if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(parser.calls))
    assert len({start.id for start in starts}) == len(starts)
    return found


def told(form: str | None, pieces: Iterable[str], **reasoning: Any) -> Told:
    answer = Answer.of(events(form, pieces, **reasoning))
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, calls


def every_way(form: str | None, text: str, **reasoning: Any) -> Told:
    """What is told of a text; the same for every cut in two and for single characters."""
    whole = told(form, [text], **reasoning)
    for cut in range(1, len(text)):
        assert told(form, [text[:cut], text[cut:]], **reasoning) == whole, text[:cut]
    assert told(form, text, **reasoning) == whole
    return whole


OPEN = "<tool_call>"
CITY = '{"city": "Zürich </tool_call> {\\"[TOOL_CALLS]"}'
WEATHER = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
TIME = '<tool_call>{"name": "time"}</tool_call>'
REVERSED = '<tool_call>{"arguments": {"a": 1}, "name": "f", "id": "}"}</tool_call>'
LISTED = '[{"name": "time", "arguments": {}}, {"name": "f", "arguments": {"a": [{}]}, "id": "x"}]'
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", WEATHER, "", [("weather", CITY)]),
    (
        "hermes",
        f"Let me see.\n\n{WEATHER}\n{TIME}{REVERSED}\n",
        "Let me see.",
        [("weather", CITY), ("time", "{}"), ("f", '{"a": 1}')],
    ),
    ("hermes", f"{TIME} then {TIME}", "then", [("time", "{}"), ("time", "{}")]),
    ("hermes", f"<tool_call>{LISTED}</tool_call>.", ".", [("time", "{}"), ("f", '{"a": [{}]}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}} no', "no", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "parameters": "{\\"b\\": 1}"}', "", [("a", '{"b": 1}')]),
    # Cut off, or not closed as they should be.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\', "", [("f", '{"a": "x\\')]),
    (
        "hermes",
        f'{OPEN}{{"name": "f", "arguments": {{"a": 1}}</tool_call>.',
        ".",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        f'{OPEN}{{"name": "f", "arguments": {{"a": [1</tool_call>.',
        ".",
        [("f", '{"a": [1')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": [', ', "x": [', [("f", "{}")]),
    ("mistral", f"[TOOL_CALLS] {LISTED}", "", [("time", "{}"), ("f", '{"a": [{}]}')]),
    (
        "mistral",
        'So: [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "So:",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"a": 1}}',
        "",
        [("time", "{}"), ("weather", '{"a": 1}')],
    ),
    (
        "llama3_json",
        'Well, <|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
        "Well,",
        [("f", '{"a": 1}')],
    ),
    ("json", '[{"name": "time"}, {"name": "Bob"}]', ', {"name": "Bob"}]', [("time", "{}")]),
]
TEXTS = [
    ("hermes", "no call \n"),
    ("hermes", "a < b <tool"),
    ("hermes", "a \n<tool_call>{broken</tool_call> b"),
    ("hermes", "<tool_call>[1, 2]</tool_call>"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "ti'),
    ("mistral", "[TOOL_CALLS]f [x"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("llama3_json", "<|python_tag|>f.call(x=1)"),
    ("llama3_json", ' {"name": "Bob", "parameters": {}}'),
    ("json", '\n[1, {"name": "time"}] and <tool_call>'),
    ("json", '{"name": "time", "arguments'),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_are_cut_out(form: str, text: str, content: str, calls: Any) -> None:
    assert every_way(form, text) == ("", content, calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert every_way(form, text) == ("", text, [])


def test_reasoning_comes_first() -> None:
    for text, reasoning, content in (
        ("<think>\nI think\n so. \n</think>\n\nYes. <think>", "I think\n so.", "Yes. <think>"),
        (" \n<think></think>Yes", "", "Yes"),
        ("<think>abc </thin", "abc </thin", ""),
        (" <thin", "", " <thin"),
        ("No <think>.</think>", "", "No <think>.</think>"),
    ):
        assert every_way(None, text, reasoning=THINK) == (reasoning, content, [])
    for text, reasoning, content in (
        ("\nI\n</think>\nYes", "I", "Yes"),
        ("I </thi", "I </thi", ""),
    ):
        found = every_way(None, text, reasoning=THINK, inside=True)
        assert found == (reasoning, content, [])
    both = f"<think>{TIME}</think>\n{TIME}"
    assert every_way("hermes", both, reasoning=THINK) == (TIME, "", [("time", "{}")])
    both = '<think>.</think>\n{"name": "time"}'
    assert every_way("llama3_json", both, reasoning=THINK) == (".", "", [("time", "{}")])


def test_names_come_first_and_arguments_in_pieces() -> None:
    parser = AnswerParser(FORMATS["hermes"])
    assert parser.feed('Yes.\n<tool_call>{"name": "f", "argum', final=False) == [Content("Yes.")]
    [start, first] = parser.feed('ents": {"a', final=False)
    assert isinstance(start, CallStart) and start.name == "f"
    assert first == CallArguments(0, '{"a')
    assert parser.feed('": "<', final=False) == [CallArguments(0, '": "<')]
    assert parser.feed('"}}<', final=False) == [CallArguments(0, '"}')]
    assert parser.feed("/tool_call> ", final=True) == []


def test_text_that_cannot_begin_a_call_is_not_held_back() -> None:
    parser = AnswerParser(FORMATS["hermes"])
    assert parser.feed("yes <", final=False) == [Content("yes")]
    assert parser.feed("b", final=False) == [Content(" <b")]
    for form in ("llama3_json", "json"):
        parser = AnswerParser(FORMATS[form], NAMES)
        assert parser.feed(' {"nam', final=False) == []
        assert parser.feed('ing"', final=False) == [Content(' {"naming"')]
        parser = AnswerParser(FORMATS[form], NAMES)
        assert parser.feed('{"name": "Bob"', final=False) == [Content('{"name": "Bob"')]


values = st.recursive(
    st.integers() | st.booleans() | st.text(alphabet='a"\\{}[]<>/ü\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("ab", max_size=2), values, max_size=3).map(json.dumps)
calls = st.tuples(st.sampled_from(NAMES), arguments)
words = st.sampled_from(["Let me", "see <", "{", "é.", "[TOOL", "</tool_call", "name", '{"name"'])
turns = st.lists(st.tuples(words, calls), max_size=3)
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def written(form: str, name: str, arguments: str, swap: bool) -> str:
    key = "parameters" if form == "llama3_json" else "arguments"
    members = [f'"name": "{name}"', f'"{key}": {arguments}']
    body = "{" + ", ".join(members[::-1] if swap else members) + "}"
    if form == "hermes":
        return f"<tool_call>\n{body}\n</tool_call>"
    if form == "llama3_json":
        return f"<|python_tag|>{body}"
    return f"[TOOL_CALLS] [{body}]" if swap else f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def cut(text: str, sizes: list[int]) -> list[str]:
    """Pieces of these sizes, over and over."""
    pieces = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@given(
    form=st.sampled_from(["hermes", "llama3_json", "mistral"]),
    thought=st.none() | words,
    turns=turns,
    swap=st.booleans(),
    sizes=sizes,
)
@settings(max_examples=150)
def test_answers_are_read_as_they_were_written(
    form: str, thought: str | None, turns: Any, swap: bool, sizes: list[int]
) -> None:
    text = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    text += "\n".join(f"{word}\n{written(form, call[0], call[1], swap)}" for word, call in turns)
    content = "".join(word for word, _ in turns)
    expected = (thought or "", content, [call for _, call in turns])
    assert told(form, cut(text, sizes), reasoning=THINK) == expected


PIECES = ["<tool_call>", "</tool_call>", '{"name": "time"', ', "arguments": {', "}", "[", "]", ","]
PIECES += ["<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "time", "[ARGS]", '"', "\\"]
PIECES += [" ", "\n", "x", ";", "<", '"id": ', '{"arguments": {']


@given(
    form=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    inside=st.booleans(),
    sizes=sizes,
)
@settings(max_examples=400)
def test_nothing_depends_on_the_cuts_or_is_lost(
    form: str, pieces: list[str], inside: bool, sizes: list[int]
) -> None:
    text = "".join(pieces)
    whole = told(form, [text], reasoning=THINK, inside=inside)
    assert told(form, cut(text, sizes), reasoning=THINK, inside=inside) == whole
    reasoning, content, calls = whole
    rest = iter(text)
    assert all(letter in rest for letter in reasoning), "reasoning that was not there"
    if not calls:
        shown = text.lstrip()
        if not inside and not shown.startswith("<think>"):
            assert content == text
        told_text = "".join((reasoning + content).split())
        marks = ("" if inside else "<think>", "</think>")
        kept = "".join(text.split())
        assert told_text == kept or told_text in (
            kept.replace(marks[0], "", 1),
            kept.replace(marks[1], "", 1),
            kept.replace(marks[0], "", 1).replace(marks[1], "", 1),
        )
