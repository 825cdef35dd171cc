"""Text that a grammar forces, as tokens: cut as the tokenizer would, given the text before it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.models.loading.tokenizer import Tokenizer

SURE, LAST = 0.97, 0.6
"""Confidence that a model goes on with a token of forced text; and with the last one, which may
become one token with what follows."""
_KEPT = 4096
"""Pieces of text whose tokens are remembered: grammars force the same ones again and again."""


class Cutter:
    """Cuts text into tokens. For one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[bytes, bytes], list[int]] = {}

    def cut(self, before: int | None, text: bytes) -> list[int]:
        """The tokens of ``text`` behind the token ``before`` (None: there is none). Fewer, or
        none, where these are not the bytes of a text."""
        head = b"" if before is None else self._tokenizer.token_bytes(before)
        key = head, text
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._encode(head, text)
            if not found and head:
                # The tokenizer would have cut elsewhere, and the model did not.
                found = self._encode(b"", text)
            self._known[key] = found
        return found

    def _encode(self, head: bytes, text: bytes) -> list[int]:
        """The tokens of ``text`` in ``head + text``; none if one of them begins in ``head``."""
        try:
            # What it ends with may be a part of a character.
            whole = codecs.getincrementaldecoder("utf-8")().decode(head + text)
        except UnicodeDecodeError:
            return []
        tokens = self._tokenizer.encode(whole, add_special_tokens=False)
        reached, known = 0, head + text
        kept: list[int] = []
        for token in tokens:
            piece = self._tokenizer.token_bytes(token)
            if token == tokens[0] and not reached and piece[:1] == b" " != known[:1]:
                # Some tokenizers put a space before every text.
                if not head:
                    return []
                piece = piece[1:]
                if not piece:
                    continue
            if not piece or known[reached : reached + len(piece)] != piece:
                break
            if reached >= len(head):
                kept.append(token)
            elif reached + len(piece) > len(head):
                return []
            reached += len(piece)
        return kept


def confidences(tokens: Sequence[int], whole: bool) -> list[float]:
    """Of forced ``tokens``; ``whole``: the last one ends the forced text."""
    found = [SURE] * len(tokens)
    if whole and found:
        found[-1] = LAST
    return found
