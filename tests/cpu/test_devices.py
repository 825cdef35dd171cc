"""Devices by name, on a machine that only seems to have GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from surefoot.config import EngineConfig
from surefoot.engine.build import choose_backend
from surefoot.errors import SurefootError


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs; keeps what is passed to the driver."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", found.append, raising=False)
    return found


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_by_its_name(name: str, index: int, chosen: list[int]) -> None:
    backend = choose_backend(EngineConfig(device=name, backend="torch"))
    assert backend.device.type == "cuda" and chosen == [index]


@pytest.mark.parametrize("name", ["cuda:2", "mps", "gpu"])
def test_devices_that_are_not_there(name: str, chosen: list[int]) -> None:
    with pytest.raises(SurefootError, match="device"):
        choose_backend(EngineConfig(device=name))
    assert chosen == []


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({}, 32, 256),
        ({"device": "cuda"}, 128, 8192),
        ({"device": "cuda:1", "max_num_seqs": 4}, 4, 8192),
        ({"max_num_seqs": 400}, 400, 400),
        ({"device": "cuda", "max_num_batched_tokens": 300}, 128, 300),
    ],
)
def test_a_gpu_runs_more_at_once(given: dict[str, Any], seqs: int, tokens: int) -> None:
    config = EngineConfig.from_dict(given)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)


@pytest.mark.parametrize("option", ["backend", "weights"])
def test_native_kernels_are_refused_on_a_gpu(option: str, chosen: list[int]) -> None:
    config = SimpleNamespace(device="cuda", backend="auto", weights="auto")
    setattr(config, option, "native")
    with pytest.raises(SurefootError, match=f"{option}: native kernels run on a CPU only"):
        choose_backend(cast(EngineConfig, config))
    assert chosen == []


def test_a_gpu_s_kernels_need_a_gpu() -> None:
    with pytest.raises(SurefootError, match="backend: triton needs an NVIDIA GPU"):
        choose_backend(EngineConfig(device="cpu", backend="triton"))
