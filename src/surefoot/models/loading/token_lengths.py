"""How much text one token can stand for: what a text has to be long enough for, at least."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.models.loading.detokenizer import byte_alphabet

if TYPE_CHECKING:
    import tokenizers

# A composed character has at most four code points when decomposed (Unicode's annex 15).
_SHRINKING = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1}
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


@dataclass(frozen=True)
class TokenLengths:
    """``longest``: most characters of a text that one token stands for. ``unseen``: characters
    that become no token at all, as the vocabulary lacks their byte."""

    longest: int
    unseen: str = ""

    def exceed(self, texts: Iterable[str], most: int) -> bool:
        """Whether texts have more than ``most`` tokens together, as far as their lengths tell.
        Looks at no more of them than that takes."""
        enough, seen = most * self.longest, 0
        for text in texts:
            for at in range(0, len(text), enough + 1):
                part = text[at : at + enough + 1]
                seen += len(part) - sum(map(part.count, self.unseen))
                if seen > enough:
                    return True
        return False


def token_lengths(backend: tokenizers.Tokenizer) -> TokenLengths | None:
    """What can be said of a tokenizer; None where a token can stand for any length: some tokenizers
    drop white space, or make one token of a run of unknown characters."""
    model: Any = backend.model
    if type(model).__name__ != "BPE" or model.fuse_unk:
        return None
    shrinking = _shrinking(_state(backend.normalizer))
    steps = list(_steps(_state(backend.pre_tokenizer), "pretokenizers"))
    added = backend.get_added_tokens_decoder().values()
    if (
        shrinking is None
        or any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps)
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    unseen = ""
    if any(step["type"] == "ByteLevel" for step in steps):
        missing = [byte for piece, byte in byte_alphabet().items() if piece not in vocabulary]
        if any(0x80 <= byte < 0xC0 for byte in missing):
            # Of other characters the first byte may be missing, as the rest is seen.
            return None
        unseen = "".join(chr(byte) for byte in missing if byte < 0x80)
    elif model.byte_fallback:
        if any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
            return None
    elif model.unk_token is None:
        return None
    return TokenLengths(shrinking * max(map(len, vocabulary)), unseen)


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """By how much, at most, a normalizer divides a text's number of characters."""
    product = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif kind not in _SHRINKING:
            return None
        else:
            product *= _SHRINKING[kind]
    return product


def _steps(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[inner]:
        yield from _steps(step, inner)


def _state(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())
