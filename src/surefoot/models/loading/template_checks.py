"""How much the operations of a template would make, checked before they make it.

They stand for those of Jinja and Python (``template_sandbox`` puts them there), and count in
``running.work``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from surefoot.models.loading.template_limits import (
    ENTRY,
    MOST_BITS,
    MOST_WIDTH,
    LimitReached,
    running,
)

WIDE_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson")
WIDE_METHODS = ("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill")
"""Their numbers say how wide or how many."""
WORDY_FILTERS = ("list", "sort", "striptags", "title", "unique", "urlencode", "wordcount")
"""They look at each character, word or mark of a text at one go."""
# Where a format string may hold a width, perhaps at other places too: after a mark of ``%``, and
# within braces. A width may also be a value, for a star and for braces within braces.
_PERCENT_WIDTH = re.compile(r"(?:[%)#+.-]|%[#0 +-]*)(\d+)")
_BRACED = re.compile(r"[{}]([^{}]*)(?=\})")
_BRACED_TWICE = re.compile(r"\{[^{}]*\{")


def sized(value: Any) -> Any:
    """A literal or a text joined with ``~``."""
    size = running.work.size(value)
    if isinstance(value, str):
        running.work.made_text(size)
    return value


def check_width(*values: Any) -> None:
    """Numbers that say how wide a text is to be, or how many there are to be."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_WIDTH:
            raise LimitReached(f"it asks for a width or count above {MOST_WIDTH}")


def check_percent(text: str, values: Iterable[Any]) -> None:
    """``text % values``."""
    _check_places(text, text.count("%"), _PERCENT_WIDTH.findall(text), "*" in text, [*values])


def _check_braces(text: str, values: Iterable[Any]) -> None:
    """``text.format(*values)``."""
    numbers = re.findall(r"\d+", " ".join(_BRACED.findall(text)))
    nested = _BRACED_TWICE.search(text) is not None
    _check_places(text, text.count("{"), numbers, nested, [*values])


def _check_places(
    text: str, places: int, widths: list[str], value_widths: bool, values: list[Any]
) -> None:
    """Each of the places may be filled with the widest of what there is."""
    sizes = [running.work.size(value) for value in values] + [int(width[:9]) for width in widths]
    if value_widths:
        sizes += [abs(value) for value in values if isinstance(value, int)]
    running.work.made_text(len(text) + places * max(sizes, default=0))


def replaced(text: str, old: Any, new: Any) -> None:
    """``text.replace(old, new)``."""
    if isinstance(old, str) and isinstance(new, str):
        running.work.made_text(len(text) + text.count(old) * len(new))


def check_method(owner: Any, name: str, values: list[Any]) -> None:
    """A method of a text or number, which can make much of little."""
    if name in ("format", "format_map"):
        mappings = [value for value in values if name == "format_map" and isinstance(value, dict)]
        inner = [item for mapping in mappings for item in mapping.values()] or values
        _check_braces(owner, inner)
        return
    if name in WIDE_METHODS:
        check_width(*values)
    if name in ("split", "rsplit", "splitlines"):
        running.work.taking_apart(_pieces(owner, values))
    if name == "replace" and len(values) >= 2:
        replaced(owner, *values[:2])
    elif name == "join" and values and isinstance(values[0], (list, tuple, dict, str)):
        count = len(values[0])
        running.work.made_text(running.work.size(values[0]) + count * len(owner))
    elif name == "expandtabs":
        tabs = owner.count("\t" if isinstance(owner, str) else b"\t")
        widths = [value for value in values if isinstance(value, int)]
        running.work.made_text(len(owner) + tabs * max([8, *widths]))
    elif name == "translate":
        raise LimitReached("it calls translate, which is not supported")


def _pieces(owner: Any, values: list[Any]) -> int:
    """Into how many a text is split, at most."""
    separator = next((value for value in values if isinstance(value, (str, bytes))), None)
    if separator:
        return owner.count(separator)
    # At white space or line breaks.
    return len(owner) // 2


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise LimitReached(f"it makes a number of more than {MOST_BITS} bits")


def power(left: Any, right: Any) -> Any:
    """``left ** right``."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    return left**right


def multiply(left: Any, right: Any) -> Any:
    """``left * right``."""
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
            empty = ENTRY if isinstance(value, (list, tuple)) else 0
            running.work.made_text(max(count, 0) * (running.work.size(value) + empty))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def remainder(left: Any, right: Any) -> Any:
    """``left % right``."""
    if isinstance(left, (str, bytes)):
        values = [*right] if isinstance(right, tuple) else [right]
        for mapping in [value for value in values if isinstance(value, dict)]:
            values += mapping.values()
        text = left if isinstance(left, str) else left.decode("latin-1")
        check_percent(text, values)
    return left % right


def add(left: Any, right: Any) -> Any:
    """``left + right``."""
    result = left + right
    return sized(result) if isinstance(result, (str, bytes, list, tuple)) else result
