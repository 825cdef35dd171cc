"""Which torch ``make`` installs: the real pip and made-up packages, in places of this machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pip
import pytest

import install_torch
from install_torch import VERSION, as_arguments, in_words

pytestmark = pytest.mark.slow
TOOLS = Path(install_torch.__file__).parent
# Here pip stays as it is, and PyTorch's index is another one.
RUN = """
import sys, install_torch
install_torch.PIP = "pip"
install_torch.CPU_INDEX = sys.argv.pop(1)
sys.exit(install_torch.main(sys.argv[1:]))
"""


def add_wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    """An empty package."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {item}\n" for item in requires)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Machine:
    """An environment, and the places where pip finds packages."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.pin = folder / "torch.txt"
        self.links = folder / "links"
        self.links.mkdir()
        (folder / "modules").mkdir()
        site = Path(pip.__file__).parent.parent
        for name in ("pip", f"pip-{pip.__version__}.dist-info"):
            (folder / "modules" / name).symlink_to(site / name)
        venv.create(folder / "venv")
        [self.packages] = (folder / "venv").glob("lib/python*/site-packages")

    def clear(self) -> None:
        self.pin.unlink(missing_ok=True)
        for path in (*self.links.iterdir(), *self.packages.glob("*.py")):
            path.unlink()
        for path in self.packages.glob("*.dist-info"):
            shutil.rmtree(path)

    def install(
        self, choice: str, cpu_index: str = "http://127.0.0.1:1/none"
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment = kept | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.address}/index",
            "PIP_FIND_LINKS": str(self.links),
            "PIP_NO_CACHE_DIR": "1",
            "PYTHONPATH": f"{TOOLS}{os.pathsep}{self.folder / 'modules'}",
        }
        command = [self.folder / "venv" / "bin" / "python", "-c", RUN, cpu_index, choice, self.pin]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def has(self, version: str) -> bool:
        """Whether that torch is installed, alone, and the constraint says so."""
        names = [path.name for path in self.packages.glob("torch-*.dist-info")]
        pin = self.pin.read_text()
        return names == [f"torch-{version}.dist-info"] and pin == f"torch=={version}\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    add_wheel(folder / "index" / "torch", "torch", VERSION, "cudalib")
    add_wheel(folder / "index" / "cudalib", "cudalib", "1.0")
    add_wheel(folder / "cpu" / "torch", "torch", f"{VERSION}+cpu")
    (folder / "empty" / "torch").mkdir(parents=True)
    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Machine(folder, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


@pytest.fixture
def machine(place: Machine) -> Machine:
    place.clear()
    return place


needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the package index's build is a CPU build"
)


@needs_linux
def test_a_cpu_build_at_hand_is_taken_and_kept(machine: Machine) -> None:
    add_wheel(machine.links, "torch", f"{VERSION}+cpu")
    add_wheel(machine.links, "torch", "2.99.0+cpu")
    for said in (f"Installing torch {VERSION}: a CPU build, where there is one\n", ""):
        done = machine.install("auto", f"{machine.address}/cpu")
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
        assert machine.has(f"{VERSION}+cpu")


@needs_linux
def test_else_one_from_pytorch(machine: Machine) -> None:
    done = machine.install("auto", f"{machine.address}/cpu")
    assert done.returncode == 0, done.stderr
    assert "from PyTorch's index" in done.stdout
    assert machine.has(f"{VERSION}+cpu")


@pytest.mark.parametrize("index", ["none", "empty"])
def test_else_the_package_indexs_with_its_size(index: str, machine: Machine) -> None:
    done = machine.install("auto", f"{machine.address}/{index}")
    assert done.returncode == 0, done.stderr
    if sys.platform == "linux":
        words = {"none": "does not answer", "empty": "has none that fits"}
        assert words[index] in done.stdout
    assert "to download, in 2 packages" in done.stdout
    assert done.stdout.index("to download") < done.stdout.index("Successfully installed")
    assert machine.has(VERSION)


def test_a_choice_replaces_what_is_there(machine: Machine) -> None:
    """By path, by an index's address, by name; auto then leaves it alone."""
    path = add_wheel(machine.folder, "torch", "2.12.0")
    for choice, version in [
        (str(path), "2.12.0"),
        (f"{machine.address}/cpu", f"{VERSION}+cpu"),
        ("pypi", VERSION),
        ("auto", VERSION),
    ]:
        done = machine.install(choice)
        assert done.returncode == 0, done.stderr
        assert machine.has(version)


@needs_linux
def test_cpu_is_a_cpu_build_or_nothing(machine: Machine) -> None:
    done = machine.install("cpu", f"{machine.address}/empty")
    assert done.returncode == 1 and not machine.pin.exists()
    assert "there is no CPU build" in done.stderr


@needs_linux
def test_a_broken_cpu_build_is_no_reason_to_take_another(machine: Machine) -> None:
    (machine.links / f"torch-{VERSION}+cpu-py3-none-any.whl").write_text("broken off")
    done = machine.install("auto", f"{machine.address}/cpu")
    assert done.returncode == 1 and not machine.pin.exists()
    assert "is invalid" in done.stderr


def test_failures_are_told(machine: Machine) -> None:
    done = machine.install("torch==1.0")
    assert done.returncode == 1 and not machine.pin.exists()
    assert "error: torch was not installed" in done.stderr and "torch==1.0" in done.stderr
    other = add_wheel(machine.folder, "cudalib", "1.0")
    assert f"{other} is no torch" in machine.install(str(other)).stderr


def test_addresses() -> None:
    index = "https://mirror.example/whl/cpu"
    assert as_arguments(index) == ["--index-url", index, f"torch=={VERSION}"]
    assert as_arguments(f"{index}/torch.whl") == [f"{index}/torch.whl"]
    assert as_arguments("torch>=2.14") == ["torch>=2.14"]


def test_sizes_in_words() -> None:
    assert in_words([2_000_000_000, 700_000_000]) == "2.7 GB"
    assert in_words([80_000_000]) == "80 MB"
    assert in_words([2_000_000_000, None]) == "more than 2.0 GB"
