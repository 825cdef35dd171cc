"""Limits on JSON that takes long though it is short in bytes: counted before it is decoded, so that
what is refused costs next to nothing."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

MOST_CONTAINERS = 1 << 15
"""Lists and objects, one within another or not."""
MOST_MEMBERS = 1 << 16
"""Members of objects: decoding holds the interpreter's lock, for each of their names."""
MOST_ENTRIES = 1 << 17
"""Entries of lists and objects together."""
MOST_VALUES = 1 << 20
"""The same where some are token ids, which are decoded faster, and which the context limits."""
MOST_DEPTH = 128
"""Lists and objects within one another."""


class TooMuch(ValueError):
    """More than one of the limits; says what."""


def check_text(text: bytes) -> None:
    """Refuse JSON that would take long to decode. Raises TooMuch."""
    if _outside(text, (b"[", b"{"), MOST_CONTAINERS):
        raise TooMuch(f"more than {MOST_CONTAINERS} lists and objects")
    if _outside(text, (b":",), MOST_MEMBERS):
        raise TooMuch(f"more than {MOST_MEMBERS} members of objects")
    if _outside(text, (b",",), MOST_VALUES):
        raise TooMuch(f"more than {MOST_VALUES} values")


def check_value(value: Any, uncounted: Container[str] = ()) -> None:
    """Refuse decoded JSON that would take long to look at, or is nested too deeply; an object's
    members whose names are ``uncounted`` are not looked at. Raises TooMuch."""
    total, level = 0, [value]
    if isinstance(value, dict):
        total, level = len(value), [item for name, item in value.items() if name not in uncounted]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, (dict, list)):
                total += len(item)
                if total > MOST_ENTRIES:
                    raise TooMuch(f"more than {MOST_ENTRIES} entries in its lists and objects")
                inner.extend(item.values() if isinstance(item, dict) else item)
        if not inner:
            return
        level = inner
    raise TooMuch(f"more than {MOST_DEPTH} lists and objects within one another")


def _outside(text: bytes, marks: tuple[bytes, ...], most: int) -> bool:
    """Whether more than ``most`` of the ``marks`` stand outside of JSON's strings."""
    if sum(map(text.count, marks)) <= most:
        return False
    count = at = 0
    while at < len(text) and count <= most:
        quote = text.find(b'"', at)
        end = quote if quote >= 0 else len(text)
        count += sum(text.count(mark, at, end) for mark in marks)
        at = _string_end(text, end + 1)
    return count > most


def _string_end(text: bytes, at: int) -> int:
    """The place behind the string whose text begins at ``at``."""
    while True:
        quote = text.find(b'"', at)
        if quote < 0:
            return len(text)
        first = quote
        while first > at and text[first - 1] == 0x5C:
            first -= 1
        if (quote - first) % 2 == 0:
            return quote + 1
        at = quote + 1
