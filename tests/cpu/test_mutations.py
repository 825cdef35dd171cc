"""The list of ``tests/mutate`` still fits the code and the tests that it names."""

from __future__ import annotations

from pathlib import Path

from mutate.everything import MUTATIONS

HERE = Path(__file__).parent


def test_every_mutated_line_is_there_once() -> None:
    texts = {path: (HERE.parents[1] / path).read_text() for path in {m.path for m in MUTATIONS}}
    wrong = [str(each) for each in MUTATIONS if texts[each.path].count(each.old) != 1]
    assert not wrong
    assert len({(each.path, each.old, each.new) for each in MUTATIONS}) == len(MUTATIONS) >= 40


def test_every_mutation_names_tests_that_there_are() -> None:
    for each in MUTATIONS:
        assert each.tests and each.old != each.new
        for test in each.tests:
            file, _, name = test.partition("::")
            text = (HERE / file).read_text()
            assert f"def {name}(" in text if name else "def test_" in text, test
