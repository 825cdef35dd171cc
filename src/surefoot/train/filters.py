"""What is not worth training on: loops, texts that were there before, short ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

LOOP_LENGTH = 8
MOST_REPEATED = 0.3
"""Largest share of an answer's 8-grams that occurred in it before."""


def repeated_share(ids: Sequence[int], length: int = LOOP_LENGTH) -> float:
    """The share of the n-grams of ``length`` tokens that occurred before; 0 for a short text."""
    grams = [tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def before_loop(ids: Sequence[int], length: int = LOOP_LENGTH) -> Sequence[int]:
    """``ids`` up to where the first n-gram of ``length`` tokens occurs again."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(ids) - length + 1):
        gram = tuple(ids[start : start + length])
        if gram in seen:
            return ids[:start]
        seen.add(gram)
    return ids


def prompt_key(text: str, words: int | None = None) -> int:
    """Equal for prompts of the same words but for case, spaces and punctuation, or with ``words``
    for those that begin with so many; a text without letters or digits is told apart by its
    characters."""
    found = re.findall(r"\w+", text.lower())
    return _hash(" ".join(found[:words]) or text)


def answer_key(ids: Sequence[int]) -> int:
    return _hash(",".join(map(str, ids)))


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class Seen:
    """Keys of prompts and answers of the documents that were kept."""

    def __init__(self, keys: Iterable[Sequence[int]] = ()) -> None:
        self.prompts: set[int] = set()
        self.answers: set[int] = set()
        self.add(keys)

    def take(self, prompt: int, answer: int) -> bool:
        """Add a document's keys, unless one of them is there."""
        if prompt in self.prompts or answer in self.answers:
            return False
        self.add([(prompt, answer)])
        return True

    def add(self, keys: Iterable[Sequence[int]]) -> None:
        for prompt, answer in keys:
            self.prompts.add(int(prompt))
            self.answers.add(int(answer))


def reason_to_drop(written: int, keys: tuple[int, int], seen: Seen, shortest: int) -> str | None:
    """``short``, ``duplicate``, or None for a text that is kept; ``written`` tokens of it were
    generated."""
    if written < shortest:
        return "short"
    if keys[0] in seen.prompts or keys[1] in seen.answers:
        return "duplicate"
    return None
