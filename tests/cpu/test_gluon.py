"""Kernels compile for Hopper with the Triton that is here: those in Gluon, which no interpreter
runs and where names change from version to version, and some in Triton. What they compute is
checked on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def compiled(name: str) -> list[str]:
    """What the program says of its kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / name
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_they_compile() -> None:
    assert compiled("compile_gluon.py") == [
        *("chunk_kernel", "True", "chunk_kernel", "True"),
        *("prompt_kernel", "True", "combine_chunks_kernel", "False"),
        *("shares_kernel", "True", "shares_kernel", "True"),
    ]


def test_kernels_that_sample_compile() -> None:
    scores = ["part_scores_kernel", "row_scores_kernel"]
    assert compiled("compile_sampling.py") == [
        *("survey_kernel", "bound_kernel", "draw_kernel", "final_kernel"),
        *("survey_kernel", "final_kernel", *scores, *scores, *scores),
        *("markov_kernel", "markov_kernel", "markov_pick_kernel"),
        *("changes_kernel", "noise_kernel", "markov_kernel", "markov_pick_kernel"),
        *("draw_part_kernel", "draw_final_kernel", "draw_part_kernel", "draw_several_kernel"),
    ]
