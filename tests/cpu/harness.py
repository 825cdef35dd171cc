"""Tiny engines to run scenarios on, with test-only proposers and a tie-aware comparison."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from surefoot.config import EngineConfig
from surefoot.engine import host_clock
from surefoot.engine import rounds as engine_rounds
from surefoot.engine import structured as engine_structured
from surefoot.engine.chunks import ChunkLimits
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import Backend, FlatBatch
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.upload import sending
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder, expected_shapes
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from surefoot.sampling.noise import gumbel
from surefoot.sampling.params import SamplingStages
from surefoot.sampling.sampler import (
    SampleRows,
    apply_bias,
    apply_penalties,
    filtered_scores,
    mask_ends,
)
from surefoot.speculation import keeping_up, registry
from surefoot.speculation.controller import Controller
from surefoot.speculation.proposer import Drafts, Needs, Proposer

VOCAB = 48
needs_native = pytest.mark.skipif(
    native_unavailable() is not None, reason=f"no native kernels: {native_unavailable()}"
)
TIE = 1e-4


def tiny_config(**overrides: Any) -> ModelConfig:
    values: dict[str, Any] = dict(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        max_positions=160,
        norm_eps=1e-5,
        rope_theta=10000.0,
        tied_embeddings=True,
        eos_token_ids=(0, 1),
    )
    return ModelConfig(**{**values, **overrides})


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        spread = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * spread if len(shape) == 1 else 0.25 * spread
    return weights


def native_backend() -> Backend:
    from surefoot.kernels.cpu.backend import NativeBackend

    return NativeBackend(torch.float32)


@functools.cache
def tiny_decoder(backend: str = "torch") -> Decoder:
    config = tiny_config()
    chosen = TorchBackend("cpu", torch.float32) if backend == "torch" else native_backend()
    return Decoder(config, random_weights(config), chosen)


class AtMost(ChunkLimits):
    """Lets prompts have as many rows as it was told."""

    def __init__(self, rows: Callable[[int], int]) -> None:
        """``rows``: requests that decode -> the most rows beside them."""
        self.rows = rows

    def longest(self, decoding: int) -> int:
        return self.rows(decoding)


class Oracle(Proposer):
    """Always right: knows the full texts beforehand. Test only, it reads tensors on the host."""

    name = "oracle"

    @dataclass(frozen=True)
    class Options:
        texts: tuple[tuple[int, ...], ...] = ()

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts)

    def propose(self, slots: torch.Tensor) -> Drafts:
        width = self.state.max_drafts
        tokens = torch.zeros((len(slots), width), dtype=torch.int64)
        lengths = torch.zeros(len(slots), dtype=torch.int64)
        for row, slot in enumerate(slots.tolist()):
            known = tuple(self.state.history[slot, : int(self.state.length[slot])].tolist())
            for text in self.options.texts:
                if len(text) > len(known) and text[: len(known)] == known:
                    future = text[len(known) : len(known) + width]
                    tokens[row, : len(future)] = torch.tensor(future)
                    lengths[row] = len(future)
                    break
        return Drafts(tokens, lengths, torch.full((len(slots), width), 0.9))


class Saboteur(Proposer):
    """Random, wrong, out of the vocabulary, and longer than asked for."""

    name = "saboteur"

    @dataclass(frozen=True)
    class Options:
        seed: int = 0

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts)

    def propose(self, slots: torch.Tensor) -> Drafts:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(self.options.seed)
        width = self.state.max_drafts + 3
        shape = (len(slots), width)
        tokens = torch.randint(-3, VOCAB + 9, shape, generator=self.generator)
        tokens[:, 0] = torch.randint(0, VOCAB, (len(slots),), generator=self.generator)
        lengths = torch.randint(0, width + 5, (len(slots),), generator=self.generator)
        return Drafts(tokens, lengths, torch.rand(shape, generator=self.generator))


registry.register(Oracle)
registry.register(Saboteur)


@dataclass
class Job:
    """A request of a scenario: when it arrives and, perhaps, when it is cancelled (step counts)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    arrival: int = 0
    cancel: int | None = None


def make_engine(decoder: Decoder, ahead: bool | None = None, **options: Any) -> Engine:
    values: dict[str, Any] = dict(kv_blocks=80, block_size=4, calibration_seconds=0.02)
    return Engine(decoder, EngineConfig(**{**values, **options}), ahead)


TIMED = host_clock, engine_rounds, engine_structured, keeping_up
"""What decides by the times it measures while requests run."""


clocks = st.one_of(st.none(), st.integers(0, 99))
"""Seeds of ``irregular_clock``."""


def admit_alone(controller: Controller, request: Request) -> None:
    """What the loop does with a request that enters its slot, for a controller and its state."""
    with sending(controller.state.device) as uploads:
        controller.admit([request], controller.state.admit([request], uploads), uploads)


@contextmanager
def irregular_clock(seed: int | None) -> Iterator[None]:
    """Meanwhile times are drawn, from nothing to a tenth of a second: as on a machine that does
    something else now and then. None: as they are."""
    if seed is None:
        yield
        return
    dice, now = random.Random(seed), 0.0

    def tick() -> float:
        nonlocal now
        now += dice.choice((0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-3, 1e-1))
        return now

    with pytest.MonkeyPatch.context() as patch:
        for module in TIMED:
            patch.setattr(module, "time", SimpleNamespace(perf_counter=tick))
        yield


def run_jobs(engine: Engine, jobs: Sequence[Job], max_steps: int = 4000) -> list[Request]:
    """Run a scenario, checking integrity after every step; the pool must be whole at the end."""
    requests = [
        engine.make_request(f"job-{index}", job.prompt, job.params, job.speculation)
        for index, job in enumerate(jobs)
    ]
    step = 0
    pending = set(range(len(jobs)))
    while pending or engine.has_work:
        for index in sorted(pending):
            if jobs[index].arrival <= step:
                engine.add(requests[index])
                pending.discard(index)
        for index, job in enumerate(jobs):
            if job.cancel == step and index not in pending:
                engine.finish(requests[index], FinishReason.ABORT)
        engine.step()
        engine.check_integrity()
        step += 1
        assert step < max_steps, "the engine makes no progress"
    assert engine.kv.pool.num_free == engine.kv.pool.capacity, "blocks leaked"
    return requests


_plain_runs: dict[Any, Request] = {}


def run_alone(decoder: Decoder, job: Job) -> Request:
    """The request by itself, without speculation, in one prefill, with ample memory."""
    key = id(decoder), job.prompt, repr(job.params)
    if key not in _plain_runs:
        # Nobody plans anything: nothing has to be measured.
        engine = make_engine(
            decoder, max_draft_tokens=0, max_num_batched_tokens=256, enable_prefix_caching=False,
            draft_policy="fixed",
        )  # fmt: skip
        _plain_runs[key] = run_jobs(engine, [Job(job.prompt, job.params)])[0]
    return _plain_runs[key]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def score_gap(decoder: Decoder, request: Request, at: int, other: int) -> float:
    """|score(sampled) - score(other)| of a request's output token ``at``, freshly recomputed."""
    tokens = [*request.prompt, *request.output[:at]]
    logits = fresh_logits(decoder, tokens)[-1:]
    engine = make_engine(decoder, max_draft_tokens=0, max_num_seqs=1)
    request = Request(
        "gap",
        request.prompt,
        request.params,
        SpeculationParams(),
        request.seed,
        999,
        request.end_tokens,
        request.choice,
        output=list(request.output[:at]),
        slot=0,
    )
    with sending(engine.state.device) as uploads:
        engine.state.admit([request], uploads)
    zero = torch.zeros(1, dtype=torch.int64)
    rows = SampleRows(zero, zero + len(tokens), engine.state.history, len(tokens))
    params, features = engine.state.params, SamplingStages.of([request.params])
    scores = apply_penalties(logits, rows, params)
    scores = mask_ends(apply_bias(scores, rows, params), rows, params)
    if features.noise:
        scores = filtered_scores(scores, zero, params, features)
        position = zero + len(tokens)
        scores = scores + gumbel(params.seed[zero], params.choice[zero], position, logits.shape[1])
    return float(scores.max() - scores[0, other].clamp(min=-1e9))


def fresh_logits(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] of a text prefilled in one go."""
    return decoder.logits(fresh_hidden(decoder, tokens))


def fresh_hidden(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Its last hidden states [len(tokens), hidden], before the norm."""
    count = len(tokens)
    blocks = -(-count // 4)
    kv = decoder.backend.allocate_kv(decoder.config.layers, blocks + 1, 4, decoder.shape)
    index = torch.arange(count)
    batch = FlatBatch(
        tokens=torch.tensor(list(tokens)),
        positions=index,
        key_index=index,
        row_slot=torch.zeros(count, dtype=torch.int64),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32).unsqueeze(0),
        span_start=torch.zeros(1, dtype=torch.int64),
        max_keys=count,
    )
    return decoder.forward(batch, kv).hidden
