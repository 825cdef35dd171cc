"""Who may import whom, read from the sources; and what must load without heavy packages."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from surefoot.cli.main import app
from surefoot.speculation import registry

SOURCES = Path(__file__).parents[2] / "src" / "surefoot"
FILES = sorted(SOURCES.rglob("*.py"))
NAMES = [path.relative_to(SOURCES).as_posix() for path in FILES]

# A room may import itself and those on lower floors; rooms of one floor do not know each other.
FLOORS = [
    {"errors"},
    {"cache", "structured"},
    {"params"},
    {"config", "request"},
    {"kernels"},
    {"models"},
    {"kv", "sampling"},
    {"speculation"},
    {"engine"},
    {"server", "certify", "bench", "train"},
    {"ray"},
    {"cli"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
REGISTRIES = [SOURCES / "speculation" / "registry.py", SOURCES / "train" / "registry.py"]
# Packages that only some rooms may import.
HOMES = {
    "triton": {"kernels"},
    "cuda": {"kernels"},
    "flash_attn": {"kernels"},
    "flashinfer": {"kernels"},
    "llguidance": {"sampling"},
    "ray": {"ray"},
    "typer": {"cli"},
    "rich": {"cli", "bench", "certify"},
}


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in the file, types included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(path: Path) -> str:
    room = path.relative_to(SOURCES).parts[0].removesuffix(".py")
    return "cli" if room == "__main__" else room


@pytest.mark.parametrize("name", NAMES)
def test_rooms_import_downwards(name: str) -> None:
    path = SOURCES / name
    room = room_of(path)
    if room == "__init__":
        return
    assert room in FLOOR, f"{room} has no floor"
    for module in imported(path):
        parts = module.split(".")
        if parts[0] != "surefoot" or len(parts) < 2 or parts[1] not in FLOOR:
            continue
        other = parts[1]
        assert other == room or FLOOR[other] < FLOOR[room], f"{name} imports {module}"


@pytest.mark.parametrize("name", NAMES)
def test_packages_stay_in_their_rooms(name: str) -> None:
    path = SOURCES / name
    for module in imported(path):
        homes = HOMES.get(module.split(".")[0])
        assert homes is None or room_of(path) in homes, f"{name} imports {module}"


@functools.cache
def words(path: Path) -> set[str]:
    """Identifiers, imported modules and texts of a file, docstrings left out."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = set(imported(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.add(node.value)
        for attribute in ("id", "attr", "arg", "name"):
            value = getattr(node, attribute, None)
            if isinstance(value, str):
                found.add(value)
    return found


WORDS_OF_OTHERS = {"grammar": "GrammarProposer"}
"""Whose name is also an option's: what to look for instead."""


def test_proposers_are_named_in_their_own_file_only() -> None:
    for proposer in registry.names():
        own = Path(sys.modules[registry.find(proposer).__module__].__file__ or "")
        if SOURCES / "speculation" not in own.parents:
            continue  # Another test registered it, or a benchmark did.
        # A proposer of several files is a package of its name.
        package = own.parent if own.parent.name == proposer else own
        for path in FILES:
            if path in (own, *REGISTRIES) or package in path.parents:
                continue
            # Whoever trains its networks is a package of its name, too.
            if SOURCES / "train" / proposer in path.parents:
                continue
            # As a word: an operation in kernels/ may be called after what it computes.
            word = WORDS_OF_OTHERS.get(proposer, proposer)
            found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", "\n".join(words(path)), re.I)
            assert found is None, f"{path} names {proposer}"


VERBS = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def loads_without(module: str, absent: tuple[str, ...]) -> None:
    """Import ``module`` in a fresh interpreter where ``absent`` cannot be imported."""
    blocks = "".join(f"sys.modules[{name!r}] = None; " for name in absent)
    code = f"import sys; {blocks}import {module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, f"{module} without {absent}:\n{result.stderr}"


def test_engine_needs_no_terminal_packages() -> None:
    loads_without("surefoot.engine.llm", ("typer", "rich"))


@pytest.mark.parametrize(
    "module",
    ["surefoot.engine.scheduler", "surefoot.request", "surefoot.config", "surefoot.structured"]
    + ["surefoot.cache"]
    + [f"surefoot.kv.{path.stem}" for path in sorted((SOURCES / "kv").glob("[a-z]*.py"))],
)
def test_bookkeeping_needs_no_torch(module: str) -> None:
    loads_without(module, ("torch",))


@pytest.mark.parametrize("module", ["main", *VERBS])
def test_command_line_starts_without_heavy_packages(module: str) -> None:
    heavy = ("torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "rich.progress")
    loads_without(f"surefoot.cli.{module}", heavy)


def test_a_list_of_the_verbs_imports_none() -> None:
    loads_without("surefoot.cli.main", tuple(f"surefoot.cli.{verb}" for verb in VERBS))
