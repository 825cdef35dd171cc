"""Machine code of CUDA kernels is compiled once, and damaged files are not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.kernels.cuda import machine_code
from surefoot.kernels.cuda.product_plan import ProductPlan

PLANS = ProductPlan(1, 64, 4, False), ProductPlan(1, 64, 4, True)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were compiled, as if by NVRTC 13.0."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    made: list[str] = []

    def compile_source(text: str) -> bytes:
        made.append(text)
        return text[:200].encode()

    monkeypatch.setattr(machine_code, "compile_source", compile_source)
    monkeypatch.setattr(machine_code, "nvrtc_version", lambda: (13, 0))
    machine_code._warn_of.cache_clear()
    return made


def started(plan: ProductPlan) -> bytes:
    """As a new process finds it."""
    return machine_code.compiled.__wrapped__(plan)


def test_machine_code_is_kept(made: list[str], tmp_path: Path) -> None:
    first = [started(plan) for plan in PLANS]
    assert len(made) == 2 and len(set(first)) == 2
    assert [started(plan) for plan in PLANS] == first and len(made) == 2
    names = {path.name for path in (tmp_path / "cuda").iterdir()}
    assert len(names) == 2
    assert all(name.startswith(machine_code.current_sources()) for name in names)


def test_another_compiler_makes_it_anew(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started(PLANS[0])
    monkeypatch.setattr(machine_code, "nvrtc_version", lambda: (13, 1))
    started(PLANS[0])
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["empty", "truncated", "one bit"])
def test_damaged_machine_code_is_made_anew(damage: str, made: list[str], tmp_path: Path) -> None:
    code = started(PLANS[0])
    [path] = (tmp_path / "cuda").iterdir()
    kept = path.read_bytes()
    flipped = bytes([kept[0] ^ 1]) + kept[1:]
    path.write_bytes({"empty": b"", "truncated": kept[:-40], "one bit": flipped}[damage])
    assert started(PLANS[0]) == code and len(made) == 2
    assert path.read_bytes() == kept


def test_a_folder_that_cannot_be_written_is_told_once(
    made: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cuda").write_text("not a folder")
    for plan in PLANS:
        assert started(plan)
    [record] = caplog.records
    assert "cannot be kept in" in record.getMessage() and "SUREFOOT_CACHE" in record.getMessage()
