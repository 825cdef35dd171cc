"""The cache folder: where it is, and what is written to it whole or not at all."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cache_harness import SUFFIX, convert, own_cache, quantized_model, write
from surefoot import cache
from surefoot.cache import cache_root, replacing, size_in_words, usage, working_folder
from surefoot.cli.main import app
from surefoot.errors import SurefootError
from surefoot.kernels.cpu import build
from surefoot.models.loading import load_checkpoint, prune, stored_entries
from surefoot.models.loading.hub import hub_caches


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_cache(tmp_path, monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return quantized_model(tmp_path / "model.gguf")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.setenv("SUREFOOT_CACHE", "~/mine")
    assert cache_root() == tmp_path / "home" / "mine"
    monkeypatch.delenv("SUREFOOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "surefoot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / "home" / ".cache" / "surefoot"
    monkeypatch.setenv("SUREFOOT_CACHE", "here")
    monkeypatch.chdir(tmp_path)
    assert cache_root() == tmp_path / "here"


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_is_no_cache(inside: bool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.write_text("")
    if inside:
        monkeypatch.setenv("SUREFOOT_CACHE", str(root / "folder"))
    message = f"{root / 'folder'} lies under {root}, a file" if inside else "is not a folder"
    for call in (cache_root, usage, stored_entries, prune, build._library):
        with pytest.raises(SurefootError, match="SUREFOOT_CACHE: the cache folder") as caught:
            call()
        assert message in str(caught.value)
        assert str(caught.value).endswith("; set SUREFOOT_CACHE to a folder that can be written")
    result = CliRunner().invoke(app, ["models", "list"])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: SUREFOOT_CACHE: the cache folder")


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("SUREFOOT_CACHE")
    problem = "^SUREFOOT_CACHE: this user has no home folder for a cache; set SUREFOOT_CACHE"
    for call in (cache_root, hub_caches, lambda: load_checkpoint("org/x", dtype=torch.float32)):
        with pytest.raises(SurefootError, match=problem):
            call()
    monkeypatch.setenv("SUREFOOT_CACHE", "~/cache")
    with pytest.raises(SurefootError, match="SUREFOOT_CACHE: ~/cache names no folder"):
        cache_root()


def test_usage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usage() == cache.Usage(root, {}, None)
    assert not root.exists()
    write(root / "models" / "one" / "two", 7)
    write(root / "native" / "three", 5)
    (root / "native" / "link").symlink_to(root / "models")
    write(root / "not ours", 99)
    assert usage().sizes == {"models": 7, "native": 5} and usage().total == 12
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert usage().problem == f"{root} cannot be written by this user"
    monkeypatch.setenv("SUREFOOT_CACHE", str(root / "new" / "newer"))
    assert usage().problem == f"{root} cannot be written by this user"


def test_sizes_in_words() -> None:
    sizes = (0, 999, 1000, 9_949, 98_362_432, 538_093_000, 1_400_000_000)
    words = ["0 bytes", "999 bytes", "1.0 kB", "9.9 kB", "98 MB", "538 MB", "1.4 GB"]
    assert [size_in_words(size) for size in sizes] == words


def test_replacing_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"
    with pytest.raises(KeyError), replacing(target) as file:
        file.write(b"half")
        raise KeyError
    assert list(target.parent.iterdir()) == []
    with replacing(target) as first, replacing(target) as second:
        first.write(b"first")
        second.write(b"second")
    assert target.read_bytes() == b"first"
    assert [item.name for item in target.parent.iterdir()] == ["file"]


def test_a_working_folder_goes(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"
    with working_folder(target) as one, working_folder(target) as other, replacing(target) as file:
        write(one / "deep" / "down")
        write(other / "deep" / "down")
        file.write(b"made")
    assert [item.name for item in target.parent.iterdir()] == ["file"]


def test_a_new_write_removes_leftovers_of_its_own(tmp_path: Path) -> None:
    target = tmp_path / "file[1]"
    leftover = write(tmp_path / f".file[1].{SUFFIX}")
    write(tmp_path / ".file[1].fedcba9876543210.part" / "wheel" / "half")
    others = [write(tmp_path / ".file[1].mine.part"), write(tmp_path / f".file1.{SUFFIX}")]
    with replacing(target):
        assert not leftover.exists()
    assert set(tmp_path.iterdir()) == {*others, target}


def test_without_locks_leftovers_are_told_by_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache.fcntl, "flock", unsupported)
    fresh, old = tmp_path / f".file.{SUFFIX}", tmp_path / f".file.a{SUFFIX[1:]}"
    write(fresh, age=3000)
    write(old, age=4000)
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert sorted(tmp_path.iterdir()) == [fresh, tmp_path / "file"]


def test_a_part_taken_for_a_leftover_before_its_lock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, taken = cache.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.glob("*.part"))
            taken[0].unlink()
        honest(descriptor, operation)

    monkeypatch.setattr(cache.fcntl, "flock", late)
    with replacing(tmp_path / "file") as file:
        file.write(b"whole")
    assert taken and (tmp_path / "file").read_bytes() == b"whole"


HANGING = """import sys, time, torch
from surefoot.models.loading import load_checkpoint

def hang(label, done, total):
    if done == 1:
        print("converting", flush=True)
        time.sleep(600)

load_checkpoint(sys.argv[1], dtype=torch.float32, progress=hang)"""


@pytest.fixture
def converter(model: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of converting ``model``."""
    command = [sys.executable, "-c", HANGING, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "converting\n"
        yield process
        process.kill()


def test_a_killed_conversion_is_cleared_away(
    converter: subprocess.Popen[str], model: Path, root: Path
) -> None:
    [part] = (root / "converted").iterdir()
    convert(model)
    entry, kept = sorted((root / "converted").iterdir(), key=lambda path: path.name[0] == ".")
    assert kept == part and entry.suffix == ".safetensors"
    [unfinished] = [item for item in prune(["unfinished"]) if item.kind == "unfinished"]
    assert unfinished.busy and unfinished.useless is None and part.exists()
    converter.send_signal(signal.SIGKILL)
    converter.wait()
    [unfinished] = [item for item in stored_entries() if item.kind == "unfinished"]
    assert not unfinished.busy and unfinished.useless == "left by an interrupted write"
    entry.unlink()
    convert(model)
    assert list((root / "converted").iterdir()) == [entry]
