"""Recording CUDA graphs while others are dying."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
ON_DEVICE = False


class Gone:
    """An engine that only a garbage collection finds."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.own = graph, self


def test_the_graphs_of_an_engine_that_is_gone_do_not_spoil_a_recording() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from surefoot.engine.capture import capture

    counter = torch.zeros((), device="cuda")
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def count() -> None:
        if torch.cuda.is_current_stream_capturing():
            # So much garbage that it would be collected now.
            for _ in range(50):
                gc.set_threshold(20, 2, 2)
                assert len([[] for _ in range(500)]) == 500
        counter.add_(1)

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000, 10, 10)
    try:
        Gone(capture(lambda: counter.add_(1), pool, stream)[0])
        graph, _ = capture(count, pool, stream)
    finally:
        gc.set_threshold(*thresholds)
    before = float(counter)
    graph.replay()
    assert float(counter) == before + 1
