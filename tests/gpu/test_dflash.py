"""The DFlash family in rounds recorded as CUDA graphs, and in eager ones, on the device's kernels:
plain decoding's text, the offers of the formulas, the drafts of the official implementations."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_eagle3 import plain, scenario

from conftest import OnDevice
from dflash_engines import KINDS, by_formulas, folder
from dflash_golden import Rounds
from eagle3_engines import target_weights
from harness import make_engine, run_jobs, tiny_config
from surefoot.engine.engine import Engine
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams, SpeculationParams
from test_drafter_state import Drowsy
from test_eagle3_drafter import near

pytestmark = pytest.mark.gpu
ON_DEVICE = False
WAYS = pytest.mark.parametrize("eager", [False, True], ids=["recorded", "called"])


@functools.cache
def decoder() -> Decoder:
    return Decoder(tiny_config(), target_weights(), TritonBackend("cuda", torch.float32))


def build(kind: str, **options: Any) -> Engine:
    values: dict[str, Any] = dict(
        device="cuda", proposers=("ngram", "dflash"), max_num_seqs=4, kv_blocks=200,
        proposer_options={"dflash": {"path": folder(kind)}},
    )  # fmt: skip
    return make_engine(decoder(), None, **{**values, **options})


class OnTheDevice(Rounds):
    def features(self, number: int) -> torch.Tensor:
        return super().features(number).cuda()


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_drafts_equal_the_official_ones(name: str) -> None:
    rounds = OnTheDevice(name, TritonBackend("cuda", torch.float32))
    for number in range(len(rounds)):
        with OnDevice():
            drafts = rounds.begin(number)
        assert drafts.tokens[0].tolist() == rounds.array(number, "draft_tokens").tolist()
        if name == "dspark":
            near(drafts.confidence[0].cpu(), rounds.array(number, "confidence"))
        rounds.end(number)


@pytest.mark.parametrize("kind", list(KINDS))
def test_texts_are_those_of_plain_decoding(kind: str) -> None:
    own = SpeculationParams("dflash")
    jobs = [
        replace(job, speculation=own if job.speculation.method == "eagle3" else job.speculation)
        for job in scenario(7, 5)
    ]
    expected = plain(jobs)
    for options in (
        dict(),
        dict(draft_policy="fixed", max_draft_tokens=3),
        dict(draft_policy="fixed", kv_blocks=30),
        dict(draft_policy="fixed", enforce_eager=True),
    ):
        engine = build(kind, **options)
        assert engine.rounds.recorded != ("enforce_eager" in options)
        found = run_jobs(engine, jobs)
        for job, want, got in zip(jobs, expected, found, strict=True):
            text = want.output[: len(got.output)] if job.cancel else want.output
            assert got.output == text, (options, job)


@WAYS
@pytest.mark.parametrize("awake", [10, 3])
@pytest.mark.parametrize("kind", ["random DSpark", "skilled", "skilled DSpark", "skilled DFlash 2"])
def test_offers_are_those_of_the_formulas(kind: str, awake: int, eager: bool) -> None:
    """Wherever requests stand after a round; near the ends of their texts offers are cut. In the
    other ones of ten rounds the drafter only catches up, beside what they sample."""
    engine = build(kind, proposers=("dflash",), draft_policy="fixed", enforce_eager=eager)
    Drowsy(engine, awake)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [(5, 9, 2, 33, 14, 21, 40, 8, *range(3 + i, 6 + 3 * i)) for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add(engine.make_request(f"{i}", prompt, params))
    offers: dict[tuple[int, ...], tuple[int, ...]] = {}
    found, state = engine.round.books.offers, engine.state
    accepted = 0
    while engine.has_work:
        accepted += sum(item.request.stats.accepted for item in engine.step() if item.request.end)
        torch.cuda.synchronize()
        for request in engine.scheduler.running:
            slot = request.slot
            # The device may know of an end that has not been read.
            if int(state.alive[slot]):
                text = tuple(state.history[slot, : int(state.length[slot])].tolist())
                length = int(found.lengths[slot])
                offers[text] = tuple(found.tokens[slot, :length].tolist())
    offered = {text: drafts for text, drafts in offers.items() if drafts}
    assert len(offered) > 10
    assert awake < 10 or (len(offered) > 20 and (accepted > 20 or not kind.startswith("skilled")))
    most = engine.state.max_drafts
    for text, drafts in offered.items():
        # Offers are cut to what a request can use, after blocks for all requests.
        depths = range(len(drafts), min(most, KINDS[kind].drafts) + 1)
        assert drafts in [by_formulas(kind, text, d)[: len(drafts)] for d in depths], text
