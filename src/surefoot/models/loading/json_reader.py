"""Typed reads of JSON checkpoint files: a required key is required, a wrong type is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError


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

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer above zero. Required unless ``default`` is given."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least zero. Required unless ``default`` is given."""
        value = self._get(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 <= value < float("inf"):
            raise self.wrong(key, value, "a number of at least 0")
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

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; absent: none."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self.wrong(key, value, "a token id or a list of token ids")
        return tuple(dict.fromkeys(item for item in values if item >= 0))

    def section(self, key: str) -> JsonReader | None:
        """A nested object, or None when absent or empty."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return JsonReader(self.path, value, f"{self.prefix}{key}.") if value else None

    def wrong(self, key: str, value: object, expected: str) -> SurefootError:
        """The error for a value of the wrong type."""
        shown = json.dumps(value, default=str)[:80]
        return SurefootError(
            "model", f"{self.path} has {self.prefix}{key} = {shown}", f"expected {expected}"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None and default is None:
            self.require(key)
        return default if value is None else value
