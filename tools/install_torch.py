"""Installs the torch that ``make`` uses into the environment of the Python that runs this.

torch goes first and by itself: left to choose, pip takes the package index's build, which on Linux
brings gigabytes of CUDA libraries that a CPU has no use for. CHOICE is one of

auto   what is installed already; else a CPU build, from wherever pip is configured to look or from
       PyTorch's own index; else the package index's build, whose size is said before it is fetched
cpu    a CPU build or nothing
pypi   the package index's build
other  a requirement (``torch==2.14.1``), a wheel's path or address, or the address of an index

FILE becomes a constraint that holds later installations to the torch that was installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

VERSION = "2.13.0"
"""What the tests are known to pass with."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_S = 5
"""How long PyTorch's index may take to answer."""
PIP = "pip>=25.3"
"""Its dry runs fetch no packages, and it resumes downloads that broke off."""
NOWHERE = "No matching distribution found"
"""What pip says when no place that it knows has the package."""


class NotInstalled(Exception):
    """Why there is no torch, in words for the user."""


def install(choice: str) -> str:
    """Install ``choice``, and return the version that is now there."""
    if choice == "auto":
        if not installed():
            install_best()
    elif choice == "cpu":
        if not (find_cpu_build() or find_cpu_build(CPU_INDEX)):
            raise NotInstalled(f"there is no CPU build of {VERSION} for this Python and system")
    elif choice == "pypi":
        install_from_package_index()
    else:
        pip("--no-deps", *as_arguments(choice), show=True)
    version = installed()
    if version is None:
        raise NotInstalled(f"{choice} is no torch")
    return version


def install_best() -> None:
    """A CPU build where one is to be had, else the package index's build."""
    # Elsewhere than on Linux that one is a CPU build.
    if sys.platform == "linux":
        if find_cpu_build():
            return
        problem = unreachable(CPU_INDEX)
        if problem is None:
            if find_cpu_build(CPU_INDEX):
                return
            problem = "has none that fits"
        say(f"No CPU build of torch {VERSION} at hand, and PyTorch's index of them {problem}.")
    install_from_package_index()


def find_cpu_build(index: str | None = None) -> bool:
    """Install the CPU build from ``index``, else from where pip is configured to look, if it is
    there."""
    if index:
        say(f"Downloading a CPU build of torch {VERSION} from PyTorch's index")
    else:
        say(f"Installing torch {VERSION}: a CPU build, where there is one")
    places = ["--index-url", index] if index else []
    try:
        pip("--no-deps", *places, f"torch=={VERSION}+cpu", show=index is not None)
    except NotInstalled as error:
        if NOWHERE in str(error):
            return False
        raise
    return True


def install_from_package_index() -> None:
    """Say how much there is to download, then download it."""
    # Unlike ==, === leaves out 2.13.0+cpu.
    build = f"torch==={VERSION}"
    pip(PIP)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("--dry-run", "--use-feature=fast-deps", "--report", str(report), build)
        missing = json.loads(report.read_text(encoding="utf-8"))["install"]
    if missing:
        sizes = download_sizes([item["download_info"]["url"] for item in missing])
        say(
            f"Installing torch {VERSION} from the package index: {in_words(sizes)} to download, in "
            f"{len(missing)} packages (make TORCH=… takes another build, see README)"
        )
        pip(build, show=True)


def as_arguments(choice: str) -> list[str]:
    """An index's address stands for its build of the usual version."""
    if choice.startswith(("http://", "https://")) and not choice.endswith(".whl"):
        return ["--index-url", choice, f"torch=={VERSION}"]
    return [choice]


def unreachable(index: str) -> str | None:
    """None if ``index`` answers, else what is wrong with it."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=ANSWER_S):
            return None
    except (OSError, HTTPException) as error:
        return f"does not answer ({error})"


def download_sizes(urls: list[str]) -> list[int | None]:
    """In bytes, as the servers tell; None where one does not."""

    def size(url: str) -> int | None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return int(answer.headers["Content-Length"])
        except (OSError, HTTPException, TypeError, ValueError):
            return None

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(size, urls))


def in_words(sizes: list[int | None]) -> str:
    """The sum in GB, or in MB where that is little; a lower bound where a size is unknown."""
    known = sum(size for size in sizes if size is not None)
    text = f"{known / 1e9:.1f} GB" if known >= 1e9 else f"{known / 1e6:.0f} MB"
    return f"more than {text}" if None in sizes else text


def say(line: str) -> None:
    """Before what pip prints, even into a pipe."""
    print(line, flush=True)


def installed() -> str | None:
    """The version of torch that is installed."""
    importlib.invalidate_caches()
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def pip(*arguments: str, show: bool = False) -> None:
    """``pip install``; only ``show`` lets it say what it does, which is worth seeing where it
    downloads much. A failure is raised with what it printed."""
    quiet = [] if show else ["--quiet", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *quiet]
    done = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise NotInstalled(f"pip install {' '.join(arguments)} failed:\n{done.stderr.strip()}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("choice", metavar="CHOICE")
    parser.add_argument("constraint", metavar="FILE", type=Path)
    given = parser.parse_args(arguments)
    try:
        version = install(given.choice)
    except NotInstalled as error:
        print(f"error: torch was not installed: {error}", file=sys.stderr)
        return 1
    given.constraint.write_text(f"torch=={version}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
