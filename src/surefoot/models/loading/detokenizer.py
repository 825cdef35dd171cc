"""Text of a growing token sequence, piece by piece, exact in total.

What a token contributes depends on the tokenizer's decoder. Two families are followed exactly:
byte-level ones (bytes joined, then read as UTF-8) and SentencePiece-like ones (``▁`` for a space,
``<0xE2>`` for bytes, the first space dropped). Any other decoder goes through the tokenizer's own
``decode`` over a window.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"
SPACE = "\u2581"
SENTENCEPIECE_STEPS = ["Replace", "ByteFallback", "Fuse", "Strip"]
# A UTF-8 character has at most four bytes, so a few tokens complete it or it is none.
WINDOW = 8


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte -> the byte: printable Latin-1 stands for itself,
    the other bytes for the characters from U+0100 on, in order."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    table = {chr(byte): byte for byte in kept}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF = byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; a piece with other characters stands for itself."""
    try:
        return bytes(BYTE_OF[char] for char in piece)
    except KeyError:
        return piece.encode("utf-8")


class Stream(ABC):
    """Decodes a sequence: ``push`` returns the text that is now settled, ``flush`` the rest."""

    @abstractmethod
    def push(self, token: int, piece: str) -> str:
        """Take the next token, whose vocabulary entry is ``piece``."""

    @abstractmethod
    def flush(self) -> str:
        """The text still held back, at the end of the sequence."""


class ByteLevelStream(Stream):
    """Joined bytes, invalid UTF-8 replaced; an unfinished character waits."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int, piece: str) -> str:
        return self._decoder.decode(byte_level_bytes(piece))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class SentencePieceStream(Stream):
    """``▁`` as a space, runs of ``<0x..>`` pieces as UTF-8, up to ``strip`` first spaces dropped.

    A run with an invalid byte becomes one U+FFFD for each byte of the whole run, as in
    ``tokenizers``, so a run is only settled when a piece that is no byte follows it.
    """

    def __init__(self, strip: int) -> None:
        self._strip = strip
        self._run = bytearray()

    def push(self, token: int, piece: str) -> str:
        byte = BYTE_PIECE.fullmatch(piece)
        if byte:
            self._run.append(int(byte[1], 16))
            return ""
        return self._emit(self._close_run() + piece.replace(SPACE, " "))

    def flush(self) -> str:
        return self._emit(self._close_run())

    def _close_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _emit(self, text: str) -> str:
        while text and self._strip:
            if not text.startswith(" "):
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class MetaspaceStream(Stream):
    """``▁`` as a space; with ``drop_first`` those of the first piece vanish."""

    def __init__(self, drop_first: bool) -> None:
        self._drop = drop_first

    def push(self, token: int, piece: str) -> str:
        drop, self._drop = self._drop, False
        return piece.replace(SPACE, "" if drop else " ")

    def flush(self) -> str:
        return ""


class WindowStream(Stream):
    """Any decoder, through ``decode`` over the last settled tokens and the pending ones. Exact
    unless the decoder changes text in hindsight further back than the window."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._settled: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int, piece: str) -> str:
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < WINDOW:
            return ""
        self._settled, self._pending = [*self._settled, *self._pending][-WINDOW:], []
        return text

    def flush(self) -> str:
        text, self._pending = self._new_text() if self._pending else "", []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._settled) if self._settled else ""
        return self._decode([*self._settled, *self._pending])[len(before) :]


def stream_for(decoder: Mapping[str, Any] | None, decode: Callable[[list[int]], str]) -> Stream:
    """The stream that follows a ``tokenizers`` decoder, given as its JSON."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelStream()
    if kinds == ["Metaspace"] and steps[0].get("replacement") == SPACE:
        return MetaspaceStream(steps[0].get("prepend_scheme", "always") != "never")
    if kinds in (SENTENCEPIECE_STEPS, SENTENCEPIECE_STEPS[:-1]):
        replace, strip = steps[0], {} if len(kinds) == 3 else steps[-1]
        usual = replace.get("pattern") == {"String": SPACE} and replace.get("content") == " "
        if usual and strip.get("content", " ") == " " and not strip.get("stop"):
            return SentencePieceStream(strip.get("start", 0))
    return WindowStream(decode)


def piece_bytes(decoder: Mapping[str, Any] | None, piece: str) -> bytes:
    """The bytes that a vocabulary entry stands for, under a ``tokenizers`` decoder's JSON."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    if any(step.get("type") == "ByteLevel" for step in steps):
        return byte_level_bytes(piece)
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode("utf-8")
