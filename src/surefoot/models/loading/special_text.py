"""Special tokens that a user writes (``<|im_end|>``) as mere text, beside those of a chat template.

A template's output does not tell who wrote what. So such texts are marked before it is rendered,
with digits inside that nobody can guess and no template minds; behind it, special tokens without
the mark are the template's own. They get other names, which a second tokenizer knows by the same
ids, and for which the users' are text like any other.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.models.loading.tokenizer import Tokenizer

_DIGITS = 24


class SpecialText:
    """The second tokenizer, and the marks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        secret = secrets.token_hex(8)
        self._names = {text: f"\ufdd0{secret}{i}\ufdd1" for i, text in enumerate(texts)}
        self._special = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._renamed = _renamed(tokenizer, self._names) if texts else tokenizer

    def mark(self) -> str:
        """A mark for one conversation."""
        return "".join(str(secrets.randbelow(10)) for _ in range(_DIGITS))

    def marked(self, value: Any, mark: str) -> Any:
        """JSON data whose texts have the mark inside each special token."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][:1] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.marked(k, mark): self.marked(item, mark) for k, item in value.items()}
        if isinstance(value, Sequence):
            return [self.marked(item, mark) for item in value]
        return value

    def settled(self, text: str, mark: str) -> tuple[str, Tokenizer]:
        """What is rendered of marked data, without the marks, and the tokenizer that reads it."""
        if mark not in text:
            return text, self._tokenizer
        text = self._special.sub(lambda found: self._names[found[0]], text)
        return text.replace(mark, ""), self._renamed


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    import tokenizers

    data = json.loads(tokenizer.backend.to_str())
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = data["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), tokenizer.settings)
