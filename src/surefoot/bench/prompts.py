"""Prompts of a benchmark: from a JSON-lines file, or the built-in samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError

DEFAULT_CATEGORY = "all"


@dataclass(frozen=True)
class BenchPrompt:
    """``text`` is completed as it is; ``messages`` go through the chat template. One is given."""

    name: str
    category: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    later: tuple[str, ...] = ()
    """What the user says after each answer; a benchmark asks none of it."""

    @property
    def last_words(self) -> str:
        """What the user said last, for people."""
        return self.text if self.text is not None else str(self.messages[-1].get("content", ""))


def load_prompts(path: str | Path) -> list[BenchPrompt]:
    """Read a file with one JSON object a line: ``{"prompt": text}``, ``{"messages": […]}`` or
    ``{"turns": […]}`` (Spec-Bench; the first turn is asked), each with an optional ``category``
    and ``id`` or ``question_id``. Raises SurefootError naming the line at fault."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SurefootError("prompts", f"cannot be read: {error}") from None
    prompts = [
        parse_prompt(line, f"{path}, line {number}", str(number))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise SurefootError("prompts", f"{path} has no prompts")
    return prompts


def parse_prompt(line: str, where: str, name: str) -> BenchPrompt:
    """One line of a prompt file; ``where`` is for error messages, ``name`` if it has no id."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SurefootError("prompts", f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise SurefootError("prompts", f"{where} is no object")
    kinds = [kind for kind in ("prompt", "messages", "turns") if kind in entry]
    if len(kinds) != 1:
        raise SurefootError("prompts", f"{where} must have one of prompt, messages and turns")
    value = entry[kinds[0]]
    name = str(entry.get("id", entry.get("question_id", name)))
    category = str(entry.get("category", DEFAULT_CATEGORY))
    if kinds[0] == "prompt":
        if not isinstance(value, str) or not value:
            raise SurefootError("prompts", f"{where}: prompt is no text")
        return BenchPrompt(name, category, text=value)
    if not isinstance(value, list) or not value:
        raise SurefootError("prompts", f"{where}: {kinds[0]} is no list, or empty")
    later: tuple[str, ...] = ()
    if kinds[0] == "turns":
        if not all(isinstance(turn, str) for turn in value):
            raise SurefootError("prompts", f"{where}: a turn is no text")
        value, later = [{"role": "user", "content": value[0]}], tuple(value[1:])
    if not all(isinstance(item, dict) and "role" in item for item in value):
        raise SurefootError("prompts", f"{where}: messages must be objects with a role")
    return BenchPrompt(name, category, messages=tuple(value), later=later)


def select(
    prompts: Sequence[BenchPrompt],
    categories: Sequence[str] | None = None,
    per_category: int | None = None,
) -> list[BenchPrompt]:
    """The first ``per_category`` prompts of each of ``categories``, in the order given."""
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories or ():
        if category not in known:
            raise SurefootError(
                "categories", f"{category!r} is not in the file", f"known: {', '.join(known)}"
            )
    if per_category is not None and per_category < 1:
        raise SurefootError("per_category", f"{per_category} is below 1")
    chosen: list[BenchPrompt] = []
    for category in categories or known:
        chosen += [prompt for prompt in prompts if prompt.category == category][:per_category]
    return chosen


def builtin_prompts() -> list[BenchPrompt]:
    """Three everyday tasks: one whose answer repeats most of its input, one that condenses it,
    and one that writes freely."""
    tasks = {
        "edit": f"Rename the function `total` to `sum_prices` in this code, change nothing else, "
        f"and show all of the code.\n\n```python\n{_CODE}```",
        "summarise": f"Summarise this text in a few sentences.\n\n{_TEXT}",
        "write": "Write a letter to a friend about moving to a small island for a new job.",
    }
    return [
        BenchPrompt(name, name, messages=({"role": "user", "content": text},))
        for name, text in tasks.items()
    ]


_CODE = '''\
def total(prices, discount):
    """Add up the prices and take off the discount."""
    result = 0.0
    for price in prices:
        if price < 0:
            raise ValueError("a price cannot be negative")
        result = result + price
    return result * (1 - discount)


def receipt(names, prices, discount):
    """Print one line per article and the sum at the end."""
    for name, price in zip(names, prices):
        print(name, price)
    print("Total:", total(prices, discount))
'''

_TEXT = """\
The harbour of the small town had been silting up for decades before anybody measured it. Fishing \
boats that once left at any hour now waited for the tide, and the ferry, which had called twice a \
day since the war, moved to the deeper port across the bay. In spring the council hired two \
surveyors, who found that the old breakwater, lengthened in 1962 to shelter the marina, slows the \
current just enough for the river to drop its sand at the harbour's mouth. Dredging would cost \
more than the harbour earns and would have to be repeated every fourth year. Shortening the \
breakwater by forty metres would let the current clear the channel by itself, but would leave a \
third of the marina's berths exposed to the winter storms. The fishermen want the breakwater cut; \
the owners of the marina want the dredging, and offer to pay for the first round. The council \
will decide in October, after a public hearing in the old customs house."""
