"""What is read of a processor: x86 lists its instructions as flags, Arm as Features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.bench.hardware import cpu_name
from surefoot.engine.build import _has_bf16_instructions
from surefoot.kernels.cpu import build

INTEL = "model name\t: Some Xeon\nflags\t\t: fpu avx512_bf16\nbogomips\t: 1.0\n"
ARM = "BogoMIPS\t: 50.0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd4f\n"


def pretend(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``/proc/cpuinfo`` say ``text``."""
    read_text = Path.read_text

    def read(path: Path, *args: Any, **kwargs: Any) -> str:
        return text if str(path) == "/proc/cpuinfo" else read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize(("text", "flag"), [(INTEL, "avx512_bf16"), (ARM, "bf16")])
def test_a_processor_s_instructions_are_known(
    text: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels are not kept for another processor; bfloat16 is chosen where it is quick."""
    pretend(text, monkeypatch)
    assert _has_bf16_instructions()
    own = build._cpu()
    pretend(text.replace(flag, "nothing"), monkeypatch)
    assert not _has_bf16_instructions()
    assert build._cpu() != own


def test_the_bench_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(2 * INTEL, monkeypatch)
    assert cpu_name() == "Some Xeon"
