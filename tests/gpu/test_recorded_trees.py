"""Drafted trees verified in recorded rounds and in called ones, on a tiny model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from eagle3_engines import folder, target, target_weights
from harness import (
    Job,
    first_difference,
    make_engine,
    run_alone,
    run_jobs,
    score_gap,
    tiny_config,
)
from surefoot.engine.engine import Engine
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams, SpeculationParams

pytestmark = pytest.mark.gpu
PLAIN = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PARAMS = {
    "greedy": {},
    "drawn": {"temperature": 0.7, "top_p": 0.9, "min_tokens": 12, "ignore_eos": False},
    "adjusted": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 1.0}},
}


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    """An engine knows itself where its tensors go."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    yield
    torch.cuda.synchronize()


def decoder() -> Decoder:
    return Decoder(tiny_config(), target_weights(), TritonBackend("cuda", torch.float32))


def tree_engine(decoder: Decoder, **options: Any) -> Engine:
    own = {"path": folder("skilled"), "draft_tokens": 7, "top_k": 3, "depth": 3}
    values: dict[str, Any] = {
        "device": "cuda",
        "proposers": ("eagle3", "ngram"),
        "proposer_options": {"eagle3": own},
        "draft_policy": "fixed",
        "max_draft_tokens": 7,
        "max_num_seqs": 3,
        "kv_blocks": 200,
        **options,
    }
    return make_engine(decoder, **values)


def jobs(params: SamplingParams) -> list[Job]:
    methods = ("auto", "eagle3", "ngram", "off", "auto", "eagle3")
    made = []
    for index, method in enumerate(methods):
        prompt = (5, 9, 2, 33, *range(3 + index, 8 + 2 * index))
        own = replace(params, seed=index, max_tokens=40 + index)
        made.append(Job(prompt, own, SpeculationParams(method), arrival=2 * index))
    return made


def plainly(decoder: Decoder, work: list[Job]) -> list[Request]:
    """Each by itself, without drafts and without recorded rounds."""
    options: dict[str, Any] = {"max_draft_tokens": 0, "enable_prefix_caching": False}
    engine = make_engine(decoder, False, kv_blocks=200, **options)
    alone = [replace(job, speculation=SpeculationParams("off"), arrival=0) for job in work]
    return [run_jobs(engine, [job])[0] for job in alone]


def same(want: Request, got: Request) -> None:
    at = first_difference(want.output, got.output)
    if at is not None:
        gap = score_gap(target(), want, at, got.output[at]) if at < len(got.output) else None
        raise AssertionError(f"token {at} of {got.request_id} differs, by a score of {gap}")
    assert got.finish_reason == want.finish_reason


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "called"])
@pytest.mark.parametrize(
    ("name", "policy"), [("greedy", "fixed"), ("drawn", "fixed"), ("adjusted", "auto")]
)
def test_texts_are_those_of_plain_decoding(name: str, policy: str, eager: bool) -> None:
    model, params = decoder(), replace(PLAIN, **PARAMS[name])
    engine = tree_engine(model, draft_policy=policy, enforce_eager=eager)
    work = jobs(params)
    requests = run_jobs(engine, work)
    assert engine.stats.replays == (0 if eager else engine.stats.rounds)
    for want, got in zip(plainly(model, work), requests, strict=True):
        same(want, got)
    if name == "greedy":
        for job, got in zip(work, requests, strict=True):
            assert got.output == run_alone(target(), job).output
    by_trees = [request.stats.accepted_by_proposer.get("eagle3", 0) for request in requests]
    if policy == "fixed":
        assert sum(by_trees) > 40
        assert engine.stats.kinds["decoding with drafts"][0] > 5
        assert engine.stats.kinds["prompts with drafts"][0] > 0


def test_a_tight_pool() -> None:
    """Leases that cannot cover a tree: such rounds verify nothing."""
    model = decoder()
    work = jobs(PLAIN)
    engine = tree_engine(model, kv_blocks=30)
    for want, got in zip(plainly(model, work), run_jobs(engine, work), strict=True):
        same(want, got)
