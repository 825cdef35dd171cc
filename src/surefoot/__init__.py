"""Surefoot: LLM inference with speculative decoding that is exact and never slower."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.config import EngineConfig
    from surefoot.engine.llm import LLM
    from surefoot.engine.output import CompletionOutput, RequestOutput, StreamChunk
    from surefoot.errors import SurefootError
    from surefoot.request import SamplingParams, SpeculationParams
    from surefoot.structured import StructuredOutputsParams

__version__ = "0.1.0"

# Torch's OpenMP workers wait by spinning for milliseconds, which takes the CPU that the kernels'
# own threads, or another program, need. The runtime reads this when it is loaded, so it is set
# before torch is imported; whoever chose a policy keeps it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Loaded on first use, so that importing the package costs next to nothing.
_HOMES = {
    "CompletionOutput": "surefoot.engine.output",
    "EngineConfig": "surefoot.config",
    "LLM": "surefoot.engine.llm",
    "RequestOutput": "surefoot.engine.output",
    "SamplingParams": "surefoot.request",
    "SpeculationParams": "surefoot.request",
    "StreamChunk": "surefoot.engine.output",
    "StructuredOutputsParams": "surefoot.structured",
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
    "StructuredOutputsParams",
    "SurefootError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
