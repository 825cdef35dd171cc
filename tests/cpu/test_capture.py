"""What holds while a CUDA graph is recorded, as far as it shows without a GPU."""

from __future__ import annotations

import gc

import pytest

from surefoot.engine.capture import no_collections


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_not_collected_meanwhile_and_then_as_before(before: bool) -> None:
    collects = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(RuntimeError), no_collections():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == before
    finally:
        (gc.enable if collects else gc.disable)()
