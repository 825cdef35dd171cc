"""Text that a grammar forces, as tokens: cut as the tokenizer would, given the text before it.

Where white space is optional, as between the tokens of JSON, little is forced in the strict sense.
So text goes on behind such a place if only one thing but white space can follow, with what stood
between the same two characters before: a guess, and judged as one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from surefoot.models.loading.tokenizer import Tokenizer

SURE, GUESSED, LAST = 0.97, 0.8, 0.6
"""Confidence that a model goes on with a token of forced text; with one that has guessed white
space, or what follows that; and with the last one, which may become one token with what follows."""
BLANKS = b" \n\r\t"
_NO_JSON = b"x"
"""Stands in strings, and nowhere between them."""
_MOST_GUESSES = 6
REACH = 512
"""Bytes of the text before that guesses go by."""
_KEPT = 4096
"""Pieces of text whose tokens are remembered: grammars force the same ones again and again."""


class Letters:
    """Of a vocabulary: its tokens of one byte, and which tokens begin with white space."""

    def __init__(self, tokens: Sequence[bytes], vocab_size: int) -> None:
        self.token: dict[int, int] = {}
        """By byte."""
        self._first = np.full(-(-vocab_size // 32) * 32, -1, dtype=np.int16)
        for token, piece in enumerate(tokens[:vocab_size]):
            if piece:
                self._first[token] = piece[0]
                if len(piece) == 1:
                    self.token.setdefault(piece[0], token)

    def spell(self, text: bytes) -> list[int] | None:
        """Tokens of one byte each; None where one is lacking."""
        tokens = [self.token.get(byte) for byte in text]
        return None if None in tokens else [token for token in tokens if token is not None]

    def only(self, mask: bytes) -> bytes:
        """The one byte but white space with which all tokens in ``mask`` begin; b"" if there is
        none, or another one, or an end token."""
        flags = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
        count = min(len(flags), len(self._first))
        found = set(np.unique(self._first[:count][flags[:count]]).tolist())
        found.difference_update(BLANKS)
        [byte] = found if len(found) == 1 else [-1]
        return bytes([byte]) if byte >= 0 else b""


class Cutter:
    """Cuts text into tokens, for one thread. ``pieces``: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[bytes], vocab_size: int) -> None:
        self.pieces = pieces
        self.letters = Letters(pieces, vocab_size)
        self._tokenizer = tokenizer
        self._known: dict[tuple[bytes, bytes], list[int]] = {}

    def cut(self, before: int | None, text: bytes) -> list[int]:
        """The tokens of ``text`` behind the token ``before`` (None: there is none). Fewer, or
        none, where these are not the bytes of a text."""
        head = b"" if before is None else self.pieces[before]
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
            piece = self.pieces[token]
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


class Ahead:
    """Follows a matcher of the grammar library through text that is forced or guessed. ``consumed``
    tokens have to be taken back from it."""

    def __init__(self, matcher: Any, letters: Letters, before: bytes) -> None:
        """``before``: the end of the text that the matcher followed."""
        self._matcher = matcher
        self._letters = letters
        self._before = before
        self.text: bytes = matcher.compute_ff_bytes()
        self.guesses: list[tuple[int, int]] = []
        """First byte and end of what was guessed of ``text``."""
        self.consumed = 0
        self._reached = 0

    def look(self, most: int) -> None:
        """Guess on until ``text`` has ``most`` bytes, or nothing can be guessed."""
        while len(self.text) < most and len(self.guesses) < _MOST_GUESSES:
            if not self._consume(self.text[self._reached :]) or not (guess := self._guess()):
                return
            if not self._consume(guess):
                return
            self.guesses.append((len(self.text), len(self.text) + len(guess)))
            self.text += guess
            self._reached = len(self.text)
            self.text += self._matcher.compute_ff_bytes()

    def _consume(self, text: bytes) -> bool:
        tokens = self._letters.spell(text)
        if tokens is None or self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        self._reached += len(text)
        self.consumed += len(tokens)
        return not tokens or self._matcher.consume_tokens(tokens)

    def _guess(self) -> bytes:
        """White space, perhaps, and the only byte that can follow it."""
        known = (self._before + self.text)[-REACH:]
        last = known.rstrip(BLANKS)
        if not last or not self._allows(b" ", b"\n") or self._allows(_NO_JSON):
            return b""
        following = self._letters.only(self._matcher.compute_bitmask())
        if not following:
            return b""
        there, last = known[len(last) :], last[-1:]
        # The same two characters, and what stood between them the last time.
        found = re.findall(re.escape(last) + rb"([ \n\r\t]*)" + re.escape(following), known)
        if found:
            blanks = found[-1]
        elif last == b":" or following in (b":", b","):
            blanks = b" " if last == b":" else b""
        else:
            return b""
        return blanks[len(there) :] + following if blanks.startswith(there) else b""

    def _allows(self, *letters: bytes) -> bool:
        tokens = (self._letters.spell(letter) for letter in letters)
        return any(token and self._matcher.validate_tokens(token) for token in tokens)


def confidences(
    pieces: Sequence[int], guesses: Sequence[tuple[int, int]], whole: int
) -> list[float]:
    """Of tokens with so many bytes each (``pieces``), of forced text of ``whole`` bytes with
    ``guesses`` as of ``Ahead``."""
    found, first = [], 0
    for size in pieces:
        end = first + size
        guessed = any(first < stop and start < end for start, stop in guesses)
        found.append(LAST if end == whole else GUESSED if guessed else SURE)
        first = end
    return found
