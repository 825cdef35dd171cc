"""Structured output in the certificate: it is part of the parameters, and defects in it show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from certify_setups import SMALL, make_judge, make_subject, one_thread, silent  # noqa: F401
from harness import VOCAB, needs_native
from structured_harness import grammars
from surefoot.certify import parameters
from surefoot.certify.compare import Judge
from surefoot.certify.defect import Defect
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job
from surefoot.certify.parameters import run_parameters
from surefoot.certify.selftest import try_defect
from surefoot.certify.structure import STRUCTURES, Structure, allowed_tokens, fits
from surefoot.engine.engine import Engine
from surefoot.request import SamplingParams
from surefoot.sampling.grammar import Grammars
from surefoot.structured import StructuredOutputsParams

REPEATS = StructuredOutputsParams(regex="((ab|c){1,3}1 ){1,9}")
SIZE = replace(SMALL, parameter_length=30)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Of a model with 48 tokens, most of them no JSON."""
    structures = (Structure(REPEATS, lambda text: True),)
    monkeypatch.setattr(parameters, "STRUCTURES", structures)
    return make_judge(replace(make_subject(), grammars=grammars()))


class StuckMasks:
    """Grammars whose masks of a draft's rows are those of the span's first row."""

    def __init__(self, real: Grammars) -> None:
        self.real = real

    def start(self, wanted: StructuredOutputsParams) -> Any:
        state = self.real.start(wanted)
        write = state.write_masks

        def stuck(drafts: Any, bits: np.ndarray) -> None:
            write(drafts, bits)
            bits[1:] = bits[0]

        state.write_masks = stuck  # type: ignore[method-assign]
        return state


@needs_native
def test_grammars_are_part_of_the_parameters(judge: Judge) -> None:
    section = run_parameters(judge, SIZE, silent)
    assert section.problems == []
    assert not any("structured" in note for note in section.notes)


@needs_native
def test_masks_that_do_not_follow_the_drafts_are_found(judge: Judge) -> None:
    def install(engine: Engine, speculative: bool) -> None:
        if speculative and engine.grammars is not None:
            engine.grammars = StuckMasks(engine.grammars)  # type: ignore[assignment]

    trial = try_defect(judge, SIZE, Defect("x", install, "sampling parameters"))
    assert trial.caught and "structured_outputs" in trial.finding


@needs_native
def test_a_token_outside_the_grammar_has_no_excuse(judge: Judge) -> None:
    """Even where plain decoding gives it: the anchor knows what is allowed."""
    params = SamplingParams(temperature=0, max_tokens=9, structured_outputs=REPEATS)
    job = Job(judge.subject.prompts[0], params)
    [text] = judge.plain_texts([job])
    section = Section("x")
    judge.anchor(section, [job], [text])
    assert section.problems == []
    state = grammars().start(REPEATS)
    state.sync(text.tokens[:3])
    wrong = int((~allowed_tokens(state, VOCAB)).nonzero()[0])
    changed = replace(text, tokens=[*text.tokens[:3], wrong])
    judge.anchor(section, [job], [changed])
    assert "regret inf" in section.problems[0]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("json", '{"name": "A", "age": 3}', '{"name": "A", "age": 3.5}'),
        ("json", '{"age": 3, "name": ""}', '{"name": "A", "age": 3, "x": 1}'),
        ("json", '{"name": "A", "age": 3}', '{"name": "A", "age": 3'),
        ("json_object", "{}", "[]"),
        ("regex", "127.0.0.1 home", "127.0.0 home"),
        ("choice", "no, never", "no, nev"),
    ],
)
def test_finished_texts_are_parsed_by_something_else(kind: str, good: str, bad: str) -> None:
    [structure] = [item.params for item in STRUCTURES if item.params.kind == kind]
    assert fits(structure, good) and not fits(structure, bad)


@needs_native
def test_what_a_model_cannot_write_is_noted() -> None:
    """A tokenizer without the letters of an answer."""
    section = run_parameters(make_judge(replace(make_subject(), grammars=grammars())), SIZE, silent)
    assert section.problems == []
    assert any("choice was not tested" in note for note in section.notes), section.notes
