"""Checkpoints from disk or the hub: ``load_checkpoint`` and what is known without loading."""

from surefoot.models.loading.checkpoint import Checkpoint, load_checkpoint, load_tokenizer
from surefoot.models.loading.summary import inspect_model, list_local_models, read_model_config
from surefoot.models.loading.tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = [
    "Checkpoint",
    "IncrementalDetokenizer",
    "Tokenizer",
    "inspect_model",
    "list_local_models",
    "load_checkpoint",
    "load_tokenizer",
    "read_model_config",
]
