"""What the cache folder holds, whose it is, and pruning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cache_harness import HUB_VARIABLES, SUFFIX, convert, own_cache, quantized_model, write
from surefoot.cache import size_in_words
from surefoot.cli.main import app
from surefoot.errors import SurefootError
from surefoot.kernels.cuda.machine_code import current_sources
from surefoot.models.loading import load_checkpoint, prune, stored_entries
from surefoot.models.loading.embedded import EMBEDDED
from surefoot.models.loading.hub import hub_cache_for, hub_caches


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_cache(tmp_path, monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return quantized_model(tmp_path / "model.gguf")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["models", *arguments])


def useless() -> dict[str, str | None]:
    return {entry.path.name: entry.useless for entry in stored_entries()}


def test_converted_weights_belong_to_their_source(
    model: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(model)
    convert(model, torch.bfloat16)
    first, second = stored_entries()
    assert first.model == second.model == str(model) and first.useless is second.useless is None
    assert {first.bytes, second.bytes} == {
        path.stat().st_size for path in first.path.parent.iterdir()
    }
    assert prune() == []
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert set(useless().values()) == {f"{model} has changed"}
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert set(useless().values()) == {None}
    model.unlink()
    assert set(useless().values()) == {f"{model} is gone"}
    assert prune(dry_run=True) == stored_entries() != []
    prune()
    assert list((root / "converted").iterdir()) == []


def test_converted_weights_of_another_version(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(root / "converted" / f"model-{'0' * 24}.safetensors")
    write(root / "converted" / "something-else.safetensors")
    monkeypatch.setattr("surefoot.models.loading.converted.FORMAT", 1)
    convert(model)
    monkeypatch.undo()
    monkeypatch.setenv("SUREFOOT_CACHE", str(root))
    assert set(useless().values()) == {"of another version of Surefoot"} and len(useless()) == 2
    prune()
    assert not old.exists()
    assert [path.name for path in (root / "converted").iterdir()] == ["something-else.safetensors"]


def test_the_cache_can_be_moved(
    model: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Path(EMBEDDED["smollm2-135m"].member).name
    (root / "models").mkdir(parents=True)
    convert(model.rename(root / "models" / name))
    root.rename(tmp_path / "moved")
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "moved"))
    embedded, converted = stored_entries()
    assert embedded.model == converted.model == embedded.name == "smollm2-135m"
    assert converted.useless is None
    assert prune(["smollm2-135m"]) == [embedded, converted] and stored_entries() == []


def test_libraries_of_other_machines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = f"native-{'1' * 24}.so"
    other = write(root / "native" / f"native-{'2' * 24}.so")
    write(root / "native" / current)
    write(root / "native" / "native.so")
    fresh = write(root / "native" / "build-abc" / "a.o").parent
    stale = write(root / "native" / "build-def" / "a.o", age=4000).parent
    monkeypatch.setattr("surefoot.models.loading.stored.current_library", lambda: None)
    assert [item.path for item in prune(dry_run=True)] == [stale]
    monkeypatch.setattr("surefoot.models.loading.stored.current_library", lambda: current)
    assert useless()[current] is None and useless()[other.name] is not None
    assert {item.path for item in prune()} == {other, stale}
    assert not other.exists() and not stale.exists() and fresh.exists()


def test_machine_code_of_other_sources(root: Path) -> None:
    current = write(root / "cuda" / f"{current_sources()}-{'1' * 24}.cubin")
    other = write(root / "cuda" / f"{'2' * 16}-{'1' * 24}.cubin")
    write(root / "cuda" / "mine.cubin")
    assert useless()[current.name] is None and useless()[other.name] is not None
    assert [item.path for item in prune()] == [other]
    assert current.exists() and not other.exists()


def test_a_wheel_put_there_by_hand_goes_by_its_name_only(root: Path) -> None:
    wheel = write(root / "wheels" / EMBEDDED["smollm2-135m"].wheel)
    write(root / "models" / Path(EMBEDDED["smollm2-135m"].member).name)
    assert [entry.kind for entry in prune(["smollm2-135m"])] == ["embedded"]
    assert prune(everything=True) == []
    prune([wheel.name])
    assert not wheel.exists()


def repository(cache: Path, name: str = "org/some--name", file: str = "model.safetensors") -> Path:
    """As the hub's client lays it out. All have the same revision, as copies do on the hub."""
    folder = cache / f"models--{name.replace('/', '--')}"
    write(folder / "blobs" / "abc", 1000)
    (folder / "snapshots" / "rev").mkdir(parents=True)
    (folder / "snapshots" / "rev" / file).symlink_to(Path("../../blobs/abc"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("rev")
    return folder


def test_where_hub_models_go(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    assert hub_caches() == [root / "hub", shared]
    assert hub_cache_for("org/some--name") == root / "hub"
    repository(shared)
    assert hub_cache_for("org/some--name") == shared
    repository(root / "hub")
    assert hub_cache_for("org/some--name") == root / "hub"
    for name, value in zip(HUB_VARIABLES, ("a", "b", "c"), strict=True):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / value))
            assert hub_caches() == [tmp_path / value / ("hub" if name == "HF_HOME" else "")]
    monkeypatch.delenv("SUREFOOT_CACHE")
    assert hub_caches() == [shared]


def test_downloads_from_the_hub_go_to_the_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from surefoot.speculation.proposers.eagle3.checkpoint import find_folder

    asked: list[Any] = []

    def download(*_: Any, cache_dir: Path, **__: Any) -> str:
        asked.append(cache_dir)
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for name in ("org/name", "org/name:file.gguf"):
        with pytest.raises(SurefootError):
            load_checkpoint(name, dtype=torch.float32)
    with pytest.raises(SurefootError):
        find_folder("org/name")
    assert asked == [root / "hub"] * 3


def test_hub_models_are_pruned_by_name(root: Path, tmp_path: Path) -> None:
    shared = repository(tmp_path / "home" / ".cache" / "huggingface" / "hub", "org/shared")
    folder = repository(root / "hub")
    other = repository(root / "hub", "org/other")
    sizes = {entry.name: entry.bytes for entry in stored_entries()}
    assert sizes == {"org/some--name": 1000, "org/other": 1000}
    stale = write(folder / "blobs" / "def.incomplete", age=4000)
    fresh = write(folder / "blobs" / "ghi.incomplete")
    assert [entry.path for entry in prune()] == [stale]
    # While something is being downloaded into it, it stays.
    busy = prune(["org/some--name"])
    assert [entry.busy for entry in busy] == [True] and folder.exists()
    write(fresh, age=4000)
    prune(["org/some--name"])
    assert not folder.exists() and other.exists()
    with pytest.raises(SurefootError, match=r"name: there is no 'org/shared' in .* `hf cache rm`"):
        prune(["org/shared"])
    prune(everything=True)
    assert not other.exists() and shared.exists()


def test_a_hub_model_takes_its_converted_weights_along(root: Path, model: Path) -> None:
    folder = repository(root / "hub", "org/name", "file.gguf")
    (folder / "blobs" / "abc").write_bytes(model.read_bytes())
    convert(folder / "snapshots" / "rev" / "file.gguf")
    _, converted = stored_entries()
    assert converted.model == "org/name:file.gguf" and not converted.useless
    assert prune(["org/name:file.gguf"], dry_run=True) == [converted]
    prune(["org/name"])
    assert stored_entries() == []


def test_triton_compiles_into_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    code = "import surefoot.kernels.triton.launch, triton; print(triton.knobs.cache.dir)"

    def folder(**environment: str) -> str:
        command = [sys.executable, "-c", code]
        variables = {**os.environ, **environment}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    assert folder() == str(root / "triton")
    assert folder(TRITON_CACHE_DIR="/elsewhere") == "/elsewhere"
    assert folder(TRITON_HOME="/home") == "/home/.triton/cache"
    monkeypatch.delenv("SUREFOOT_CACHE")
    assert folder() == str(root.parent / "home" / ".triton" / "cache")


def test_triton_kernels_are_kept_for_an_hour(root: Path) -> None:
    write(root / "triton" / ("A" * 52) / "kernel.cubin", 5, age=4000)
    fresh = write(root / "triton" / ("B" * 52) / "kernel.cubin", 7).parent
    write(root / "triton" / "setup.py")
    assert [(entry.name, entry.bytes) for entry in stored_entries()] == [
        ("triton", 5),
        ("triton", 7),
    ]
    assert prune() == []
    assert [entry.busy for entry in prune(["kernels"])] == [False, True]
    assert sorted((root / "triton").iterdir()) == [fresh, root / "triton" / "setup.py"]


def test_nothing_outside_the_cache_is_touched(root: Path, tmp_path: Path, model: Path) -> None:
    outside = write(tmp_path / "outside" / f"x-{'0' * 24}.safetensors").parent
    root.mkdir()
    (root / "converted").symlink_to(outside)
    linked = write(tmp_path / "elsewhere" / f"native-{'0' * 24}.so")
    (root / "native").mkdir()
    (root / "native" / linked.name).symlink_to(linked)
    kept = [
        write(root / "models" / "my-own.gguf"),
        write(root / "wheels" / "some.whl"),
        write(root / "hub" / "notes.txt"),
        write(root / "triton" / "README.md"),
        write(root / "data" / "file"),
        write(root / "native" / ".hidden.part"),
    ]
    prune(everything=True)
    assert all(path.exists() for path in [*kept, linked]) and len(list(outside.iterdir())) == 1
    assert not (root / "native" / linked.name).is_symlink()


def test_models_list_shows_sizes(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Path(EMBEDDED["smollm2-135m"].member).name
    assert "fetched on first use" in run("list").stdout
    (root / "models").mkdir(parents=True)
    convert(model.rename(root / "models" / name))
    leftover = write(root / "converted" / f".old.{SUFFIX}", 2000)
    size = (root / "models" / name).stat().st_size
    described = replace(EMBEDDED["smollm2-135m"], size=size)
    monkeypatch.setitem(EMBEDDED, "smollm2-135m", described)
    first, second, *drafters, third, last = run("list").stdout.splitlines()
    assert first.split() == [
        "smollm2-135m",
        "embedded",
        *size_in_words(size).split(),
        str(root / "models" / name),
    ]
    assert second.split()[:2] == ["smollm2-135m", "converted"]
    assert [line.split()[:2] for line in drafters] == [
        ["smollm2-135m", "dflash"],
        ["smollm2-135m", "eagle3"],
    ]
    assert third.split()[:3] == ["unfinished", "2.0", "kB"] and "interrupted write" in third
    facts = json.loads(run("list", "--json").stdout)
    assert facts["models"][0]["bytes"] == size and facts["cache"] == str(root)
    assert [entry["kind"] for entry in facts["entries"]] == ["embedded", "converted", "unfinished"]
    assert facts["bytes"] == sum(entry["bytes"] for entry in facts["entries"])
    assert facts["useless_bytes"] == 2000
    total = size_in_words(facts["bytes"])
    assert (
        last == f"{total} in {root} (SUREFOOT_CACHE moves it); `surefoot models prune` frees 2.0 kB"
    )
    assert leftover.exists()


@pytest.mark.parametrize("own", [True, False])
def test_folders_that_cannot_be_read(
    own: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    closed = root / "converted" if own else hub
    closed.mkdir(parents=True)
    for name in ("iterdir", "glob"):
        honest = getattr(Path, name)

        def refuse(path: Path, *arguments: str, honest: Any = honest) -> Any:
            if path == closed:
                raise PermissionError(13, "Permission denied", str(path))
            return honest(path, *arguments)

        monkeypatch.setattr(Path, name, refuse)
    result = run("list")
    option = "SUREFOOT_CACHE" if own else "HF_HOME"
    assert result.stderr == f"error: {option}: {closed} cannot be read: Permission denied\n"
    assert result.exit_code == 1


def test_models_prune(root: Path, model: Path) -> None:
    convert(model)
    [converted] = (root / "converted").iterdir()
    leftover = write(root / "native" / f".native.{SUFFIX}", 2000)
    shown = run("prune", "--dry-run").stdout.splitlines()
    assert shown[0] == f"would go: {leftover}, 2.0 kB (left by an interrupted write)"
    assert shown[1:] == [f"2.0 kB would be freed in {root}"] and leftover.exists()
    assert run("prune").stdout.splitlines()[-1] == f"2.0 kB freed in {root}"
    assert not leftover.exists() and converted.exists()
    result = run("prune", "nonsense")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: name: there is no 'nonsense' in {root}; ")
    assert f"removed: {converted}" in run("prune", str(model)).stdout
    assert not converted.exists()
    convert(model)
    assert f"removed: {converted}" in run("prune", "--all").stdout
    assert run("prune", "--all").stdout == f"0 bytes freed in {root}\n"
