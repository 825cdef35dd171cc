"""What the tests of the cache folder share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from surefoot.models.loading import load_checkpoint
from tiny_models import tiny_gguf, tiny_weights

HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
SUFFIX = "0123456789abcdef.part"


def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a test, which does not exist yet; there is no other one."""
    for name in HUB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quantized_model(path: Path) -> Path:
    """A tiny GGUF file with Q8_0 matrices."""
    config, weights = tiny_weights("llama", vocab_size=288)
    return tiny_gguf(path, config, weights, kind="Q8_0")


def convert(model: Path, dtype: torch.dtype = torch.float32) -> None:
    """Have the dense weights of a GGUF file in the cache."""
    load_checkpoint(str(model), dtype=dtype)


def write(path: Path, size: int = 10, age: float = 0.0) -> Path:
    """A file of ``size`` bytes that, like its folder, was last written ``age`` seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    for item in (path, path.parent):
        os.utime(item, (time.time() - age, time.time() - age))
    return path
