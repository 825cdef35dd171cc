"""Fixtures shared by every test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from surefoot.errors import SurefootError
from surefoot.models.loading import Checkpoint, load_checkpoint

# How long an example takes is the machine's business: a busy one is no failure.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The embedded model, in its own blocks. Skips where it can neither be found nor fetched."""
    try:
        return load_checkpoint("smollm2-135m", dtype=torch.float32, native=True)
    except SurefootError as error:
        pytest.skip(str(error))
