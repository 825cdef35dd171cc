"""Set-ups of the certificate on a tiny model, shared by its tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import VOCAB, random_weights, tiny_config, tiny_decoder
from surefoot.certify.certificate import calibration_texts
from surefoot.certify.compare import Judge
from surefoot.certify.noise import measure_noise
from surefoot.certify.prompts import default_prompts
from surefoot.certify.sizes import QUICK, SCENARIOS
from surefoot.certify.subject import Subject
from surefoot.config import EngineConfig
from surefoot.models.decoder import Decoder
from surefoot.speculation import registry
from surefoot.speculation.proposer import Proposer

POSITIONS = 1100
"""Of the context: texts cross every boundary that a certificate has."""
SMALL = replace(
    QUICK,
    greedy_jobs=4,
    greedy_length=16,
    sampled_jobs=3,
    sampled_length=10,
    scenarios=SCENARIOS[:1],
    designs=0,
    parameter_length=8,
    seeds=16,
    sampled_positions=2,
    offers=8,
    min_crowded=0,
    more=0,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is left to torch is small: threads that wait for each other on busy cores take ten times
    as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def silent(label: str, done: int, total: int) -> None:
    pass


def make_subject(backend: str = "native", **options: Any) -> Subject:
    decoder = native_decoder() if backend == "native" else tiny_decoder()
    return Subject(decoder, EngineConfig(**options), default_prompts(VOCAB, 160))


@functools.cache
def native_decoder() -> Decoder:
    """One thread: threads that wait for each other on busy cores take ten times as long."""
    from surefoot.kernels.cpu.backend import NativeBackend

    config = tiny_config(max_positions=POSITIONS)
    return Decoder(config, random_weights(config), NativeBackend(torch.float32, 1))


def make_judge(subject: Subject) -> Judge:
    return Judge(subject, measure_noise(subject.decoder, calibration_texts(subject)))


def register(monkeypatch: pytest.MonkeyPatch, *proposers: type[Proposer]) -> None:
    """Make proposers known for one test: what stays registered would show in other tests."""
    monkeypatch.setattr(registry, "_PROPOSERS", dict(registry._PROPOSERS))
    for proposer in proposers:
        registry.register(proposer)
