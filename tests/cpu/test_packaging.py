"""What a wheel holds, and how ``surefoot --version`` knows its commit."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from surefoot import __version__
from surefoot.cli import version
from surefoot.cli.main import app

ROOT = Path(__file__).parents[2]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=no")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with a package in src/surefoot."""
    package = tmp_path / "repository" / "src" / "surefoot"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    git(tmp_path / "repository", "init", "--quiet")
    git(tmp_path / "repository", "add", ".")
    git(tmp_path / "repository", "commit", "--quiet", "--message", "first")
    git(tmp_path / "repository", "tag", "v1")
    return tmp_path / "repository"


def test_version_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for commit, line in (("0123", f"surefoot {__version__} (commit 0123)"), (None, None)):
        monkeypatch.setattr(version, "known_commit", lambda commit=commit: commit)
        assert CliRunner().invoke(app, ["--version"]).stdout == (
            f"{line or f'surefoot {__version__}'}\n"
        )


def test_commit_of_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = checkout / "src" / "surefoot"
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert version.known_commit(package) == commit
    (package / "a.py").write_text("2")
    assert version.known_commit(package) == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "/nowhere")
    assert version.known_commit(package) is None


def test_commit_of_an_installation(checkout: Path) -> None:
    # An environment inside a checkout is not that checkout.
    package = checkout / "lib" / "surefoot"
    package.mkdir(parents=True)
    assert version.known_commit(package) is None
    (package / "commit.txt").write_text("0123\n")
    assert version.known_commit(package) == "0123"


def build(folder: Path) -> dict[str, bytes]:
    """The files of a wheel of this tree."""
    [path] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def test_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_COMMIT", "0123456789ab")
    files = build(tmp_path)
    assert files["surefoot/commit.txt"] == b"0123456789ab\n"
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "surefoot").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    held = {name for name in files if name.startswith("surefoot/")}
    assert held == sources | {"surefoot/commit.txt"}
    assert {"surefoot/py.typed", "surefoot/kernels/cpu/gemm.c"} <= sources
    [metadata] = [text for name, text in files.items() if name.endswith("/METADATA")]
    assert b"Classifier: Typing :: Typed" in metadata


def test_wheel_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # No git.
    assert "surefoot/commit.txt" not in build(tmp_path)


def test_editable_installation_asks_git_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_COMMIT", "0123456789ab")
    hooks = runpy.run_path(str(ROOT / "hatch_build.py"))
    for kind in ("editable", "standard"):
        hook = hooks["CommitHook"](str(ROOT), {}, None, None, "", "wheel")
        data: dict[str, Any] = {"force_include": {}}
        hook.initialize(kind, data)
        assert list(data["force_include"].values()) == (
            [] if kind == "editable" else ["surefoot/commit.txt"]
        )
        hook.finalize(kind, data, "")


def test_every_requirement_has_a_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["server"], *extras["structured"]]:
        assert re.match(r"surefoot\[|[\w-]+>=\d", text), text
