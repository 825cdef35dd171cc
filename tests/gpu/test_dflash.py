"""The DFlash family in rounds recorded as CUDA graphs, and in eager ones, on the device's kernels:
plain decoding's text, and the offers of the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_eagle3 import decoder, plain, scenario

from dflash_engines import KINDS, by_formulas, folder
from harness import make_engine, run_jobs
from surefoot.engine.engine import Engine
from surefoot.request import SamplingParams, SpeculationParams

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    yield


def build(kind: str, **options: Any) -> Engine:
    values: dict[str, Any] = dict(
        device="cuda", proposers=("ngram", "dflash"), max_num_seqs=4, kv_blocks=200,
        proposer_options={"dflash": {"path": folder(kind)}},
    )  # fmt: skip
    return make_engine(decoder(), None, **{**values, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_plain_decoding(kind: str) -> None:
    jobs = scenario(sorted(KINDS).index(kind), 6)
    for job in jobs:
        if job.speculation.method == "eagle3":
            job.speculation = SpeculationParams("dflash")
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


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "called"])
@pytest.mark.parametrize("kind", ["random", "skilled DSpark", "random DSpark", "random DFlash 2"])
def test_offers_are_those_of_the_formulas(kind: str, eager: bool) -> None:
    """Wherever requests stand after a round; near the ends of their texts offers are cut."""
    engine = build(kind, proposers=("dflash",), draft_policy="fixed", enforce_eager=eager)
    assert engine.rounds.recorded is not eager
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [(5, 9, 2, 33, 14, 21, 40, 8, *range(3 + i, 6 + 3 * i)) for i in range(4)]
    for number, prompt in enumerate(prompts):
        engine.add(engine.make_request(f"{number}", prompt, params))
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
    offered = {text: drafts for text, drafts in offers.items() if drafts}
    assert len(offered) > 20
    for text, drafts in offered.items():
        assert by_formulas(kind, text)[: len(drafts)] == drafts, text
