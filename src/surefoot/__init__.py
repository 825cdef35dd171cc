"""Surefoot: LLM inference with speculative decoding that is exact and never slower."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.config import EngineConfig
    from surefoot.engine.llm import LLM
    from surefoot.engine.output import CompletionOutput, RequestOutput, StreamChunk
    from surefoot.errors import SurefootError
    from surefoot.request import SamplingParams, SpeculationParams

__version__ = "0.1.0"

# Loaded on first use, so that importing the package costs next to nothing.
_HOMES = {
    "CompletionOutput": "surefoot.engine.output",
    "EngineConfig": "surefoot.config",
    "LLM": "surefoot.engine.llm",
    "RequestOutput": "surefoot.engine.output",
    "SamplingParams": "surefoot.request",
    "SpeculationParams": "surefoot.request",
    "StreamChunk": "surefoot.engine.output",
    "SurefootError": "surefoot.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculationParams",
    "StreamChunk",
    "SurefootError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
