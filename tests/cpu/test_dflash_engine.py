"""The DFlash family in the round: its offers are those of the formulas, and the text is plain
decoding's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eagle3_engines
from certify_setups import one_thread  # noqa: F401
from dflash_engines import (
    KINDS,
    by_formulas,
    exact_folder,
    folder,
    forgetful_target,
    tensors_of,
)
from dflash_reference import random_checkpoint
from eagle3_engines import target
from harness import Job, make_engine, needs_native, run_alone, run_jobs
from structured_harness import structured_engine
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import FlatBatch
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.planner import Planner
from surefoot.speculation.proposer import DraftCost
from surefoot.speculation.proposers.dflash.proposer import DFlashProposer
from surefoot.structured import StructuredOutputsParams
from test_drafter_state import ROUNDS, speculation
from test_drafter_state import crowd as mixed_crowd
from test_eagle3_engine import GREEDY, Offers, compare, crowd, some
from test_exactness import scenarios

BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


def engine_of(kind: str, backend: str = "torch", ahead: bool = False, **options: Any) -> Engine:
    own = {"path": folder(kind), **options.pop("own", {})}
    values: dict[str, Any] = {
        "proposers": ("dflash",),
        "proposer_options": {"dflash": own},
        "draft_policy": "fixed",
        **options,
    }
    return make_engine(target(backend), ahead, **values)


def check(kind: str, offers: Offers, drafts: int | None = None, every: int = 1) -> int:
    """Offers, of ``drafts`` tokens if it is given, are what the formulas say of the texts. Returns
    how many were looked at."""
    texts = list(offers.by_text)[::every]
    for text in texts:
        for found in offers.by_text[text]:
            assert drafts in (None, len(found))
            assert found == by_formulas(kind, text, len(found)), text
    return len(texts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "skilled DSpark", "random DFlash 2"])
def test_every_offer_is_that_of_the_formulas(kind: str, backend: str) -> None:
    """Through chunked prefill, prefix hits, preemption and slots that change hands."""
    engine = engine_of(kind, backend, kv_blocks=22, max_num_batched_tokens=7, max_num_seqs=3)
    offers = Offers(engine)
    requests = run_jobs(engine, crowd())
    assert engine.stats.preemptions and any(request.cached for request in requests)
    assert check(kind, offers, every=3 if kind.startswith("skilled") else 5) > 12
    for job, request in zip(crowd(), requests, strict=True):
        compare(backend, run_alone(target(backend), job), request)


@pytest.mark.parametrize("kind", KINDS)
def test_skilled_drafters_are_accepted_and_others_do_no_harm(kind: str) -> None:
    """Beside requests that do not draft, rounds launched before the last one was read."""
    engine = engine_of(kind, ahead=True, proposers=("ngram", "dflash"), max_num_seqs=3)
    jobs = crowd(4)
    jobs[1].speculation = SpeculationParams("off")
    jobs[2].speculation = SpeculationParams("dflash", 2)
    requests = run_jobs(engine, jobs)
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == run_alone(target(), job).output
    stats = requests[2].stats
    assert stats.verified > 10 and not requests[1].stats.verified
    assert stats.accepted > 0.2 * stats.verified or not kind.startswith("skilled")


def test_fewer_drafts_are_those_of_a_shorter_block() -> None:
    engine = engine_of("random DFlash 2", own={"draft_tokens": 2})
    offers = Offers(engine)
    run_jobs(engine, crowd(2))
    assert check("random DFlash 2", offers, drafts=2, every=4) > 8


def test_a_full_prefix_hit_recomputes_nothing() -> None:
    """All but the last token found: one row, and yet the offer is that of the formulas."""
    engine, prompt = engine_of("skilled DSpark"), tuple(range(3, 20))
    run_jobs(engine, [Job(prompt, GREEDY)])
    offers = Offers(engine)
    request = engine.make_request("again", prompt, GREEDY)
    engine.add(request)
    rows = engine.stats.rows
    engine.step()
    assert request.cached == 16 and engine.stats.rows == rows + 1
    assert check("skilled DSpark", offers) == 1


class Written:
    """What an engine's drafter keeps."""

    def __init__(self, engine: Engine) -> None:
        self.batches: list[FlatBatch] = []
        self.rows = 0
        proposers = {proposer.name: proposer for proposer in engine.proposers}
        network = cast(DFlashProposer, proposers["dflash"]).network
        write = network.write_context

        def watched(
            features: torch.Tensor, batch: FlatBatch, kv: Any, served: torch.Tensor, settled: Any
        ) -> None:
            self.batches.append(batch)
            self.rows += int((served[batch.row_slot] & (batch.row_slot >= 0)).sum())
            write(features, batch, kv, served, settled)

        network.write_context = watched  # type: ignore[method-assign]


@ROUNDS
def test_requests_that_do_not_allow_it_pay_no_catch_up(ahead: bool) -> None:
    names: dict[str, Any] = {"proposers": ("ngram", "dflash"), "enable_prefix_caching": False}
    engine, prompt = engine_of("random", ahead=ahead, **names), tuple(range(3, 20))
    written = Written(engine)
    others = [Job(prompt, GREEDY, speculation(name)) for name in ("off", "ngram", "off")]
    run_jobs(engine, others)
    assert written.batches == []
    [*_, own] = run_jobs(engine, [*others, Job(prompt, GREEDY, speculation("dflash"))])
    assert written.rows == len(prompt) + own.stats.rounds - 1 + own.stats.verified


@ROUNDS
def test_drafts_never_rest_on_what_was_not_written(ahead: bool) -> None:
    """Prefix hits from one kind of request to another, preemption, blocks that change hands."""
    methods = ("off", "auto", "ngram", "dflash", "auto; 0", "auto", "off", "dflash")
    jobs = mixed_crowd(methods, 14, 26, 3)
    options: dict[str, Any] = {"kv_blocks": 26, "max_num_batched_tokens": 7, "max_num_seqs": 3}
    engine = engine_of("random", ahead=ahead, proposers=("ngram", "dflash"), **options)
    index, offers = engine.controller.names.index("dflash"), Offers(engine)
    learn = engine.round.books.learn

    def only_own(which: int, slots: torch.Tensor, drafts: Any) -> None:
        allowed = engine.controller.allowed[index, slots] if which == index else slots < 0
        running = {request.slot for request in engine.scheduler.running}
        known = offers.by_text
        offers.by_text = {}
        learn(which, slots, drafts)
        rows = [slot for slot, ok in zip(slots.tolist(), allowed.tolist(), strict=True) if ok]
        state = engine.state
        texts = {
            tuple(state.history[slot, : int(state.length[slot])].tolist())
            for slot in rows
            if slot in running
        }
        for text, found in offers.by_text.items():
            if text in texts:
                known.setdefault(text, []).extend(found)
        offers.by_text = known

    engine.round.books.learn = only_own  # type: ignore[method-assign]
    requests = run_jobs(engine, jobs)
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == run_alone(target(), job).output
    assert check("random", offers, every=2) > 12
    assert engine.stats.preemptions and sum(r.cached for r in requests) > 20


PARAMETERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5, "min_p": 0.02},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {5: 4.0, 6: -8.0}, "min_tokens": 10},
]


@pytest.mark.parametrize("family", ["DSpark", "DFlash 2"])
@pytest.mark.parametrize("extra", PARAMETERS)
def test_at_a_temperature_the_walk_takes_the_targets_noise(
    family: str, extra: dict[str, Any]
) -> None:
    """The same distribution given the token before and the same noise: every draft is right, with
    penalties that see the drafts before."""
    options = {"proposers": ("dflash",), "draft_policy": "fixed"}
    own = {"dflash": {"path": exact_folder(family)}}
    engine = make_engine(forgetful_target(), proposer_options=own, **options)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True, **extra)
    jobs = [Job((4, 9, 2), params), Job((7, 7), replace(params, seed=8, temperature=1.3))]
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(forgetful_target(), job).output
        assert request.stats.accepted == request.stats.verified > 20


@pytest.mark.parametrize("kind", ["skilled", "skilled DSpark", "skilled DFlash 2"])
@pytest.mark.parametrize("extra", PARAMETERS)
def test_it_drafts_under_the_requests_own_parameters(kind: str, extra: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=3, logprobs=2, **extra)
    jobs = [Job((5, 6, 7, 8), params), Job((5, 6), replace(params, temperature=0))]
    for job, request in zip(jobs, run_jobs(engine_of(kind), jobs), strict=True):
        alone = run_alone(target(), job)
        assert request.output == alone.output
        for found, expected in zip(request.logprobs, alone.logprobs, strict=True):
            assert found.rank == expected.rank
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)


@pytest.mark.parametrize("kind", ["skilled DSpark", "skilled DFlash 2"])
def test_a_grammar_beside_it_changes_no_text(kind: str) -> None:
    """A request that follows a grammar drafts, too; its neighbour stays free."""
    structure = StructuredOutputsParams(regex="(a|b|c|1|ab){12,20}")
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=24, structured_outputs=structure)
    jobs = [Job((5, 6, 7, 8), params), Job((5, 6, 7), replace(GREEDY, max_tokens=20))]
    engine = structured_engine(
        target(), proposers=("dflash",), draft_policy="fixed", max_num_seqs=2,
        proposer_options={"dflash": {"path": folder(kind)}},
    )  # fmt: skip
    alone = structured_engine(target(), max_draft_tokens=0)
    found = run_jobs(engine, jobs)
    for job, request in zip(jobs, found, strict=True):
        assert request.output == run_jobs(alone, [job])[0].output
    assert found[0].stats.verified > 3 < found[1].stats.verified


def test_near_the_drafters_context_drafts_end_and_service_goes_on(tmp_path: Path) -> None:
    flags = replace(KINDS["skilled DSpark"], positions=24)
    random_checkpoint(tmp_path, flags, tensors_of("skilled DSpark"))
    engine = engine_of("skilled DSpark", own={"path": str(tmp_path)})
    job = Job((5, 6, 7, 8), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    [request] = run_jobs(engine, [job])
    assert request.output == run_alone(target(), job).output
    assert request.stats.accepted > 4
    assert all(name is None for name in request.proposed_by[24:])
    assert any(request.proposed_by[16:24])


def test_what_it_needs() -> None:
    engine = engine_of("skilled DSpark")
    [need], [proposer] = engine.round.needs, engine.proposers
    assert need.cost is DraftCost.PER_BLOCK and need.captured_layers == (0, 1)
    assert need.longest_draft == engine.config.max_draft_tokens == 5
    # Two layers, keys and values of two heads of 16 in float32.
    assert need.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert isinstance(proposer, DFlashProposer) and proposer.pools.scratch_blocks == 2
    auto = engine_of("skilled DSpark", draft_policy="auto")
    planner = cast(Planner, auto.loop.planner)
    assert set(planner.costs.actions(1)) == {((), 0), *(((0,), 1 + d) for d in range(5))}


def run_scenario(
    backend: str, scenario: tuple[list[Job], dict[str, Any]], kind: str, tree: bool, ahead: bool
) -> None:
    """DFlash beside EAGLE-3, chains or trees, ngram and off in one batch."""
    work, options = scenario
    if options["proposers"]:
        eagle: dict[str, Any] = {"path": eagle3_engines.folder("skilled")}
        eagle["draft_tokens"] = min(4, options["max_draft_tokens"])
        if tree:
            eagle |= {"top_k": 2, "depth": 2}
        most = min(1 + len(work), options["max_draft_tokens"], 4)
        own = {"path": folder(kind), "draft_tokens": most}
        options = {
            **options,
            "proposers": ("ngram", "eagle3", "dflash"),
            "proposer_options": {"eagle3": eagle, "dflash": own},
        }
    for place, job in enumerate(work):
        renamed = {"oracle": "dflash", "saboteur": ("eagle3", "dflash")[place % 2]}
        method = renamed.get(job.speculation.method)
        if method:
            job.speculation = SpeculationParams(method, job.speculation.max_draft_tokens)
    decoder = target(backend)
    for job, got in zip(work, run_jobs(make_engine(decoder, ahead, **options), work), strict=True):
        compare(backend, run_alone(decoder, job), got)


kinds = st.sampled_from(sorted(KINDS))


@some(12)
@given(scenarios(), kinds, st.booleans(), st.booleans())
def test_any_scenario_gives_the_plain_text(
    scenario: Any, kind: str, tree: bool, ahead: bool
) -> None:
    run_scenario("torch", scenario, kind, tree, ahead)


@needs_native
@some(24)
@given(scenarios(), kinds, st.booleans(), st.booleans())
def test_any_scenario_gives_the_plain_text_native(
    scenario: Any, kind: str, tree: bool, ahead: bool
) -> None:
    run_scenario("native", scenario, kind, tree, ahead)
