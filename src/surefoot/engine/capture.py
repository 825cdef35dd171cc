"""Recording a sequence of operations as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from surefoot.engine.garbage import no_collections

Result = TypeVar("Result")


def capture(
    run: Callable[[], Result], pool: Any, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record ``run`` in ``pool``, after one call that compiles kernels and allocates what is kept.
    Returns the graph, and what ``run`` returned: tensors that every replay fills anew."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: that looks through all objects for garbage first, which takes longer
    # than recording. A collection meanwhile that finds the graphs of an engine that is gone would
    # destroy them, which spoils whatever is being recorded.
    with no_collections(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            result = run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph, result
