"""What a ``model`` option names: an embedded model, a folder, a GGUF file or a hub repository."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.cache import Progress
from surefoot.errors import SurefootError
from surefoot.models.loading.embedded import EMBEDDED, embedded_path
from surefoot.models.loading.hub import hub_cache_for

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(.+\.gguf))?")
HUB_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
]


@dataclass(frozen=True)
class Source:
    """``name`` for people; ``path`` is a Hugging Face folder or, with ``gguf``, a file.
    ``templates``: chat templates beside its own, by name."""

    name: str
    path: Path
    gguf: bool
    templates: Mapping[str, str] = field(default_factory=dict)


def resolve_model(model: str, progress: Progress | None = None) -> Source:
    """Find ``model``, fetching it where it is not local. In order: an embedded model's name, a
    path that exists, ``org/name`` or ``org/name:file.gguf`` on the Hugging Face hub. Raises
    SurefootError when it is none of these or cannot be fetched."""
    if model in EMBEDDED:
        path, templates = embedded_path(model, progress), EMBEDDED[model].templates()
        return Source(model, path, gguf=True, templates=templates)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return Source(path.resolve().name, path, gguf=False)
    if path.is_file():
        if path.suffix in (".safetensors", ".json", ".bin"):
            raise SurefootError(
                "model", f"{path} is one file of a checkpoint", f"give its folder: {path.parent}"
            )
        return Source(path.stem, path, gguf=True)
    match = HUB_ID.fullmatch(model)
    if match is None:
        raise SurefootError(
            "model",
            f"there is no model {model!r}",
            f"give one of {', '.join(EMBEDDED)}, a folder with config.json and safetensors, a "
            ".gguf file, or a Hugging Face id such as org/name or org/name:file.gguf",
        )
    if match[2]:
        return Source(Path(match[2]).stem, _hub_file(match[1], match[2]), gguf=True)
    return Source(match[1], _hub_folder(match[1], progress), gguf=False)


def _hub_folder(repository: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    cache = hub_cache_for(repository)
    if progress:
        progress(f"Downloading {repository}", 0, 0)
    try:
        folder = Path(snapshot_download(repository, allow_patterns=HUB_PATTERNS, cache_dir=cache))
    except Exception as error:  # the hub's client lets through its HTTP library's exceptions
        raise _unreachable(repository, error) from error
    if not (folder / "config.json").is_file():
        raise SurefootError(
            "model",
            f"{repository} has no config.json",
            f"for a GGUF repository name the file: {repository}:file.gguf",
        )
    return folder


def _hub_file(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    cache = hub_cache_for(repository)
    try:
        return Path(hf_hub_download(repository, file, cache_dir=cache))
    except Exception as error:  # as above
        raise _unreachable(f"{repository}:{file}", error) from error


def _unreachable(model: str, error: Exception) -> SurefootError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return SurefootError(
        "model",
        f"there is no local path {model!r} and it cannot be had from the Hugging Face hub "
        f"({lines[0][:200]})",
        "check the name, the network and, for gated models, your access; or give the path of a "
        f"downloaded folder or .gguf file, or an embedded model ({', '.join(EMBEDDED)})",
    )
