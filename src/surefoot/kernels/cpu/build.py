"""Compiles the C kernels at first use and loads them with ctypes.

The library goes to Surefoot's cache folder, under a name made of the sources, the compiler and
the CPU, so a stale one is never loaded. Its SHA-256 follows it in its file (what follows an ELF
image is not loaded), so a damaged one is never loaded either: that could end the process. Checking
takes 0.3 ms. ``SUREFOOT_NATIVE=0`` turns it off; ``CC`` chooses the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surefoot.cache import USE_ANOTHER, cache_root, read_checked, write_checked
from surefoot.kernels.cpu.processor import processor_lines

SOURCES = Path(__file__).parent
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-pthread",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
]
TIMEOUT_S = 300

logger = logging.getLogger(__name__)


class _Unavailable(Exception):
    """Why there is no library, in words for the user."""


_LOCK = threading.Lock()


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("SUREFOOT_NATIVE") == "0":
        return None, "switched off by SUREFOOT_NATIVE=0"
    try:
        return _declare(_library()), None
    except (_Unavailable, OSError) as error:
        return None, str(error)


def load_native() -> ctypes.CDLL | None:
    """The library, compiled if need be, or None (``native_unavailable`` says why). Decided once per
    process. Raises SurefootError when there can be no cache folder, as ``cache_root`` does."""
    with _LOCK:
        return _load()[0]


def native_unavailable() -> str | None:
    """None when the native kernels can be used, else the reason in one line."""
    with _LOCK:
        return _load()[1]


def _compiler() -> str:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise _Unavailable(f"no C compiler found (looked for {', '.join(names)})")


def _cpu() -> str:
    """What -march=native depends on."""
    lines = processor_lines("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(sorted(lines) or [platform.processor()])])


def _flags() -> list[str]:
    # SUREFOOT_NATIVE_MARCH: further flags ("-mno-avx512f"), to test the slower variants.
    return FLAGS + os.environ.get("SUREFOOT_NATIVE_MARCH", "").split()


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"{command[0]} did not run: {error}") from error


def current_library() -> str | None:
    """The name in the cache's folder ``native`` of the library for these sources, this compiler and
    this CPU, whether it is there or not; None when there is no compiler that tells."""
    try:
        return _name(_compiler())
    except _Unavailable:
        return None


def describe_compiler() -> str | None:
    """Path and version of the C compiler; None when there is none that runs."""
    try:
        compiler = _compiler()
        lines = _run([compiler, "--version"]).stdout.splitlines()
    except _Unavailable:
        return None
    return ", ".join([compiler, *lines[:1]])


def _name(compiler: str) -> str:
    parts = [compiler, _run([compiler, "--version"]).stdout, " ".join(_flags()), _cpu()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"native-{digest.hexdigest()[:24]}.so"


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))


def is_whole(library: Path) -> bool:
    """Whether the file is a library as it was compiled, by its SHA-256."""
    return read_checked(library) is not None


def _library() -> ctypes.CDLL:
    compiler = _compiler()
    library = cache_root() / "native" / _name(compiler)
    if is_whole(library):
        return ctypes.CDLL(str(library))
    if os.path.exists(library):
        logger.warning("%s is damaged; the kernels are compiled again", library)
    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder:
        built = Path(folder) / library.name
        _compile([compiler, *_flags()], built)
        try:
            write_checked(library, built.read_bytes())
        except OSError as error:
            logger.warning(
                "the compiled kernels cannot be kept in %s (%s), so every start compiles them "
                "anew; %s",
                *(library.parent, error.strerror or error, USE_ANOTHER),
            )
            # It stays loaded when its file is gone.
            return ctypes.CDLL(str(built))
    return ctypes.CDLL(str(library))


def _compile(command: Sequence[str], library: Path) -> None:
    """Each source by itself, as many at a time as there are processors."""
    sources = [path for path in _sources() if path.suffix == ".c"]
    objects = [library.with_name(f"{path.stem}.o") for path in sources]
    pairs = zip(sources, objects, strict=True)
    steps = [[*command, "-c", str(source), "-o", str(target)] for source, target in pairs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run_compiler, steps))
    _run_compiler([*command, "-shared", *map(str, objects), "-o", str(library), "-lm"])


def _run_compiler(command: Sequence[str]) -> None:
    result = _run(command)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        detail = (lines or result.stderr.splitlines() or ["no message"])[0].strip()
        raise _Unavailable(f"{command[0]} could not compile the native kernels: {detail}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "sf_isa": (ctypes.c_char_p, []),
        "sf_release": (None, [pointer]),
        "sf_panel_bytes": (int64, [int32, int64]),
        "sf_pack": (None, [int32, pointer, int64, int64, pointer, int32]),
        "sf_embed": (int32, [pointer, pointer, int64, pointer, int32]),
        "sf_layers": (int32, [pointer, pointer, int64, *[pointer] * 7, int32]),
        "sf_target": (
            int32,
            [*([pointer] * 4), int64, *([pointer] * 5), ctypes.c_float, pointer, pointer, int32],
        ),
        "sf_move_keys": (
            None,
            [pointer, int64, int64, int64, pointer, int64, pointer, pointer, int64, int64],
        ),
        "sf_store_keys": (None, [pointer, pointer, pointer, pointer, int64, int32]),
        "sf_head": (
            int32,
            [pointer, pointer, ctypes.c_float, pointer, pointer, int64, pointer, pointer, int32],
        ),
        "sf_live_rows": (None, [pointer, pointer, int64, *([pointer] * 4)]),
        "sf_keep_rows": (
            int64,
            [pointer, int64, *([pointer] * 5), int64, pointer, pointer, *([int64] * 3)],
        ),
        "sf_block_rows": (None, [*([pointer] * 3), *([int64] * 3), pointer, pointer]),
        "sf_norm": (None, [pointer, int64, int64, pointer, ctypes.c_float, pointer]),
        "sf_entry": (
            int32,
            [pointer, pointer, int64, pointer, int64, pointer, pointer, ctypes.c_float, pointer],
        ),
        "sf_likeliest": (None, [pointer, int64, int64, pointer, *([pointer, int64] * 2)]),
        "sf_markov": (int32, [*([pointer] * 6), int64, int64, pointer, int32]),
        "sf_draft_blocks": (
            int32,
            [*([pointer] * 4), *([int64] * 3), pointer, pointer, int32],
        ),
        "sf_write_features": (int32, [*([pointer] * 8), int64, int64, pointer, int32]),
        "sf_ngram": (
            None,
            [pointer, int64, pointer, pointer, *([int64] * 5), pointer, pointer, pointer],
        ),
        "sf_write_drafts": (None, [pointer, pointer, int64, pointer, int64]),
        "sf_lay_out": (None, [*([pointer] * 5), *([int64] * 3), pointer]),
        "sf_judge": (
            None,
            [*([pointer] * 5), int64, pointer, int64, pointer, pointer, int64] + [pointer] * 6,
        ),
        "sf_split": (None, [*([pointer] * 3), *([int64] * 4), *([pointer] * 5)]),
        "sf_learn": (None, [pointer, int64, pointer, int64, *([pointer] * 4), int64]),
        "sf_report": (None, [pointer, pointer, int64, *([pointer] * 6), int64]),
        "sf_argmax": (None, [pointer, int64, int64, pointer, pointer, pointer, int32]),
        "sf_adjust": (int32, [pointer, pointer, int64, int64, pointer, int32]),
        "sf_mask": (int32, [pointer, int64, int64, pointer, int32]),
        "sf_draw": (int32, [pointer, pointer, int64, int64, pointer, pointer, int32]),
        "sf_scores": (int32, [pointer, int64, int64, pointer, pointer, int64, pointer, int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
