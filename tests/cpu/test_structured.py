"""Structured output against brute force: masks, drafts, rollback and texts."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness import (
    VOCAB,
    AtMost,
    Job,
    clocks,
    fresh_logits,
    irregular_clock,
    make_engine,
    needs_native,
    run_jobs,
    tiny_decoder,
)
from structured_harness import (
    BYTES,
    ENDS,
    Language,
    check_rules,
    grammars,
    params_with,
    structured_engine,
    structures,
    text_of,
    watch_drafts,
    word,
)
from surefoot import LLM
from surefoot.engine import structured as engine_structured
from surefoot.errors import SurefootError
from surefoot.kernels.draws import TokenMasks
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from surefoot.sampling.grammar import GrammarState
from surefoot.speculation.proposer import Drafts
from surefoot.structured import StructuredOutputsParams
from tiny_models import tiny_hf_model

TIE = 1e-4
WORDS = -(-VOCAB // 32)
several = settings(
    max_examples=60,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def masks_behind(state: GrammarState, drafts: list[int]) -> list[set[int]]:
    bits = np.full((len(drafts) + 1, WORDS), 0x5A5A5A5A, dtype=np.int32)
    state.write_masks(drafts, bits)
    flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in flags]


@several
@given(structures(), st.data())
def test_masks_are_those_of_brute_force(structure: Any, data: st.DataObject) -> None:
    """On a random walk through the grammar, with drafts looked at and taken back at each step."""
    options, language = structure
    state = grammars().start(StructuredOutputsParams(**options))
    output: list[int] = []
    for _ in range(12):
        state.sync(output)
        allowed = language.allowed(output)
        assert masks_behind(state, []) == [allowed]
        check_forced(state, language, output)
        # Having been asked for it changes nothing.
        assert masks_behind(state, []) == [allowed]
        assert state.accepting == (text_of(output) in language.texts)
        tokens = st.integers(0, VOCAB - 1)
        drafts = data.draw(st.lists(st.one_of(st.sampled_from(sorted(allowed)), tokens)))
        right: list[int] = []
        for draft in drafts:
            if draft not in language.allowed([*output, *right]) or set(right) & set(ENDS):
                break
            right.append(draft)
        assert state.allowed_prefix(drafts) == len(right)
        before_end = [token for token in right if token not in ENDS]
        expected = [language.allowed([*output, *right[:n]]) for n in range(len(before_end) + 1)]
        assert masks_behind(state, right)[: len(expected)] == expected
        # Looking ahead left no trace.
        assert masks_behind(state, []) == [allowed]
        token = data.draw(st.sampled_from(sorted(allowed)))
        output.append(token)
        if token in ENDS:
            break


# Of tokens that texts of the grammars are made of.
bad_words = st.builds(lambda ids: word(*ids), st.lists(st.integers(2, 20), min_size=1, max_size=3))


def check_forced(state: GrammarState, language: Language, output: list[int]) -> None:
    """The text that all texts of the language go on with, and no more than that."""
    text = text_of(output)
    beyond = [each[len(text) :] for each in language.texts if each.startswith(text)]
    first, last = min(beyond), max(beyond)
    same = [a == b for a, b in zip(first, last, strict=False)]
    common = first[: same.index(False) if False in same else len(same)]
    tokens, confidence = state.forced(4)
    assert len(tokens) == len(confidence) <= 4 and all(0.0 < each <= 1.0 for each in confidence)
    assert common.startswith(text_of(tokens)) and not set(tokens) & set(ENDS)
    assert state.allowed_prefix(tokens) == len(tokens)
    if common and common.isascii():
        assert tokens, (text, common)


EVERYBODY = "ngram", "oracle", "saboteur", "meddler", "grammar"
LOADED = EVERYBODY, EVERYBODY, ("meddler", "grammar"), ("ngram", "grammar"), ("grammar",)


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[Job], dict[int, Language], dict[str, Any]]:
    jobs, wanted = [], {}
    loaded = draw(st.sampled_from(LOADED))
    for seed in range(draw(st.integers(2, 5))):
        values: dict[str, Any] = {
            "seed": seed,
            "max_tokens": draw(st.sampled_from([3, 20, 40, 40])),
        }
        values["temperature"] = draw(st.sampled_from([0.0, 0.7, 1.0, 3.0]))
        extras: dict[str, st.SearchStrategy[Any]] = {
            "top_k": st.sampled_from([1, 3]),
            "top_p": st.sampled_from([0.3, 0.9]),
            "min_p": st.sampled_from([0.05]),
            "repetition_penalty": st.sampled_from([0.7, 1.5]),
            "presence_penalty": st.sampled_from([-1.0, 0.8]),
            "frequency_penalty": st.sampled_from([0.6]),
            "logit_bias": st.just({2: 5.0, 7: -100.0, 12: 100.0}),
            "stop_token_ids": st.lists(st.integers(2, 14), max_size=2),
            "logprobs": st.integers(0, 4),
            "prompt_logprobs": st.integers(0, 1),
            "bad_words": st.lists(bad_words, min_size=1, max_size=3),
            "allowed_token_ids": st.just([*range(12), *range(17, 23)]),
        }
        for name in draw(st.sets(st.sampled_from(sorted(extras)), max_size=4)):
            values[name] = draw(extras[name])
        if draw(st.sampled_from([True, True, True, False])):
            options, wanted[seed] = draw(structures())
            params = params_with(options, **values)
        else:
            params = SamplingParams(**values)
        methods = ["auto", "auto", *loaded, *loaded, "off"]
        method = draw(st.sampled_from(methods))
        jobs.append(
            Job(
                prompt=tuple(draw(st.lists(st.integers(2, 47), min_size=1, max_size=9))),
                params=params,
                speculation=SpeculationParams(method),
                arrival=draw(st.integers(0, 2)),
                cancel=draw(st.sampled_from([None, None, None, 9])),
            )
        )
    longest = max(len(job.prompt) + (job.params.max_tokens or 0) for job in jobs)
    tight = -(-longest // 4)
    return jobs, wanted, {
        "max_draft_tokens": draw(st.integers(1, 6)),
        "kv_blocks": tight + draw(st.sampled_from([0, 0, 1, 4])),
        "max_num_seqs": draw(st.integers(2, 4)),
        "max_num_batched_tokens": draw(st.sampled_from([4, 16, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "draft_policy": draw(st.sampled_from(["auto", "fixed", "fixed"])),
        "calibration_seconds": 0.0,
        "ahead": draw(st.booleans()),
        "proposers": loaded,
    }  # fmt: skip


def plain_run(backend: str, job: Job) -> Request:
    engine = structured_engine(
        tiny_decoder(backend),
        max_draft_tokens=0,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    )
    return run_jobs(engine, [replace(job, cancel=None, arrival=0, speculation=OFF)])[0]


OFF = SpeculationParams("off")


def check(backend: str, scenario: Any, clock: int | None) -> None:
    """``clock`` as of ``irregular_clock``."""
    jobs, wanted, options = scenario
    plain = [plain_run(backend, job) for job in jobs]
    texts = {"texts": tuple((*request.prompt, *request.output) for request in plain)}
    if backend == "native":
        # Rounds that are launched ahead are the torch twins of a GPU's.
        options = {**options, "ahead": None}
    knowing = {name: texts for name in ("oracle", "meddler") if name in options["proposers"]}
    options = {**options, "proposer_options": knowing}
    engine = structured_engine(tiny_decoder(backend), **options)
    watch_drafts(engine, wanted)
    with irregular_clock(clock):
        done = run_jobs(engine, jobs)
    for job, want, got in zip(jobs, plain, done, strict=True):
        cancelled = got.finish_reason is FinishReason.ABORT and job.cancel is not None
        count = len(got.output)
        assert got.output == (want.output[:count] if cancelled else want.output)
        if not cancelled:
            assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
        check_text(got, wanted.get(got.seed))
        check_rules(got)
        for left, right in zip(want.logprobs, got.logprobs, strict=False):
            assert left.token_id == right.token_id
            assert math.isclose(left.logprob, right.logprob, abs_tol=TIE)
            for (_, a), (_, b) in zip(left.top, right.top, strict=True):
                assert math.isclose(a, b, abs_tol=TIE)


def check_text(request: Request, language: Language | None) -> None:
    """Whole if it ended by itself, else the beginning of a text."""
    if language is None:
        return
    text = text_of(request.output)
    assert language.viable(text)
    if request.finish_reason is FinishReason.STOP and request.output[-1] in ENDS:
        assert text in language.texts and language.matches(text)


@settings(several, max_examples=25)
@given(scenarios(), clocks)
def test_texts_are_plain_decodings_and_fit_torch(scenario: Any, clock: int | None) -> None:
    check("torch", scenario, clock)


@needs_native
@settings(several, max_examples=40)
@given(scenarios(), clocks)
def test_texts_are_plain_decodings_and_fit_native(scenario: Any, clock: int | None) -> None:
    check("native", scenario, clock)


def test_right_drafts_are_accepted_and_wrong_ones_cut() -> None:
    """An oracle's drafts all pass, a saboteur's mostly do not, and both give the same text."""
    structure = {"regex": r"(ab|a1|cab|é|1){14,20}"}
    params = params_with(structure, temperature=1.0, seed=3, max_tokens=40)
    want = plain_run("torch", Job((3, 4, 5), params))
    stats = {}
    for name in ("oracle", "meddler", "saboteur"):
        texts = {"texts": ((*want.prompt, *want.output),)} if name != "saboteur" else {}
        engine = structured_engine(
            tiny_decoder(),
            proposers=(name,),
            proposer_options={name: texts},
            draft_policy="fixed",
            max_draft_tokens=4,
        )
        [got] = run_jobs(engine, [Job((3, 4, 5), params)])
        assert got.output == want.output
        stats[name] = got.stats
    assert stats["oracle"].accepted == stats["oracle"].verified >= len(want.output) // 2
    assert 0 < stats["meddler"].accepted < stats["meddler"].verified
    assert stats["saboteur"].verified < stats["saboteur"].offered / 2


def test_what_a_grammar_forces_has_kv_behind_a_prompts_last_row() -> None:
    """Chunks of a prompt may leave one row of it: drafts are verified behind that one."""
    first = Job((2, 3), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    [plain] = run_jobs(structured_engine(tiny_decoder(), max_draft_tokens=0), [first])
    params = params_with({"regex": "abcabcabcabc"}, temperature=0, max_tokens=20)
    second = Job((4, 5, 6, 7), params, SpeculationParams("grammar"), arrival=3)
    engine = structured_engine(
        tiny_decoder(),
        draft_policy="fixed",
        proposers=("oracle", "grammar"),
        proposer_options={"oracle": {"texts": ((*plain.prompt, *plain.output),)}},
        max_draft_tokens=6,
        kv_blocks=40,
    )
    engine.loop.gathering.limits = AtMost(lambda decoding: 3)
    _, got = run_jobs(engine, [first, second])
    assert text_of(got.output[:-1]) == b"abcabcabcabc" and got.stats.accepted


def test_rollback_right_after_rejections() -> None:
    """Between rounds the state stands behind the committed tokens, whatever was drafted."""
    structure: dict[str, Any] = {"regex": r"(ab|a1|cab|bc|1){14,20}"}
    params = params_with(structure, temperature=1.0, seed=1, max_tokens=40)
    want = plain_run("torch", Job((3,), params))
    texts = {"texts": ((*want.prompt, *want.output),)}
    engine = structured_engine(
        tiny_decoder(),
        proposers=("meddler",),
        proposer_options={"meddler": texts},
        draft_policy="fixed",
    )
    request = engine.make_request("r", (3,), params)
    engine.add(request)
    rejections = 0
    while engine.has_work:
        engine.step()
        rejections += request.stats.verified - request.stats.accepted
        fresh = grammars().start(StructuredOutputsParams(**structure))
        fresh.sync(request.output)
        state: Any = request.grammar
        state.sync(request.output)
        if not set(request.output) & set(ENDS):
            assert masks_behind(state, []) == masks_behind(fresh, [])
    assert rejections and request.output == want.output


def test_preempted_texts_go_on_where_they_stood() -> None:
    structure = {"regex": r"(ab|a1|cab|bc|1){20}"}
    jobs = [
        Job((3, 4, 5 + seed), params_with(structure, temperature=1.0, seed=seed, max_tokens=45))
        for seed in range(4)
    ]
    plain = [plain_run("torch", job) for job in jobs]
    texts = {"texts": tuple((*request.prompt, *request.output) for request in plain)}
    engine = structured_engine(
        tiny_decoder(),
        proposers=("meddler",),
        proposer_options={"meddler": texts},
        draft_policy="fixed",
        kv_blocks=16,
    )
    requests = run_jobs(engine, jobs)
    assert sum(request.preemptions for request in requests) >= 2
    assert sum(request.stats.verified - request.stats.accepted for request in requests) > 5
    for want, got in zip(plain, requests, strict=True):
        assert got.output == want.output and got.finish_reason == want.finish_reason


def test_greedy_text_is_the_best_of_what_is_allowed() -> None:
    """Logits of fresh prefills, and the allowed tokens by brute force."""
    texts = frozenset(
        b"".join(parts) for parts in itertools.product((b"ab", b"a", b"c1"), repeat=4)
    )
    language = Language("(ab|a|c1){4}", texts)
    params = params_with({"regex": language.regex}, temperature=0)
    engine = structured_engine(tiny_decoder(), proposers=("saboteur",), draft_policy="fixed")
    [request] = run_jobs(engine, [Job((5, 6, 7), params)])
    logits = fresh_logits(tiny_decoder(), request.tokens)[len(request.prompt) - 1 :]
    for place, token in enumerate(request.output):
        allowed = language.allowed(request.output[:place])
        assert token == max(allowed, key=lambda item: float(logits[place, item]))
    assert request.output[-1] in ENDS


def test_what_is_cut_is_neither_offered_nor_watched() -> None:
    engine = structured_engine(tiny_decoder(), proposers=("oracle", "saboteur"))
    job = Job((3, 4, 5), params_with({"choice": ["abcab", "11"]}, temperature=0))
    request = engine.make_request("r", job.prompt, job.params)
    engine.add(request)
    while not request.output:
        engine.step()
    engine.loop.drop()
    engine.loop.gathering.next(())
    engine.loop.uploads.send()
    controller, offers, slot = engine.controller, engine.round.books.offers, request.slot
    slots = torch.tensor([slot])
    good = allowed_next(request)
    for index, tokens in enumerate(([good[0], 7, 7, 7], [7, 7, 7, 7])):
        drafts = Drafts(torch.tensor([tokens]), torch.tensor([4]), torch.full((1, 4), 0.5))
        engine.round.books.learn(index, slots, drafts)
    offers.tokens[slot, :4] = torch.tensor([good[0], 7, 7, 7])
    offers.lengths[slot], offers.chances[slot, :4], offers.proposer[slot] = 4, 0.5, 0
    engine.loop._grammars.note(slot, 0, [good[0], 7, 7, 7], None)
    engine.loop._grammars.write([request])
    assert int(offers.lengths[slot]) == 1
    assert offers.chances[slot, :4].tolist() == [0.5, 0.0, 0.0, 0.0]
    assert [int(e.watched_length[slot]) for e in controller.estimators] == [1, 4]
    # An older offer is still being watched: the cut is not its.
    engine.state.length[slot] += 1
    engine.loop._grammars.note(slot, 0, [7, 7], None)
    engine.loop._grammars.write([request])
    assert int(offers.lengths[slot]) == 0
    assert int(controller.estimators[0].watched_length[slot]) == 1


def allowed_next(request: Any) -> list[int]:
    """A token that the request's grammar allows next."""
    request.grammar.sync(request.output)
    return [t for t in range(VOCAB) if request.grammar.allowed_prefix([t])][:1]


class Forbids:
    """A grammar that allows every text without some token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def sync(self, output: Sequence[int]) -> None:
        pass

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        return next((at for at, token in enumerate(drafts) if token == self.token), len(drafts))


@pytest.mark.parametrize(
    ("parents", "forbidden", "left"),
    [
        ([-1, 0, 1, 2], 7, 2), ([-1, 0, 1, 2], 9, 4), ([-1, -1, 0, 1], 6, 1),
        ([-1, -1, 0, 1], 7, 2), ([-1, -1, 0, 1], 8, 3), ([-1, -1, 0, 1], 9, 4),
    ],
)  # fmt: skip
def test_offers_are_cut_before_the_first_draft_that_is_forbidden(
    parents: list[int], forbidden: int, left: int
) -> None:
    """Chains, and trees on whose other branches more would be allowed: leading drafts are kept."""
    engine = make_engine(tiny_decoder(), max_num_seqs=2, max_draft_tokens=4)
    masks, state = engine.loop._grammars, engine.state
    state.mask_bits = torch.zeros((state.slots * (1 + state.max_drafts), WORDS), dtype=torch.int32)
    grammar: Any = Forbids(forbidden)
    grammar.write_masks = lambda drafts, bits: bits.fill(-1)
    grammar.forced = lambda most: ([], [])
    request = engine.make_request("r", (3, 4), SamplingParams())
    request.slot, request.output, request.grammar = 1, [3], grammar
    masks.note(1, 0, [5, 6, 7, 8], parents)
    engine.round.books.offers.lengths[1] = 4
    assert masks.write([request]) == {}
    assert int(engine.round.books.offers.lengths[1]) == left


@pytest.mark.parametrize("tree", [False, True])
def test_what_the_host_offers_stands_in_the_place_of_what_was_cut(tree: bool) -> None:
    engine = structured_engine(
        tiny_decoder(), max_num_seqs=2, max_draft_tokens=4, proposers=("ngram", "grammar")
    )
    masks, state, offers = engine.loop._grammars, engine.state, engine.round.books.offers
    state.mask_bits = torch.zeros((state.slots * (1 + state.max_drafts), WORDS), dtype=torch.int32)
    if tree:
        offers.parents = torch.full((state.slots, 4), 9)
    grammar: Any = Forbids(6)
    grammar.write_masks = lambda drafts, bits: bits.fill(-1)
    grammar.forced = lambda most: ([9, 9, 9], [0.9, 0.9, 0.9])
    request = engine.make_request("r", (3, 4), SamplingParams())
    request.slot, request.output, request.grammar = 1, [3], grammar
    request.computed = request.length - 1
    masks.note(1, 0, [5, 6, 7, 8], None)
    offers.tokens[1], offers.lengths[1] = torch.tensor([5, 6, 7, 8]), 4
    offers.chances[1] = 0.25
    before = [offers.tokens[0].clone(), offers.chances[0].clone()]
    [(slot, (number, length))] = masks.write([request]).items()
    assert (slot, number, length) == (1, engine.proposer_names.index("grammar"), 3)
    assert int(offers.proposer[1]) == number and int(offers.lengths[1]) == 3
    assert offers.tokens[1].tolist() == [9, 9, 9, 0]
    chances = offers.chances[1].tolist()
    assert 1 >= chances[0] >= chances[1] >= chances[2] > chances[3] == 0
    assert torch.equal(offers.tokens[0], before[0]) and torch.equal(offers.chances[0], before[1])
    if offers.parents is not None:
        assert offers.parents[1].tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("ahead", [False, True])
def test_whoever_begins_again_in_another_slot_goes_on(ahead: bool) -> None:
    """Who takes part is remembered from round to round, but not beyond that."""
    params = [
        params_with({"regex": "(a|b|c|1){9,12}"}, temperature=3.0, seed=seed) for seed in (1, 2)
    ]

    def outputs(disturbed: bool) -> list[list[int]]:
        engine = structured_engine(tiny_decoder(), ahead=ahead, max_num_seqs=3)
        requests = [engine.make_request(str(n), (3, 4 + n), each) for n, each in enumerate(params)]
        for request in requests:
            engine.add(request)
        while not all(len(request.output) > 2 for request in requests):
            engine.step()
        if disturbed:
            before = [request.slot for request in requests]
            engine.settle()
            engine.scheduler.preempt()
            engine.scheduler.preempt()
            engine.scheduler._free_slots.reverse()
            while any(request.slot < 0 for request in requests):
                engine.step()
            assert [request.slot for request in requests] != before
        while engine.has_work:
            engine.step()
        return [request.output for request in requests]

    assert outputs(True) == outputs(False)


def test_without_structure_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are compiled grammars, nor anything of the grammar library."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a request without structure paid for it")

    monkeypatch.setattr("surefoot.speculation.state.TokenMasks", never)
    monkeypatch.setattr(engine_structured.GrammarMasks, "write", never)
    monkeypatch.setattr("surefoot.speculation.state.SlotState._make_masks", never)
    monkeypatch.setattr("surefoot.sampling.grammar._library", never)
    engine = structured_engine(tiny_decoder(), draft_policy="fixed")
    jobs = [Job((3, 4, 3, 4), SamplingParams(temperature=t, max_tokens=12)) for t in (0.0, 1.0)]
    assert all(len(request.output) for request in run_jobs(engine, jobs))


def test_neighbours_without_structure_stay_free() -> None:
    """In a mixed batch only the rows of a request with a grammar are masked."""
    free = Job((3, 4, 5), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    bound = Job((3, 4, 5), params_with({"choice": ["abcab", "11"]}, temperature=0))
    alone = plain_run("torch", free)
    engine = structured_engine(tiny_decoder(), proposers=("saboteur",), draft_policy="fixed")
    first, second = run_jobs(engine, [bound, free])
    assert second.output == alone.output
    assert text_of(first.output) in (b"abcab", b"11") and first.output[-1] in ENDS


def test_choices_of_one_prompt_have_their_own_state() -> None:
    engine = structured_engine(tiny_decoder())
    params = params_with({"regex": "(a|b|c|1){6,9}"}, temperature=3.0, seed=1, n=4)
    leader = engine.make_request("0", (3, 4), params)
    group = [leader]
    group += [engine.make_request(str(n), (3, 4), params, None, n, leader) for n in range(1, 4)]
    for request in group:
        engine.add(request)
    while engine.has_work:
        engine.step()
    texts = {text_of(request.output) for request in group}
    assert len(texts) > 1 and all(6 <= len(text) <= 9 for text in texts)


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(
    "spans",
    [[(1, 1)], [(0, 1)], [(1, 2), (0, 1), (3, 3), (2, 2)], [(0, 2), (1, 0), (3, 4)]],
    ids=str,
)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 9000])
def test_masking_logits(vocab: int, spans: list[tuple[int, int]], backend: str) -> None:
    """Spans are (slot, rows). Slots 1 and 3 have masks, three each."""
    generator = torch.Generator().manual_seed(vocab)
    shape = 4 * 3, -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    owners, counts = (torch.tensor(column) for column in zip(*spans, strict=True))
    logits = torch.randn(int(counts.sum()), vocab, generator=generator)
    masked = torch.tensor([0, 1, 0, 1])
    first = counts.cumsum(0) - counts
    masks = TokenMasks(bits.int(), 3, owners.repeat_interleave(counts), first, masked)
    expected, row = logits.clone(), 0
    for slot, count in spans:
        for place in range(count):
            words = bits[3 * slot + min(place, 2)]
            for token in range(vocab if masked[slot] else 0):
                if not (int(words[token // 32]) >> (token % 32)) & 1:
                    expected[row, token] = float("-inf")
            row += 1
    tiny_decoder(backend).backend.mask_tokens(logits, masks)
    assert torch.equal(logits, expected)


def test_a_dead_end_is_told() -> None:
    """The vocabulary has no "~": the text stops before it, and not as if it were whole."""
    engine = structured_engine(tiny_decoder())
    [request] = run_jobs(engine, [Job((3,), params_with({"regex": "aaa1~"}, temperature=0))])
    assert text_of(request.output) == b"aaa1"
    assert request.finish_reason is FinishReason.ABORT
    assert "structured_outputs" in str(request.stop_reason)


def test_a_draft_into_a_dead_end_leaves_no_trace() -> None:
    """The key's letters are not in the vocabulary: an opening quote can be drafted, and that is
    that. The text itself goes on with blanks."""
    schema = {"type": "object", "properties": {"name": {}}, "required": ["name"]}
    schema["x-guidance"] = {"whitespace_flexible": True}
    state = grammars().start(StructuredOutputsParams(json=schema))
    brace, quote, blank = (BYTES.index(letter) for letter in (b"{", b'"', b" "))
    masks = [np.zeros((rows, WORDS), dtype=np.int32) for rows in (1, 2, 1)]
    state.sync([brace, blank])
    state.write_masks([], masks[0])
    assert state.allowed_prefix([quote]) == 1
    state.write_masks([quote], masks[1])
    state.write_masks([], masks[2])
    assert np.array_equal(masks[1][0], masks[0][0]) and np.array_equal(masks[2], masks[0])
    assert int(masks[1][1, 0]) == sum(1 << token for token in ENDS) and not masks[1][1, 1:].any()
    state.sync([brace, blank, blank])
    assert state.allowed_prefix([blank, quote, quote]) == 2 and not state.problem


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({}, ["", " ", "\n", "\n\n", "\n" + 32 * " "], ["  ", "\n\n\n", " \n", "\n" + 33 * " "]),
        ({"whitespace_flexible": True}, ["", 9 * "\n ", 99 * " "], []),
        ({"whitespace_flexible": False}, [""], [" ", "\n"]),
        ({"whitespace_pattern": " {3}"}, ["", "   "], ["  ", "    ", "\n"]),
    ],
)
@pytest.mark.parametrize("compact", [False, True])
def test_white_space_in_json_is_bounded(
    options: Any, allowed: list[str], refused: list[str], compact: bool
) -> None:
    """Unless a schema says otherwise; and where a request wants none, there is none."""
    schema = {"type": "object", "x-guidance": options} if options else {"type": "object"}
    kinds = [{"json": schema}] if options else [{"json": schema}, {"json_object": True}]
    for kind in kinds:
        wanted = StructuredOutputsParams.of({**kind, "disable_any_whitespace": compact})
        assert wanted is not None
        state = grammars().start(wanted)
        for blanks in (*allowed, *refused):
            tokens = [BYTES.index(letter.encode()) for letter in "{" + blanks + '"']
            right = blanks == "" or (blanks in allowed and not compact)
            assert (state.allowed_prefix(tokens) == len(tokens)) == right, (kind, blanks)


def test_a_grammar_in_lark_and_in_gbnf() -> None:
    lark = 'start: "a" part+\npart: "b" start "c" | "1"\n'
    gbnf = 'root ::= "a" part+\npart ::= "b" root "c" | "1"\n'
    outputs = []
    for grammar in (lark, gbnf):
        engine = structured_engine(tiny_decoder())
        params = params_with({"grammar": grammar}, temperature=1.0, seed=4, max_tokens=30)
        [request] = run_jobs(engine, [Job((3,), params)])
        outputs.append(request.output)
        text = text_of(request.output).decode()
        assert text.startswith("a") and set(text) <= set("abc1")
    assert outputs[0] == outputs[1]


BAD = [
    ({}, "structured_outputs"),
    ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
    ({"regex": "a("}, "structured_outputs.regex"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex"),
    ({"regex": r"(a)\1"}, "structured_outputs.regex"),
    ({"regex": "~"}, "structured_outputs.regex"),
    ({"regex": 3}, "structured_outputs.regex"),
    ({"choice": []}, "structured_outputs.choice"),
    ({"choice": "ab"}, "structured_outputs.choice"),
    ({"choice": [1]}, "structured_outputs.choice"),
    ({"json": "{"}, "structured_outputs.json"),
    ({"json": "[]"}, "structured_outputs.json"),
    ({"json": {"type": "objct"}}, "structured_outputs.json"),
    ({"json": {"enum": []}}, "structured_outputs.json"),
    ({"json": {"not": {"type": "string"}}}, "structured_outputs.json"),
    ({"json": {"$ref": "http://example.org/x"}}, "structured_outputs.json"),
    ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json"),
    ({"grammar": "start: nothing"}, "structured_outputs.grammar"),
    ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
    ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
    ({"pattern": "a"}, "structured_outputs.pattern"),
]


@pytest.mark.parametrize(("structure", "option"), BAD)
def test_bad_grammars_are_refused_by_name(structure: Any, option: str) -> None:
    engine = structured_engine(tiny_decoder())
    with pytest.raises(SurefootError) as caught:
        engine.make_request("r", (3,), params_with(structure))
    assert caught.value.option == option
    assert "\n" not in caught.value.problem and len(caught.value.problem) < 500


@pytest.mark.parametrize("name", ["min_tokens", "ignore_eos"])
def test_what_denies_a_grammar_its_end_is_refused(name: str) -> None:
    with pytest.raises(SurefootError) as caught:
        params_with({"choice": ["a"]}, **{name: 1 if name == "min_tokens" else True})
    assert caught.value.option == name


def test_a_grammar_is_compiled_once() -> None:
    known = grammars()
    wanted = StructuredOutputsParams(json={"type": "object"})
    assert not known.knows(wanted)
    known.start(wanted).sync([BYTES.index(b"{")])
    assert known.knows(StructuredOutputsParams(json='{ "type": "object" }'))
    # The first text's state is its own.
    assert masks_behind(known.start(wanted), []) != [set()]
    assert BYTES.index(b"{") in masks_behind(known.start(wanted), [])[0]


@pytest.fixture(scope="module")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A random model with a real byte-level tokenizer; drafts are verified whether they pay or
    not."""
    folder = tiny_hf_model("llama", tmp_path_factory.mktemp("model"))
    yield LLM(
        str(folder), dtype="float32", threads=1, draft_policy="fixed",
        max_num_seqs=50, max_model_len=256,
    )  # fmt: skip


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
        "next": {"anyOf": [{"const": 7}, {"type": "object", "additionalProperties": False}]},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}


def test_200_of_200_sampled_texts_fit_their_schema(tiny_llm: LLM) -> None:
    """By another library's judgement; with speculation and without it the same texts."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=200,
            logprobs=1,
            structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        )
        for seed in range(200)
    ]
    prompts: Any = ['{"name":"the cat","age":12,"colour":"red","tags":[true,true],'] * 200
    fast = tiny_llm.generate(prompts, params)
    plain = tiny_llm.generate(prompts, params, speculation="off")
    drafted = accepted = 0
    for left, right in zip(fast, plain, strict=True):
        [with_drafts], [without] = left.outputs, right.outputs
        assert with_drafts.token_ids == without.token_ids
        assert with_drafts.finish_reason == "stop"
        jsonschema.validate(json.loads(with_drafts.text), SCHEMA)
        for a, b in zip(with_drafts.logprobs or (), without.logprobs or (), strict=True):
            assert math.isclose(a.logprob, b.logprob, abs_tol=TIE)
        drafted += with_drafts.speculation.verified
        accepted += with_drafts.speculation.accepted
    print(f"{len({output.outputs[0].text for output in fast})} texts, {accepted} of {drafted}")
    assert drafted > 200 and 0 < accepted < drafted
    assert len({output.outputs[0].text for output in fast}) > 100


def test_stop_strings_streams_and_whole_objects(tiny_llm: LLM) -> None:
    """A stop string cuts a text of a grammar like any other, also while it streams."""
    structure = {"regex": "(ab|cd){3};(ab|cd){9}"}
    params = params_with(structure, temperature=1.0, seed=1, stop=";", logprobs=0)
    [output] = tiny_llm.generate("the cat", params)
    assert re.fullmatch("(ab|cd){3}", output.outputs[0].text)
    assert output.outputs[0].stop_reason == ";"
    assert "".join(chunk.text for chunk in tiny_llm.stream("the cat", params)) == (
        output.outputs[0].text
    )
    anything = params_with({"json_object": True}, temperature=0, max_tokens=20)
    assert tiny_llm.generate("the cat", anything)[0].outputs[0].text.startswith("{")
