"""EAGLE-3 chains in rounds recorded as CUDA graphs, and in eager ones, on the device's kernels:
plain decoding's text, and the offers of the formulas."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from eagle3_engines import SKILLED, folder, skilled_tensors, target, target_weights
from eagle3_reference import Reference, captured_layers
from harness import VOCAB, Job, make_engine, run_jobs, tiny_config
from surefoot.engine.engine import Engine
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams, SpeculationParams
from test_drafter_state import Drowsy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    """Engines know themselves where their tensors are."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    yield


@functools.cache
def decoder() -> Decoder:
    return Decoder(tiny_config(), target_weights(), TritonBackend("cuda", torch.float32))


def build(kind: str, **options: Any) -> Engine:
    own = {"path": folder(kind), "draft_tokens": options.get("max_draft_tokens", 4)}
    values: dict[str, Any] = dict(
        device="cuda", proposers=("eagle3",), proposer_options={"eagle3": own},
        max_draft_tokens=4, max_num_seqs=4, kv_blocks=200,
    )  # fmt: skip
    return make_engine(decoder(), None, **{**values, **options})


def scenario(seed: int, count: int) -> list[Job]:
    """Greedy and sampled requests with filters and penalties, coming and going."""
    chooser = random.Random(seed)
    jobs = []
    for _ in range(count):
        piece = [chooser.randrange(2, VOCAB) for _ in range(chooser.randrange(1, 9))]
        values: dict[str, Any] = dict(
            temperature=chooser.choice([0, 0, 0.5, 1.0]),
            seed=chooser.randrange(1000),
            max_tokens=chooser.randrange(1, 60),
            ignore_eos=chooser.random() < 0.5,
        )
        if chooser.random() < 0.3:
            values.update(top_k=chooser.choice([3, 10]), top_p=0.8)
        if chooser.random() < 0.2:
            values.update(repetition_penalty=1.3, min_tokens=min(5, values["max_tokens"]))
        jobs.append(
            Job(
                tuple((piece * chooser.randrange(1, 8))[:40]),
                SamplingParams(**values),
                SpeculationParams(chooser.choice(["auto", "auto", "eagle3", "off"])),
                arrival=chooser.randrange(10),
                cancel=chooser.choice([None] * 6 + [9]),
            )
        )
    return jobs


def plain(jobs: list[Job]) -> list[Request]:
    engine = make_engine(
        decoder(), None, device="cuda", enforce_eager=True, proposers=(), max_draft_tokens=0,
        kv_blocks=400,
    )  # fmt: skip
    off = SpeculationParams("off")
    return [run_jobs(engine, [Job(job.prompt, job.params, off)])[0] for job in jobs]


@pytest.mark.parametrize(("kind", "seed"), [("skilled", 0), ("skilled", 1), ("random", 2)])
def test_texts_are_those_of_plain_decoding(kind: str, seed: int) -> None:
    jobs = scenario(seed, 6)
    expected = plain(jobs)
    for options in (
        dict(),
        dict(draft_policy="fixed", max_draft_tokens=3),
        dict(kv_blocks=30),
        dict(enforce_eager=True, draft_policy="fixed"),
    ):
        engine = build(kind, **options)
        assert engine.rounds.recorded != ("enforce_eager" in options)
        found = run_jobs(engine, jobs)
        for job, want, got in zip(jobs, expected, found, strict=True):
            text = want.output[: len(got.output)] if job.cancel else want.output
            assert got.output == text, (options, job)
        if kind == "skilled" and options.get("draft_policy"):
            assert sum(request.stats.accepted for request in found) > 20


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "called"])
@pytest.mark.parametrize("policy", ["fixed", "auto", "drowsy"])
def test_offers_are_those_of_the_formulas(policy: str, eager: bool) -> None:
    """Wherever requests stand after a round; near the ends of their texts offers are cut."""
    drowsy = policy == "drowsy"
    engine = build("skilled", draft_policy="fixed" if drowsy else policy, enforce_eager=eager)
    assert engine.rounds.recorded is not eager
    if drowsy:
        # In most rounds the drafter only catches up, beside what they sample.
        Drowsy(engine, 3)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [(5, 9, 2, 33, 14, 21, 40, 8, *range(3 + i, 6 + 3 * i)) for i in range(4)]
    requests = [engine.make_request(f"{i}", p, params) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    offers: dict[tuple[int, ...], tuple[int, ...]] = {}
    found, state = engine.round.books.offers, engine.state
    while engine.has_work:
        engine.step()
        torch.cuda.synchronize()
        for request in engine.scheduler.running:
            slot = request.slot
            # The device may know of an end that has not been read.
            if int(state.alive[slot]):
                text = tuple(state.history[slot, : int(state.length[slot])].tolist())
                length = int(found.lengths[slot])
                offers[text] = tuple(found.tokens[slot, :length].tolist())
    reference = Reference(SKILLED, skilled_tensors(), target_weights()["model.embed_tokens.weight"])
    offered = {text: drafts for text, drafts in offers.items() if drafts}
    # How often it pays to draft on so small a model is for the planner to say.
    assert len(offered) > (0 if policy == "auto" else 20)
    for text, drafts in offered.items():
        features = captured_layers(target(), list(text[:-1]), (0, 1, 2))
        assert tuple(reference.draft(features, list(text), len(drafts))) == drafts, text
