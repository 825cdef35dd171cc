"""Chat templates: Jinja as Hugging Face renders it (``apply_chat_template``), in a sandbox.

Templates come with checkpoints, and what they work on from clients; neither is trusted: they run in
Jinja's immutable sandbox over plain data, with limits (``template_sandbox``). transformers itself
is not imported, as that takes a second or more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError

LONGEST_TEMPLATE, LONGEST_DATE = 1 << 20, 200
# Names under which a message's reasoning is passed; templates read the first, some the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """The prompt text of a conversation.

    ``messages`` are objects with ``role`` and ``content``; ``tools`` JSON schemas; ``variables``
    whatever else the template reads, ``bos_token`` and such among them. Raises SurefootError for
    a template that cannot be parsed, that fails, refuses (``raise_exception``) or does too much.
    """
    from surefoot.models.loading.template_limits import LimitReached
    from surefoot.models.loading.template_sandbox import render_limited

    try:
        given = {key: _plain(value) for key, value in variables.items()}
        given["messages"] = [_message(message) for message in messages]
        given["tools"], given["documents"] = _plain(tools), _plain(documents)
        given["add_generation_prompt"] = add_generation_prompt
        return render_limited(_compile(template), given)
    except SurefootError:
        raise
    except LimitReached as error:
        raise SurefootError("messages", f"the model's chat template was stopped: {error}") from None
    except RecursionError:
        raise SurefootError(
            "messages", "they, or the model's chat template, are nested too deeply"
        ) from None
    except Exception as error:  # templates run over anything, and raise anything
        detail = " ".join(str(error).split()) or type(error).__name__
        raise SurefootError(
            "messages", f"the model's chat template refused them: {detail[:400]}"
        ) from error


def read_chat_template(path: str | Path) -> str:
    """The text of a file with a chat template. Raises SurefootError for none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        _compile(text)
    except (OSError, UnicodeError) as error:
        raise SurefootError("chat_template", f"{path} cannot be read: {error}") from None
    except Exception as error:  # what the parser, or a limit, makes of it
        detail = " ".join(str(error).split())[:200]
        raise SurefootError("chat_template", f"{path} is no chat template: {detail}") from None
    return text


@lru_cache(maxsize=32)
def template_variables(source: str) -> frozenset[str]:
    """Names that a chat template reads and does not set itself; none for one that cannot be
    parsed, which rendering says."""
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_compile(source).environment.parse(source)))
    except Exception:  # whatever is wrong with it
        return frozenset()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise SurefootError("messages", f"{message!r} is no message", "give objects with a role")
    plain = _plain(message)
    given = next((plain[key] for key in REASONING_KEYS if plain.get(key) is not None), None)
    if given is None:
        return plain
    return {"thinking": given, **plain, "reasoning_content": given}


def _plain(value: Any) -> Any:
    """The same data in JSON's own types, so that no method of a rich object is reachable."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise SurefootError(
        "messages", f"a chat template cannot take a {type(value).__name__}", "give JSON values"
    )


@lru_cache(maxsize=32)
def _compile(source: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.utils import Namespace

    from surefoot.models.loading.template_limits import LimitReached, bounded
    from surefoot.models.loading.template_sandbox import LimitedEnvironment

    if len(source) > LONGEST_TEMPLATE:
        raise LimitReached(f"it has {len(source)} characters, more than {LONGEST_TEMPLATE}")

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's part for training; here it only groups."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class GuardedNamespace(Namespace):
        """``namespace()`` whose private attributes cannot be replaced from a template."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a template may not set {name!r} on a namespace")
            super().__setitem__(name, value)

        def __repr__(self) -> str:
            return "<Namespace>"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML characters, which models were not trained on.
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        # Indentation can be much longer than what it is for.
        return "".join(bounded(encoder.iterencode(value))) if indent else encoder.encode(value)

    def strftime_now(pattern: str) -> str:
        if len(pattern) > LONGEST_DATE or re.search(r"%\D?\d{3}", pattern):
            raise LimitReached("it asks for too long a date")
        return datetime.now().strftime(pattern)

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.limit_filters()
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = GuardedNamespace
    return environment.from_string(source)
