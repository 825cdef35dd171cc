"""Chat templates that would take all time or memory are stopped, by name, and cost little."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from server_scripted import END, ScriptedCore, ask
from surefoot.errors import SurefootError
from surefoot.models.loading import template_limits, template_sandbox
from surefoot.models.loading.chat_template import render_chat_template
from surefoot.models.loading.tokenizer import Tokenizer, TokenizerSettings
from tiny_models import tiny_tokenizer_json

MESSAGES = [{"role": "user", "content": "hi"}]
BILLION = 10**9


def render(template: str, **variables: Any) -> str:
    return render_chat_template(template, MESSAGES, n=BILLION, **variables)


def stopped(template: str, **variables: Any) -> str:
    with pytest.raises(SurefootError, match=r"^messages: ") as caught:
        render(template, **variables)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return caught.value.problem


def repeated(step: str, start: str = "'ab'") -> str:
    """``step`` makes ``ns.v`` longer, 60 times."""
    loop = f"{{% for i in range(60) %}}{{% set ns.v = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(v={start}) %}}{loop}{{{{ ns.v | length }}}}"


TEXT = "it makes a text of more than 16777216 characters"
VALUE = "it makes a value of more than 16777216 characters"
PIECES = "it takes a text apart into more than 131072 pieces"
WIDTH = "it asks for a width or count above 100000"
BITS = "it makes a number of more than 10000 bits"
LAZY = "range(100000) | map('replace', '1', 'x' * 100000)"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * n }}", TEXT),
        ("{{ ('ab ' * 999999).split() }}", PIECES),
        ("{{ ('ab ' * 999999).rsplit('b') }}", PIECES),
        ("{{ ('ab ' * 999999) | wordcount }}", PIECES),
        ("{{ ('ab ' * 999999) | list | length }}", PIECES),
        ("{{ n * 'x' }}", TEXT),
        ("{{ ('x'.encode() * n) | length }}", TEXT),
        ("{{ [0] * n }}", TEXT),
        ("{{ [[]] * n }}", TEXT),
        ("{{ 10 ** n }}", BITS),
        (repeated("ns.v * ns.v", "3"), BITS),
        (repeated("ns.v + ns.v"), TEXT),
        (repeated("ns.v ~ ns.v"), TEXT),
        (repeated("'%s%s' % (ns.v, ns.v)"), VALUE),
        (repeated("'%(a)s%(a)s' % {'a': ns.v}"), TEXT),
        (repeated("'%s%s' | format(ns.v, ns.v)"), TEXT),
        (repeated("'{}{}'.format(ns.v, ns.v)"), TEXT),
        (repeated("'{a}{a}'.format_map({'a': ns.v})"), TEXT),
        (repeated("ns.v.replace('b', ns.v)"), TEXT),
        (repeated("ns.v | replace('b', ns.v)"), TEXT),
        (repeated("ns.v.join(ns.v)"), TEXT),
        (repeated("[ns.v, ns.v] | join(ns.v)"), VALUE),
        (repeated("[ns.v, ns.v]"), VALUE),
        (repeated("(ns.v, ns.v)"), VALUE),
        (repeated("{1: ns.v, 2: ns.v}"), VALUE),
        (repeated("dict(a=ns.v, b=ns.v)"), VALUE),
        (repeated("{}.fromkeys([1, 2], ns.v)"), VALUE),
        (repeated("[ns.v] * 2"), TEXT),
        ("{{ " + LAZY + " | join | length }}", VALUE),
        ("{{ " + LAZY + " | list | length }}", VALUE),
        ("{{ ''.join(" + LAZY + ") | length }}", VALUE),
        ("{{ '%0999999999d' % 1 }}", TEXT),
        ("{{ '%*d' % (n, 1) }}", TEXT),
        ("{{ '%999999999s' | format(1) }}", TEXT),
        ("{{ '{:999999999}'.format(1) }}", TEXT),
        ("{{ '{:{}}'.format(1, n) }}", TEXT),
        ("{{ '{:{}999999999}'.format(1, 2) }}", TEXT),
        ("{{ '%((a))999999999d' % {'(a)': 1} }}", TEXT),
        ("{{ '% 0999999999d' % 1 }}", TEXT),
        ("{{ 'x' | center(n) }}", WIDTH),
        ("{{ 'x'.center(n) }}", WIDTH),
        ("{{ 'x'.zfill(n) }}", WIDTH),
        ("{{ 'x' | indent(n) }}", WIDTH),
        ("{{ ('\n' * 100000) | indent('x' * 100000) }}", TEXT),
        ("{{ ('\t' * 100000).expandtabs(100000) }}", TEXT),
        ("{{ 'x'.translate({120: 'yyy'}) }}", "it calls translate"),
        ("{{ (5).to_bytes(n, 'big') | length }}", WIDTH),
        ("{{ [1] | batch(n, 0) | list }}", WIDTH),
        ("{{ [1] | slice(n) | list }}", WIDTH),
        ("{{ [1] | tojson(indent=n) }}", WIDTH),
        ("{{ (range(1000) | list) | tojson(indent=100000) }}", VALUE),
        ("{{ [[1]] | sum(start=[]) }}", "it adds up something else than numbers"),
        ("{{ strftime_now('%999999999d') }}", "it asks for too long a date"),
        ("{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}", "it prints more than"),
        ("x" * (2 << 20), "it has 2097152 characters, more than 1048576"),
    ],
    ids=lambda item: item[:40],
)
def test_sizes_are_bounded(template: str, reason: str) -> None:
    start = time.thread_time()
    problem = stopped(template)
    assert problem.startswith(f"the model's chat template was stopped: {reason}")
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{{ range(100000) | map('upper') | map('length') | sum }}",
    ],
    ids=["loops", "macros", "filters"],
)
def test_time_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.05)
    assert "was stopped: it takes more than 0.05 s" in stopped(template)


def test_what_is_made_in_all_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text by itself is small enough, and many are kept."""
    monkeypatch.setattr(template_limits, "MOST_MADE", 1 << 20)
    sets = "".join(f"{{% set a{index} = 'x' * 100000 %}}" for index in range(20))
    assert "was stopped: it makes too many texts" in stopped(sets)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 10.0 ** 400 }}", "refused them: "),
        ("{{ 1 // 0 }}", "refused them: integer division or modulo by zero"),
        ("{{ range(n) }}", "refused them: Range too big"),
        ("{{ {[]: 1} }}", "refused them: unhashable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "are nested too deeply"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "are nested too deeply"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "are nested too deeply"),
        ("{{ 'x' | urlize }}", "No filter named 'urlize'"),
    ],
)
def test_whatever_a_template_raises_is_named(template: str, problem: str) -> None:
    assert problem in stopped(template)


def test_variables_nested_too_deeply() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "are nested too deeply" in stopped("{{ x }}", x=deep)


def test_no_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(template_sandbox, "render_limited", broken)
    assert stopped("x") == "the model's chat template refused them: MemoryError"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%d of %5.1f%%: id 1234567890' % (n, 2.5) }}", f"{BILLION} of   2.5%: id 1234567890"),
        ("{{ 'id 1234567890: {:>4}|{:d}'.format(7, n) }}", f"id 1234567890:    7|{BILLION}"),
        ("{{ '%s' | format(n) }}{{ {'id': n} | tojson }}", f'{BILLION}{{"id": {BILLION}}}'),
        ("{{ ('a' * 200000).find('b', 150000) }}{{ ('ab' * 100000)[:4] }}", "-1abab"),
        ("{{ [1, 2] + [3] }}{{ (1, 'x') }}{{ [1.5, 2] | sum }}", "[1, 2, 3](1, 'x')3.5"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ loop.length }}{% endfor %}", "a11"),
        ("{% for m in [] %}{% else %}none{% endfor %}{{ messages | length }}", "none1"),
    ],
)
def test_ordinary_values_pass(template: str, text: str) -> None:
    assert render(template) == text


def test_long_conversations_are_far_from_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    template = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
        "{% set ns.seen = (ns.seen + [m.role])[-3:] %}"
        "{{ '<|' ~ m['role'] ~ '|>' + m.content | trim | replace('word', 'token') }}{% endfor %}"
    )
    text = render_chat_template(template, messages)
    assert len(text) == 2000 * len("<|user|>" + ("token " * 200).strip())


HOSTILE = "{% for m in messages %}{{ m.content * copies }}{% endfor %}"


def test_a_client_is_told_and_the_server_goes_on() -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    tokenizer = Tokenizer(backend, TokenizerSettings(templates={"default": HOSTILE}))
    threads = []

    def render_chat(*given: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return Tokenizer.render_chat(tokenizer, *given, **options)

    tokenizer.render_chat = render_chat  # type: ignore[method-assign]

    async def use(client: httpx.AsyncClient, _: ScriptedCore) -> list[httpx.Response]:
        answers = []
        for copies in (10**13, "x", 2):
            body = {"messages": MESSAGES, "chat_template_kwargs": {"copies": copies}}
            answers.append(await client.post("/v1/chat/completions", json=body))
        return answers

    huge, wrong, good = ask(tokenizer, [[END]], use)
    for answer, problem in ((huge, TEXT), (wrong, "can't multiply sequence")):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "messages", answer.text
        assert problem in error["message"]
    assert good.status_code == 200, good.text
    assert threads and threading.main_thread() not in threads
