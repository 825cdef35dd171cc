"""Kernels in Gluon, which no interpreter runs, compile for Hopper with the Triton that is here:
names change there from version to version. What they compute is checked on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_they_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_gluon.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        *("chunk_kernel", "True", "chunk_kernel", "True"),
        *("prompt_kernel", "True", "combine_chunks_kernel", "False"),
        *("shares_kernel", "True", "shares_kernel", "True"),
    ]
