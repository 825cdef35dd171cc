"""EAGLE-3 in the round: its offers are those of the formulas, and the text is plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from eagle3_engines import RANDOM, SKILLED, folder, skilled_tensors, target, target_weights
from eagle3_reference import Reference, captured_layers, random_checkpoint, random_tensors
from harness import (
    TIE,
    Job,
    first_difference,
    make_engine,
    needs_native,
    run_alone,
    run_jobs,
    score_gap,
)
from surefoot.engine.engine import Engine
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from surefoot.speculation.decisions import Decision, Situation
from surefoot.speculation.proposer import Drafts
from test_exactness import scenarios

BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def eagle_engine(kind: str, backend: str = "torch", **options: Any) -> Engine:
    own = {"path": folder(kind), "draft_tokens": 4, **options.pop("own", {})}
    values: dict[str, Any] = {
        "proposers": ("eagle3",),
        "proposer_options": {"eagle3": own},
        "draft_policy": "fixed",
        "max_draft_tokens": 4,
        **options,
    }
    return make_engine(target(backend), **values)


class Offers:
    """Every offer that an engine's drafter makes, by the text that it follows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.by_text: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._learn = engine.round.books.learn
        engine.round.books.learn = self.learn  # type: ignore[method-assign]

    def learn(self, index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        state = self.engine.state
        offers = zip(slots.tolist(), drafts.tokens.tolist(), strict=True) if drafts else ()
        for slot, tokens in offers:
            if slot == state.padding_slot:
                continue
            text = tuple(state.history[slot, : int(state.length[slot])].tolist())
            self.by_text.setdefault(text, []).append(tuple(tokens))
        self._learn(index, slots, drafts)


def reference(kind: str) -> Reference:
    embedding = target_weights()["model.embed_tokens.weight"]
    if kind == "random":
        return Reference(RANDOM, random_tensors(RANDOM), embedding)
    return Reference(SKILLED, skilled_tensors(), embedding)


def by_formulas(kind: str, text: tuple[int, ...], count: int = 4) -> tuple[int, ...]:
    features = captured_layers(target(), list(text[:-1]), (0, 1, 2))
    return tuple(reference(kind).draft(features, list(text), count))


def crowd(count: int = 7) -> list[Job]:
    """Prompts with a common beginning, one a whole prefix of others, arriving one by one."""
    start = (5, 9, 2, 33, 14, 21, 40, 8)
    prompts = [start + tuple(range(3 + i, 6 + 3 * i)) for i in range(count)]
    prompts[1] = (*start, 7)
    if count > 3:
        prompts[3] = prompts[0]
    return [Job(prompt, GREEDY, arrival=2 * i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "skilled"])
def test_every_offer_is_that_of_the_formulas(kind: str, backend: str) -> None:
    """Through chunked prefill, prefix hits, preemption and slots that change hands."""
    engine = eagle_engine(kind, backend, kv_blocks=24, max_num_batched_tokens=7, max_num_seqs=3)
    offers = Offers(engine)
    requests = run_jobs(engine, crowd())
    assert engine.stats.preemptions and any(request.cached for request in requests)
    checked = list(offers.by_text)[:: 1 if kind == "skilled" else 3]
    assert len(checked) > 40
    for text in checked:
        expected = by_formulas(kind, text)
        assert all(found == expected for found in offers.by_text[text]), text


def test_rounds_launched_ahead_offer_the_same() -> None:
    """Rounds as a GPU replays them: entries of slots that ended, verdicts read one round late."""
    own = {"eagle3": {"path": folder("skilled"), "draft_tokens": 4}}
    engine = make_engine(
        target(), True, draft_policy="fixed", proposers=("eagle3",), proposer_options=own,
        max_draft_tokens=4, max_num_batched_tokens=7, max_num_seqs=3,
    )  # fmt: skip
    propose, idle = engine.proposers[0].propose, engine.state.padding_slot
    offers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def watched(slots: torch.Tensor) -> Drafts:
        drafts = propose(slots)
        for slot, tokens in zip(slots.tolist(), drafts.tokens.tolist(), strict=True):
            if slot != idle:
                text = tuple(engine.state.history[slot, : int(engine.state.length[slot])].tolist())
                offers.setdefault(text, set()).add(tuple(tokens))
        return drafts

    engine.proposers[0].propose = watched  # type: ignore[method-assign]
    jobs = crowd(5)
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(target(), job).output
    assert len(offers) > 30
    for text, found in list(offers.items())[::2]:
        assert found == {by_formulas("skilled", text)}


@pytest.mark.parametrize("kind", ["random", "skilled"])
def test_acceptance_is_that_of_an_offline_loop(kind: str) -> None:
    [request] = run_jobs(eagle_engine(kind), [Job((7, 4, 11, 30, 2), GREEDY)])
    text, done, rounds, accepted = (*request.prompt, *request.output), 6, 1, 0
    while done < len(text):
        drafts = by_formulas(kind, text[:done])
        room = len(text) - done - 1
        right = first_difference(drafts[:room], text[done : done + min(4, room)])
        right = min(4, room) if right is None else right
        accepted, done, rounds = accepted + right, done + right + 1, rounds + 1
    assert (request.stats.rounds, request.stats.accepted) == (rounds, accepted)
    assert accepted > 15 or kind == "random"


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_it_catches_up_after_spells_without_drafts(drafts: int) -> None:
    """Rounds that verify fewer drafts than are offered, or none for a while."""
    engine = eagle_engine("skilled")
    offers, decide, step = Offers(engine), engine.loop.planner.decide, 0

    def starve(situation: Situation) -> Decision:
        nonlocal step
        step += 1
        decision = decide(situation)
        most = drafts * situation.requests if step // 4 % 2 else decision.drafts
        return replace(decision, drafts=min(decision.drafts, most))

    engine.loop.planner.decide = starve  # type: ignore[method-assign]
    run_jobs(engine, crowd(3))
    for text, found in list(offers.by_text.items())[::2]:
        assert set(found) == {by_formulas("skilled", text)}


def test_a_full_prefix_hit_recomputes_nothing() -> None:
    """All but the last token found: one row, and yet the offer is that of the formulas."""
    engine = eagle_engine("skilled")
    prompt = tuple(range(3, 20))  # 16 positions in blocks of 4, and one more
    run_jobs(engine, [Job(prompt, GREEDY)])
    offers = Offers(engine)
    request = engine.make_request("again", prompt, GREEDY)
    engine.add(request)
    rows = engine.stats.rows
    engine.step()
    assert request.cached == 16 and engine.stats.rows == rows + 1
    [(text, found)] = offers.by_text.items()
    assert len(text) == 18 and set(found) == {by_formulas("skilled", text)}


def test_blocks_keep_nothing_of_drafts() -> None:
    """What drafting writes never lands in another request's blocks: two requests side by side
    offer what each offers alone."""
    alone = []
    for job in crowd(4):
        engine = eagle_engine("skilled")
        offers = Offers(engine)
        run_jobs(engine, [Job(job.prompt, GREEDY)])
        alone.append(offers.by_text)
    engine = eagle_engine("skilled", enable_prefix_caching=False)
    offers = Offers(engine)
    run_jobs(engine, [Job(job.prompt, GREEDY) for job in crowd(4)])
    for text, found in offers.by_text.items():
        assert any(set(found) == set(single.get(text, ())) for single in alone)


def test_coupled_drafts_agree_more_often_than_argmax_drafts() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    accepted = {}
    for coupled in (True, False):
        engine = eagle_engine("skilled", own={"coupled": coupled, "draft_tokens": 1})
        jobs = [
            Job((3 + i, 8, 2 + i), SamplingParams(**{**params.__dict__, "seed": i}))
            for i in range(10)
        ]
        requests = run_jobs(engine, jobs)
        drafted = sum(request.stats.verified for request in requests)
        accepted[coupled] = sum(request.stats.accepted for request in requests) / drafted
    assert accepted[True] > accepted[False] + 0.03, accepted


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 5},
        {"top_p": 0.7, "min_p": 0.05},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"logit_bias": {5: 4.0, 6: -8.0}, "min_tokens": 10},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_drafts_under_the_requests_own_parameters(
    extra: dict[str, Any], temperature: float
) -> None:
    """Drafts that took no notice would hardly be accepted; and the text is the plain one."""
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, **extra)
    job = Job((5, 6, 7, 8), params)
    [request] = run_jobs(eagle_engine("skilled"), [job])
    assert request.output == run_alone(target(), job).output


def test_near_the_drafters_context_drafts_end_and_service_goes_on(tmp_path: Any) -> None:
    random_checkpoint(tmp_path, replace(SKILLED, positions=24), skilled_tensors())
    engine = eagle_engine("skilled", own={"path": str(tmp_path)})
    offers = Offers(engine)
    job = Job((5, 6, 7, 8), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    [request] = run_jobs(engine, [job])
    assert request.output == run_alone(target(), job).output
    assert request.stats.accepted > 4
    assert all(name is None for name in request.proposed_by[24:])
    assert any(len(text) < 22 for text in offers.by_text)


def some(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def check(
    backend: str,
    scenario: tuple[list[Job], dict[str, Any]],
    kind: str,
    tree: bool,
    ahead: bool = False,
) -> None:
    work, options = scenario
    decoder = target(backend)
    if options["proposers"]:
        most = min(1 + len(work), options["max_draft_tokens"])
        own = {"path": folder(kind), "draft_tokens": most}
        if tree:
            own |= {"top_k": 1 + len(work), "depth": 2 + len(work[0].prompt) % 3}
        options = {
            **options,
            "proposers": ("ngram", "eagle3"),
            "proposer_options": {"eagle3": own},
        }
    for job in work:
        method = {"oracle": "eagle3", "saboteur": "auto"}.get(job.speculation.method)
        if method:
            job.speculation = SpeculationParams(method, job.speculation.max_draft_tokens)
    engine = make_engine(decoder, ahead, **options)
    actual = run_jobs(engine, work)
    for job, got in zip(work, actual, strict=True):
        compare(backend, run_alone(decoder, job), got)


def compare(backend: str, want: Request, got: Request) -> None:
    cancelled = got.finish_reason is FinishReason.ABORT
    reference = want.output[: len(got.output)] if cancelled else want.output
    at = first_difference(reference, got.output)
    if at is not None:
        assert at < min(len(reference), len(got.output))
        assert score_gap(target(backend), want, at, got.output[at]) < TIE
    elif not cancelled:
        assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)


@some(6)
@given(scenarios(), st.sampled_from(["random", "skilled"]), st.booleans())
def test_any_scenario_gives_the_plain_text(scenario: Any, kind: str, tree: bool) -> None:
    check("torch", scenario, kind, tree)


@needs_native
@some(24)
@given(scenarios(), st.sampled_from(["random", "skilled"]), st.booleans())
def test_any_scenario_gives_the_plain_text_native(scenario: Any, kind: str, tree: bool) -> None:
    check("native", scenario, kind, tree)


@some(14)
@given(scenarios(), st.sampled_from(["random", "skilled"]), st.booleans())
def test_any_scenario_gives_the_plain_text_launched_ahead(
    scenario: Any, kind: str, tree: bool
) -> None:
    check("torch", scenario, kind, tree, ahead=True)
