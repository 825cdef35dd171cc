"""What a checkpoint is, told without loading its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from surefoot.cache import Progress
from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig, RopeScaling
from surefoot.models.loading.embedded import EMBEDDED
from surefoot.models.loading.gguf_config import read_gguf_config
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_file import canonical_name
from surefoot.models.loading.gguf_tokenizer import read_gguf_tokenizer
from surefoot.models.loading.hf_config import read_hf_config
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.hub import hub_caches, repository_name
from surefoot.models.loading.resolve import resolve_model
from surefoot.models.loading.safetensors_dir import read_safetensors_header, weight_files
from surefoot.models.loading.sampling_defaults import read_gguf_sampling, read_hf_sampling
from surefoot.models.loading.tokenizer import Tokenizer


def inspect_model(model: str, progress: Progress | None = None) -> dict[str, Any]:
    """Facts about ``model`` (named as for ``load_checkpoint``), JSON-ready: ``name``, ``source``,
    ``format``, ``architecture``, ``parameters``, ``sizes``, ``tensor_types`` (type -> number of
    tensors), ``tied_embeddings``, ``rope``, ``context_length``, ``vocabulary``, ``bos_token``,
    ``eos_tokens``, ``chat_template``, ``sampling_defaults`` (fields of ``SamplingParams`` that the
    model recommends, or None), ``file_bytes``. Raises SurefootError as loading would."""
    source = resolve_model(model, progress)
    if source.gguf:
        file = GgufFile(source.path)
        config, tokenizer = read_gguf_config(file), read_gguf_tokenizer(file)
        known = [item for item in file.tensors.values() if canonical_name(item.name)]
        tensors = [(item.shape, item.kind) for item in known]
        size, defaults = source.path.stat().st_size, read_gguf_sampling(file)
    else:
        config, tokenizer = read_hf_config(source.path), read_hf_tokenizer(source.path)
        tensors = list(read_safetensors_header(source.path).values())
        size = sum(path.stat().st_size for path in weight_files(source.path))
        defaults = read_hf_sampling(source.path)
    return {
        "name": source.name,
        "source": str(source.path),
        "format": "gguf" if source.gguf else "safetensors",
        "architecture": config.architecture,
        "parameters": sum(prod(shape) for shape, _ in tensors),
        "sizes": _sizes(config),
        "tensor_types": dict(Counter(kind for _, kind in tensors).most_common()),
        "tied_embeddings": config.tied_embeddings,
        "rope": _rope(config),
        "context_length": config.max_positions,
        "vocabulary": tokenizer.vocab_size,
        "bos_token": _token(tokenizer, config.bos_token_id),
        "eos_tokens": [_token(tokenizer, token) for token in config.eos_token_ids],
        "chat_template": tokenizer.chat_template is not None,
        "sampling_defaults": dict(defaults.values) or None,
        "file_bytes": size,
    }


def read_model_config(model: str, progress: Progress | None = None) -> ModelConfig:
    """The sizes and constants of ``model``. Raises SurefootError as loading would."""
    source = resolve_model(model, progress)
    return read_gguf_config(GgufFile(source.path)) if source.gguf else read_hf_config(source.path)


def list_local_models() -> list[dict[str, Any]]:
    """Models that can be named without a path: the embedded ones, then those of supported
    architectures that came from the Hugging Face hub. Each has ``name``, ``kind`` (``embedded`` or
    ``hub``), ``local`` (already on this machine), ``path`` and ``bytes``."""
    models: list[dict[str, Any]] = []
    for name, embedded in EMBEDDED.items():
        models.append(_model(name, "embedded", embedded.path if embedded.is_here else None))
    for cache in hub_caches():
        try:
            folders = sorted(cache.glob("models--*--*/snapshots/*"))
        except OSError as error:
            raise SurefootError("HF_HOME", f"{cache} cannot be read: {error.strerror}") from error
        for folder in folders:
            try:
                read_hf_config(folder)
                weight_files(folder)
            except SurefootError:
                continue
            models.append(_model(repository_name(folder.parent.parent), "hub", folder))
    return models


def _model(name: str, kind: str, path: Path | None) -> dict[str, Any]:
    facts = {"name": name, "kind": kind, "local": path is not None}
    if path is None:
        return {**facts, "path": None, "bytes": None}
    # The files of the hub's snapshots are links to where they lie.
    files = [path] if path.is_file() else filter(Path.is_file, path.rglob("*"))
    return {**facts, "path": str(path), "bytes": sum(file.stat().st_size for file in files)}


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "layers": config.layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
    }


def _rope(config: ModelConfig) -> dict[str, Any]:
    """The settings that differ from those of unscaled RoPE."""
    usual = asdict(RopeScaling())
    scaling = asdict(config.rope_scaling)
    changed = {key: value for key, value in scaling.items() if value != usual[key]}
    return {"theta": config.rope_theta, "kind": scaling["kind"], **changed}


def _token(tokenizer: Tokenizer, token: int | None) -> dict[str, Any] | None:
    return None if token is None else {"id": token, "text": tokenizer.piece(token)}
