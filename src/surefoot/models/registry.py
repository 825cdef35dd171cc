"""The architectures that can be targets. A new one is a file like ``llama.py`` and a line here."""

from __future__ import annotations

from surefoot.errors import SurefootError
from surefoot.models.architecture import Architecture
from surefoot.models.llama import LLAMA
from surefoot.models.qwen2 import QWEN2
from surefoot.models.qwen3 import QWEN3

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3)


def by_name(name: str) -> Architecture:
    """The architecture of a ``ModelConfig.architecture``. Raises SurefootError when unknown."""
    return _find(name, {item.name: item for item in ARCHITECTURES})


def by_hf_name(name: str) -> Architecture:
    """The architecture of a config.json ``architectures`` entry, e.g. ``LlamaForCausalLM``.
    Raises SurefootError when unknown."""
    return _find(name, {alias: item for item in ARCHITECTURES for alias in item.hf_names})


def by_gguf_name(name: str) -> Architecture:
    """The architecture of a GGUF file's ``general.architecture``. Raises SurefootError when
    unknown."""
    return _find(name, {alias: item for item in ARCHITECTURES for alias in item.gguf_names})


def _find(name: str, table: dict[str, Architecture]) -> Architecture:
    if name not in table:
        raise SurefootError(
            "model",
            f"architecture {name!r} is not supported",
            "supported architectures: " + ", ".join(sorted(table)),
        )
    return table[name]
