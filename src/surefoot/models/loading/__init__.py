"""Checkpoints from disk or the hub: ``load_checkpoint`` and what is known without loading."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.models.loading.checkpoint import Checkpoint, load_checkpoint
    from surefoot.models.loading.stored import prune, stored_entries
    from surefoot.models.loading.summary import (
        inspect_model,
        list_local_models,
        read_model_config,
    )
    from surefoot.models.loading.tokenizer import IncrementalDetokenizer, Tokenizer
    from surefoot.models.loading.tokenizer_source import load_tokenizer
    from surefoot.models.loading.verify import verify_model

# Loaded on first use, as a tokenizer needs no torch.
_HOMES = {
    "Checkpoint": "checkpoint",
    "IncrementalDetokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "inspect_model": "summary",
    "list_local_models": "summary",
    "load_checkpoint": "checkpoint",
    "load_tokenizer": "tokenizer_source",
    "prune": "stored",
    "read_model_config": "summary",
    "stored_entries": "stored",
    "verify_model": "verify",
}

__all__ = [
    "Checkpoint",
    "IncrementalDetokenizer",
    "Tokenizer",
    "inspect_model",
    "list_local_models",
    "load_checkpoint",
    "load_tokenizer",
    "prune",
    "read_model_config",
    "stored_entries",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
