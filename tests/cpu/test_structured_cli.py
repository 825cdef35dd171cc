"""Structured output on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.cli.main import app
from tiny_models import tiny_hf_model

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("model"))


def generate(model: Path, *options: object) -> tuple[int, str, str]:
    arguments = ["generate", "the cat", "--model", model, "--dtype", "float32", *options]
    result = CliRunner().invoke(app, [str(item) for item in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_schema_regex_choice_and_grammar(model: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "grammar.lark").write_text('start: "x" "y"~2\n', encoding="utf-8")
    ways = [
        (("--json-schema", tmp_path / "schema.json"), r'\{"a":[12]\}'),
        (("--regex", "[ab]{3}c"), "[ab]{3}c"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--grammar", tmp_path / "grammar.lark"), "xyy"),
    ]
    for options, pattern in ways:
        code, text, error = generate(model, *options, "--temperature", 1, "--seed", 3)
        assert code == 0, error
        assert re.fullmatch(pattern, text.strip())


def test_mistakes_name_the_option_as_it_was_typed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    mistakes = [
        (("--regex", "a("), "--regex"),
        (("--json-schema", tmp_path / "broken.json"), "--json-schema"),
        (("--json-schema", tmp_path / "missing.json"), "--json-schema"),
        (("--regex", "a", "--choice", "b"), "--choice"),
        (("--choice", "a", "--min-tokens", 2), "--min-tokens"),
    ]
    for options, name in mistakes:
        code, _, error = generate(model, *options)
        line = error.strip().splitlines()[-1]
        assert code == 2 and line.startswith(f"error: {name}: "), error
