"""How much longer a tokenizer.json can make a text: bounded before the first text, as nothing stops
the tokenizer while it works, and memory that runs out ends the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.models.loading.json_reader import JsonReader

MOST_GROWTH = 64
"""Times as long; published tokenizers replace a character by at most a few."""
MOST_ADDED = 4096
"""Characters, or tokens, put around a text."""


def check_growth(backend: Any, path: Path) -> None:
    """Refuse a ``tokenizers`` tokenizer, read from ``path``, whose normalizers, pre-tokenizers or
    decoders have replacements that multiply to more than ``MOST_GROWTH``, or whose post-processor
    repeats the text. Raises SurefootError."""
    names = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
    parts = {name: getattr(backend, name) for name in names}
    found = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part}
    tokenizer = JsonReader(path, found)
    for part in names[:3]:
        growth, added = 1.0, 0
        for step in _steps(tokenizer.data.get(part)):
            if step.get("type") == "Replace":
                growth *= _replaced(tokenizer, f"{part}.Replace", step)
            added += len(str(step.get("prepend", "")))
            if growth > MOST_GROWTH or added > MOST_ADDED:
                raise tokenizer.wrong(
                    part,
                    step,
                    f"steps that make a text at most {MOST_GROWTH} times as long, and "
                    f"{MOST_ADDED} characters longer",
                )
    for step in _steps(tokenizer.data.get("post_processor")):
        for form in ("single", "pair"):
            items = step.get(form)
            names = [item for item in items if "Sequence" in item] if items else []
            if items and (len(names) > 2 or len(items) > MOST_ADDED):
                raise tokenizer.wrong(f"post_processor.{form}", items, "each text once")


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a part, those of nested sequences included."""
    if not isinstance(part, dict):
        return []
    inner = [item for value in part.values() if isinstance(value, list) for item in value]
    if part.get("type") != "Sequence":
        return [part]
    return [step for item in inner for step in _steps(item)]


def _replaced(tokenizer: JsonReader, key: str, step: dict[str, Any]) -> float:
    """How many characters one character becomes at most."""
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if text == "" or (isinstance(pattern, dict) and pattern.get("Regex") == ""):
        raise tokenizer.wrong(key, step, "a pattern that is not empty")
    # A match of a regular expression may be one character.
    return max(1.0, len(content) / (len(text) if isinstance(text, str) else 1))
