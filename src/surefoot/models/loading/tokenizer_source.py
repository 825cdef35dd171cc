"""A model's tokenizer alone: what processes load that run no model, and so need no torch."""

from __future__ import annotations

from surefoot.cache import Progress
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_tokenizer import read_gguf_tokenizer
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.resolve import Source, resolve_model
from surefoot.models.loading.tokenizer import Tokenizer


def load_tokenizer(model: str, progress: Progress | None = None) -> tuple[str, Tokenizer]:
    """A model's name and its tokenizer, for processes that need no weights. ``model``,
    ``progress`` and errors as in ``load_checkpoint``."""
    source = resolve_model(model, progress)
    return source.name, tokenizer_of(source)


def tokenizer_of(source: Source, file: GgufFile | None = None) -> Tokenizer:
    """Of a source found; ``file``: its GGUF file, if that has been opened already."""
    if not source.gguf:
        return read_hf_tokenizer(source.path)
    tokenizer = read_gguf_tokenizer(file or GgufFile(source.path))
    tokenizer.add_chat_templates(source.templates)
    return tokenizer
