"""Tiny engines on the device, with proposers that a recorded round can hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness import Job, random_weights, run_jobs, tiny_config
from surefoot.certify.probes import GarbageProbe, MixedProbe
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SpeculationParams
from surefoot.speculation import registry


class DeviceOracle(MixedProbe):
    """Mostly right, as the harness's oracle, without reading on the host."""

    name = "oracle"


class DeviceSaboteur(GarbageProbe):
    """As the harness's saboteur, likewise."""

    name = "saboteur"


def register_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, the names of the harness's proposers stand for these."""
    monkeypatch.setattr(registry, "_PROPOSERS", dict(registry._PROPOSERS))
    for proposer in (DeviceOracle, DeviceSaboteur):
        registry.register(proposer)


@functools.cache
def device_decoder(max_positions: int = 160) -> Decoder:
    """The harness's model in float32: the same weights as on the CPU."""
    config = tiny_config(max_positions=max_positions)
    return Decoder(config, random_weights(config), TritonBackend("cuda", torch.float32))


def device_engine(decoder: Decoder, **options: Any) -> Engine:
    """Small and quick to start. ``enforce_eager``: rounds are called, not recorded."""
    values: dict[str, Any] = dict(
        device="cuda", kv_blocks=400, block_size=4, calibration_seconds=0.0, max_num_seqs=4
    )
    return Engine(decoder, EngineConfig(**{**values, **options}))


def plain_texts(decoder: Decoder, jobs: Sequence[Job], **options: Any) -> list[Request]:
    """Each job by itself: no drafts, no recorded rounds, no prefix cache."""
    engine = device_engine(
        decoder,
        enforce_eager=True,
        proposers=(),
        max_draft_tokens=0,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **options,
    )
    off = SpeculationParams("off")
    return [run_jobs(engine, [Job(job.prompt, job.params, off)])[0] for job in jobs]
