"""Typed reads of JSON checkpoint files: a required key is required, a wrong type is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.config import LARGEST, NUMBERS, Range


class JsonReader:
    """A JSON object and the file it came from. Every error is a SurefootError naming the file and
    the key. A key whose value is null counts as absent, as in Hugging Face's files."""

    def __init__(self, path: Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.data = data
        self.prefix = prefix

    @classmethod
    def open(cls, path: Path) -> JsonReader:
        """Read ``path``. Raises SurefootError when it is missing, broken, or not an object."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError:
            raise SurefootError(
                "model", f"cannot read {path}: it is nested too deeply", "download it again"
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not valid JSON ({error})"
            raise SurefootError("model", f"cannot read {path}: {reason}") from error
        if not isinstance(data, dict):
            raise SurefootError("model", f"{path} holds no JSON object")
        return cls(path, data)

    def require(self, *keys: str) -> None:
        """Raise one SurefootError that lists every absent key."""
        absent = [self.prefix + key for key in keys if self.data.get(key) is None]
        if absent:
            raise SurefootError("model", f"{self.path} lacks {', '.join(absent)}")

    def integer(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """An integer from 1 to ``most``. Required unless ``default`` is given."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, value, f"a positive integer of at most {most}")
        return value

    def number(self, key: str, default: float | None = None, within: Range = NUMBERS) -> float:
        """A number from ``within``, both ends included. Required unless ``default`` is given."""
        value = self._get(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not within[0] <= value <= within[1]:
            raise self.wrong(key, value, f"a number from {within[0]:g} to {within[1]:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false. Required unless ``default`` is given."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Required unless ``default`` is given."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id below ``vocab_size`` or a list of them; absent, and below 0: none."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self.wrong(key, value, "a token id or a list of token ids")
        if any(item >= vocab_size for item in values):
            raise self.wrong(key, value, f"token ids below the vocab_size of {vocab_size}")
        return tuple(dict.fromkeys(item for item in values if item >= 0))

    def section(self, key: str) -> JsonReader | None:
        """A nested object, or None when absent or empty."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return JsonReader(self.path, value, f"{self.prefix}{key}.") if value else None

    def wrong(self, key: str, value: object, expected: str) -> SurefootError:
        """The error for a value of the wrong type."""
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else shown[:80] + " ..."
        return SurefootError(
            "model", f"{self.path} has {self.prefix}{key} = {shown}", f"expected {expected}"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None and default is None:
            self.require(key)
        return default if value is None else value
