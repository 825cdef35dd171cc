"""Programs of ``surefoot.bench`` that measure parts, on small models."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import needs_native
from surefoot.bench import kernels_cpu, structured
from tiny_models import tiny_hf_model


def arguments(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("sys.argv", ["program", *line.split()])


def test_what_structured_output_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_hf_model("llama", tmp_path, max_position_embeddings=1024)
    arguments(monkeypatch, f"--model {model} --runs 2")
    structured.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("288 tokens; ")
    named = [line.partition(" median ")[0].rstrip() for line in lines if " median " in line]
    assert named[:4] == [f"compile, {name}" for name in structured.GRAMMARS] + ["mask of one row"]
    assert "mask 9 rows of logits, torch" in named
    assert lines[-1].startswith("2 of 2 texts the same; logprobs differ by 0.0e+00")


@needs_native
def test_milliseconds_of_the_native_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"LAYERS": 1, "INNER": 64, "VOCAB": 320}.items():
        monkeypatch.setattr(kernels_cpu, name, value)
    monkeypatch.setattr(kernels_cpu, "read_bandwidth", lambda: 10.0)
    arguments(monkeypatch, "--rows 2 64 --requests 2 --repeats 1 --threads 1")
    kernels_cpu.main()
    head, *sizes, columns, small, large = capsys.readouterr().out.splitlines()
    assert head.startswith("1 threads, ") and head.endswith("context 64, requests 2")
    assert [line.partition(":")[0] for line in sizes] == ["Q4_1/Q8_0", "bf16", "fp32"]
    assert columns.split()[:4] == ["rows", "Q4_1/Q8_0", "bf16", "fp32"]
    assert [len(line.split()) for line in (small, large)] == [7, 7]
    assert small.split()[0] == "2" and large.split()[0] == "64"


@needs_native
def test_milliseconds_of_sampling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_cpu, "VOCAB", 320)
    arguments(monkeypatch, "--sampling --rows 2 --repeats 1 --threads 1")
    kernels_cpu.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("sampling, 2 rows")
    assert [line[:18].strip() for line in rows] == list(kernels_cpu.SAMPLING)


def test_rows_that_requests_cannot_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_cpu, "native_unavailable", lambda: None)
    arguments(monkeypatch, "--rows 3 --requests 2")
    with pytest.raises(SystemExit):
        kernels_cpu.main()
    assert "--rows must be multiples of --requests 2" in capsys.readouterr().err
