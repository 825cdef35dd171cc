"""Forced text as drafts: how it is cut into tokens, offered beside other proposers, and learnt."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness import (
    Job,
    make_engine,
    native_backend,
    needs_native,
    random_weights,
    run_jobs,
    tiny_config,
    tiny_decoder,
)
from structured_harness import BYTES, ENDS, VOCAB, grammars, params_with, structured_engine, text_of
from surefoot.engine import structured as engine_structured
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling import grammar as grammar_module
from surefoot.sampling.forced import GUESSED, LAST, SURE, Cutter
from surefoot.sampling.grammar import Grammars, GrammarState, grammar_text
from surefoot.speculation.decisions import NOTHING
from surefoot.speculation.fixed import FixedPlanner
from surefoot.speculation.host_offers import HostOffers
from surefoot.speculation.host_proposer import HostDrafts, HostProposer
from surefoot.speculation.proposers import grammar as proposer_module
from surefoot.speculation.proposers.grammar import GrammarProposer
from surefoot.structured import StructuredOutputsParams
from test_decisions import GivenCosts, planner_of, play, situation
from tree_proposers import Bush

# What can be chosen is little, what follows from it long.
FORCED = {"regex": r"(abcabcab|1111a1cab)(bcabc|c1\{\})((abc){3}|cab11)"}
BACKEND = "torch" if native_unavailable() else "native"


def params_of(seed: int = 3, **values: Any) -> SamplingParams:
    return params_with(FORCED, **{"temperature": 1.0, "seed": seed, "max_tokens": 40, **values})


@functools.cache
def plain(params: SamplingParams) -> Request:
    engine = structured_engine(tiny_decoder(BACKEND), max_draft_tokens=0, draft_policy="fixed")
    return run_jobs(engine, [Job((3, 4, 5), params)])[0]


# --- tokens ---------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose pieces are the longest of ``words`` or single letters, of which those of a
    character of two bytes are tokens of their own. ``space``: it puts one before every text."""

    special_ids = frozenset(ENDS)

    def __init__(self, *words: str, space: bool = False) -> None:
        self.pieces = [bytes([value]) for value in range(256)]
        self.pieces += sorted((word.encode() for word in words), key=len, reverse=True)
        self.space = space
        self.calls = 0

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.calls += 1
        data, found = (" " * self.space + text).encode(), []
        while data:
            found.append(
                next(
                    (n for n in range(256, len(self.pieces)) if data.startswith(self.pieces[n])),
                    data[0],
                )
            )
            data = data[len(self.pieces[found[-1]]) :]
        return found


def cutter_of(tokenizer: Any) -> Cutter:
    return Cutter(tokenizer, tokenizer.pieces, len(tokenizer.pieces))


def cut(tokenizer: Letters, before: bytes, text: bytes) -> list[bytes]:
    token = tokenizer.pieces.index(before) if before else None
    return [tokenizer.pieces[found] for found in cutter_of(tokenizer).cut(token, text)]


def test_text_is_cut_as_the_tokenizer_would_behind_what_is_there() -> None:
    tokenizer = Letters('"name', '":', "name", ',"', "aa")
    assert cut(tokenizer, b"", b'"name":') == [b'"name', b'":']
    assert cut(tokenizer, b'"', b'name":') == [b"name", b'":']
    # The tokenizer would have written the text before otherwise: the rest stands for itself.
    assert cut(tokenizer, b",", b'"name":') == [b'"name', b'":']
    assert cut(tokenizer, b"a", b"aa") == [b"aa"]


def test_halves_of_characters_are_left_alone() -> None:
    assert cut(Letters(), b"", "aé".encode()[:2]) == [b"a"]
    assert cut(Letters(), b"\xc3", b"\xa9a") == [b"\xa9", b"a"]
    assert cut(Letters(), b"", b"\xa9a") == []
    assert cut(Letters(), b"", b"\xa9") == cut(Letters(), b"", b"") == []


def test_a_space_that_the_tokenizer_adds_is_no_part_of_the_text() -> None:
    assert cut(Letters("name", space=True), b'"', b"name") == [b"name"]
    assert cut(Letters(' "', "name", space=True), b'"', b"name") == [b"name"]
    assert cut(Letters("name", space=True), b"", b"name") == []


def test_what_was_cut_is_remembered() -> None:
    tokenizer = Letters("name")
    cutter = cutter_of(tokenizer)
    assert cutter.cut(34, b"name") == cutter.cut(34, b"name") and tokenizer.calls == 1
    assert cutter.cut(35, b"name") and tokenizer.calls == 2


def test_the_last_token_is_less_sure_unless_it_was_not_the_last() -> None:
    state = grammars().start(StructuredOutputsParams(regex="abcabcab(1|é)"))
    whole = [BYTES.index(piece) for piece in (b"abc", b"abc", b"ab")]
    assert state.forced(5) == (whole, [SURE, SURE, LAST])
    assert state.forced(2) == (whole[:2], [SURE, SURE])
    state.sync(whole)
    assert state.forced(5) == ([], [])


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "maxLength": 2},
        "list": {"type": "array", "items": {"enum": ["yes", "no"]}, "maxItems": 2},
        "in": {"const": {"x": None}},
    },
    "required": ["ab", "list", "in"],
    "additionalProperties": False,
}
WORDS = '":', ' "', '",', "list", "yes", "no", "null", " {", " [", "}}", "], "


def spelling(**values: Any) -> tuple[Letters, GrammarState]:
    tokenizer: Any = Letters(*WORDS)
    known = Grammars(tokenizer, len(tokenizer.pieces), ENDS)
    return tokenizer, known.start(StructuredOutputsParams(json=SCHEMA, **values))


@pytest.mark.parametrize(
    ("text", "beyond"),
    [
        ("", "{"),
        ("{", ""),
        ('{"', 'ab": "'),
        ('{"ab"', ': "'),
        ('{"ab":"', ""),
        ('{"ab":"x"', ","),
        ('{"ab":"x",', ""),
        ('{"ab": "x", "list": ["yes",', ' "'),
        ('{"ab": "x",\n  "list": [\n"yes"],', '\n  "in": {"x": null'),
        ('{"ab": "x",\n  "list": [\n"yes"],\n', '  "in": {"x": null'),
        ('{"ab": "x",\n  "list": [\n"yes"],\n   ', ""),
        ('{"ab":"x","list":["y', 'es"'),
        ('{"ab": "x", "list": ["yes", "no"], "', 'in": {"x": null'),
    ],
)
def test_white_space_is_guessed_by_what_it_was_before(text: str, beyond: str) -> None:
    """And what is the only thing that can follow; the rest is the model's."""
    tokenizer, state = spelling()
    state.sync(tokenizer.encode(text))
    before = mask_of(state)
    tokens, confidence = state.forced(40)
    assert b"".join(tokenizer.pieces[token] for token in tokens).decode() == beyond
    assert confidence[-1:] == [LAST][: len(beyond)] and {*confidence[:-1]} <= {SURE, GUESSED}
    assert state.allowed_prefix(tokens) == len(tokens) and mask_of(state) == before


def mask_of(state: GrammarState) -> list[int]:
    bits = np.zeros((1, 9), dtype=np.int32)
    state.write_masks([], bits)
    return bits[0].tolist()


def test_guessed_tokens_are_those_with_white_space_and_what_follows_it() -> None:
    tokenizer, state = spelling()
    state.sync(tokenizer.encode('{"ab": "x", '))
    tokens, confidence = state.forced(9)
    told = list(zip([tokenizer.pieces[t].decode() for t in tokens], confidence, strict=True))
    assert told == [('"', SURE), ("list", SURE), ('":', GUESSED), (" [", LAST)]
    # Where there is none, nothing is guessed.
    tokenizer, state = spelling(disable_any_whitespace=True)
    assert state.forced(9)[1] == [SURE] * 5 + [LAST]


def test_who_takes_too_long_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_FORCED_SECONDS", -1.0)
    state = grammars().start(StructuredOutputsParams(choice=["abcabc"]))
    assert [bool(state.forced(4)[0]) for _ in range(5)] == [True, True, True, False, False]
    assert not state.problem


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "ahead", "policy"),
    [
        ("torch", True, "fixed"),
        ("torch", True, "auto"),
        pytest.param("native", False, "fixed", marks=needs_native),
        pytest.param("native", False, "auto", marks=needs_native),
    ],
)
def test_forced_text_is_verified_and_the_text_stays(backend: str, ahead: bool, policy: str) -> None:
    engine = structured_engine(
        tiny_decoder(backend), ahead=ahead, proposers=("grammar",), draft_policy=policy
    )
    several = [params_of(temperature=temperature) for temperature in (0.0, 1.0)]
    for params, got in zip(
        several, run_jobs(engine, [Job((3, 4, 5), each) for each in several]), strict=True
    ):
        want = plain(params)
        assert (got.output, got.stop_reason) == (want.output, want.stop_reason)
        stats = got.stats
        assert stats.verified_by_proposer == {"grammar": stats.verified}
        assert stats.accepted > 0 and stats.verified <= stats.offered
        assert stats.rounds + stats.accepted == len(got.output)
        assert {"grammar", None} == set(got.proposed_by)


def test_objects_with_white_space_are_those_of_plain_decoding() -> None:
    tokenizer: Any = Letters(*WORDS)
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    decoder = Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32))
    outputs = []
    plainly: dict[str, Any] = {"max_draft_tokens": 0}
    for options in (plainly, {"proposers": ("grammar",), "ahead": True}):
        engine = make_engine(decoder, draft_policy="fixed", **options)
        engine.grammars = Grammars(tokenizer, config.vocab_size, ENDS)
        wanted = {"json": SCHEMA}
        jobs = [
            Job((3, 4), params_with(wanted, temperature=float(seed), seed=seed, max_tokens=40))
            for seed in range(2)
        ]
        requests = run_jobs(engine, jobs)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    assert sum(request.stats.accepted for request in requests) > 5


def test_who_has_no_time_left_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have offers in the next round; the texts are the same."""
    monkeypatch.setattr(engine_structured, "MAX_HOST_SECONDS", 1e-9)
    engine = structured_engine(tiny_decoder(BACKEND), proposers=("grammar",), draft_policy="fixed")
    got = run_jobs(engine, [Job((3, 4, 5), params_of(seed)) for seed in range(3)])
    assert [each.output for each in got] == [plain(params_of(seed)).output for seed in range(3)]
    assert all(each.stats.offered for each in got)


@pytest.mark.parametrize(
    ("backend", "ahead"), [("torch", True), pytest.param("native", False, marks=needs_native)]
)
@pytest.mark.parametrize("proposers", [("grammar",), ("ngram", "grammar")])
def test_who_has_an_offer_now_and_none_in_the_next_round_gets_the_same_text(
    backend: str, ahead: bool, proposers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where the time for offers is over for some requests in some rounds."""
    tokenizer: Any = Letters(*WORDS)
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    chosen = TorchBackend("cpu", torch.float32) if backend == "torch" else native_backend()
    decoder = Decoder(config, random_weights(config), chosen)

    def texts(**options: Any) -> list[list[int]]:
        engine = make_engine(decoder, draft_policy="fixed", **options)
        engine.grammars = Grammars(tokenizer, config.vocab_size, ENDS)
        wanted = [{"temperature": float(seed), "seed": seed, "max_tokens": 40} for seed in (0, 1)]
        jobs = [Job((3, 4), params_with({"json": SCHEMA}, **each)) for each in wanted]
        return [request.output for request in run_jobs(engine, jobs)]

    plainly = texts(max_draft_tokens=0)
    for seed in range(30):
        dice, clock = random.Random(seed), [0.0]

        def now(dice: random.Random = dice, clock: list[float] = clock) -> float:
            clock[0] += dice.choice((0.0, 0.0, 2e-3))
            return clock[0]

        with monkeypatch.context() as patch:
            patch.setattr(engine_structured, "time", SimpleNamespace(perf_counter=now))
            assert texts(proposers=proposers, ahead=ahead) == plainly, seed


def test_what_was_offered_for_a_round_that_was_not_launched_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has it, and the masks are of its rows: the time that is left changes nothing."""
    engine = structured_engine(tiny_decoder(BACKEND), proposers=("grammar",), draft_policy="fixed")
    request = engine.make_request("r", (3, 4, 5), params_of())
    engine.add(request)
    masks, write = engine.loop._grammars, engine.loop._grammars.write
    offered = []

    def twice(requests: Sequence[Request]) -> Any:
        first = write(requests)
        with monkeypatch.context() as patch:
            patch.setattr(engine_structured, "MAX_HOST_SECONDS", -1.0)
            assert write(requests) == first
        offered.append(len(first))
        return first

    masks.write = twice  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert request.output == plain(params_of()).output and sum(offered) > 2


def test_it_is_on_offer_in_the_round_that_a_request_enters_with() -> None:
    """All but the last token of its prompt is found in the prefix cache, so it decodes at once:
    what the host offers comes behind what its entry clears."""
    engine = structured_engine(
        tiny_decoder(BACKEND), proposers=("grammar",), draft_policy="fixed",
        enable_prefix_caching=True, block_size=4,
    )  # fmt: skip
    prompt = (3, 4, 5, 6, 7)
    run_jobs(engine, [Job(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))])
    request = engine.make_request("r", prompt, params_with({"regex": "abcabcabcabc"}))
    engine.add(request)
    while not request.stats.rounds:
        engine.step()
    assert request.cached == 4 and request.stats.verified > 0


def test_it_competes_with_chains_and_trees() -> None:
    """Wherever it offers, it is likelier than what knows nothing; and a right offer of another
    proposer that reaches further beats it."""
    params = params_of()
    want = plain(params)
    texts = {"texts": ((*want.prompt, *want.output),)}
    for other, options in (("saboteur", {}), (Bush.name, texts), ("oracle", texts)):
        engine = structured_engine(
            tiny_decoder(BACKEND),
            proposers=(other, "ngram", "grammar"),
            proposer_options={other: options},
            draft_policy="fixed",
        )
        [got] = run_jobs(engine, [Job((3, 4, 5), params)])
        assert got.output == want.output
        assert ("grammar" in got.stats.verified_by_proposer) == (other != "oracle"), other
    assert got.stats.accepted_by_proposer["oracle"] > len(want.output) // 2


@pytest.mark.parametrize(
    ("speculation", "drafts"),
    [
        (SpeculationParams("off"), 0),
        (SpeculationParams("ngram"), 0),
        (SpeculationParams("grammar", 0), 0),
        (SpeculationParams("grammar", 1), 1),
        (SpeculationParams("auto"), 4),
    ],
)
def test_requests_choose(speculation: SpeculationParams, drafts: int) -> None:
    engine = structured_engine(
        tiny_decoder(BACKEND),
        proposers=("ngram", "grammar"),
        draft_policy="fixed",
        max_draft_tokens=4,
    )
    most, launch = [0], engine.loop._grammars.write

    def watched(requests: Sequence[Request]) -> Any:
        hosted = launch(requests)
        most.extend(count for _, count in hosted.values())
        return hosted

    engine.loop._grammars.write = watched  # type: ignore[method-assign]
    [got] = run_jobs(engine, [Job((3, 4, 5), params_of(), speculation)])
    assert max(most) == drafts and got.output == plain(params_of()).output


def test_no_draft_stands_behind_a_text_s_last_token() -> None:
    for count in (1, 2, 3):
        engine = structured_engine(
            tiny_decoder(BACKEND), proposers=("grammar",), draft_policy="fixed"
        )
        [got] = run_jobs(engine, [Job((3, 4, 5), params_of(max_tokens=count))])
        assert len(got.output) == count and got.stats.offered <= count - 1


def test_one_that_fails_is_switched_off_and_the_texts_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = structured_engine(
        tiny_decoder(BACKEND), proposers=("ngram", "grammar"), draft_policy="fixed"
    )
    request = engine.make_request("r", (3, 4, 5), params_of())
    engine.add(request)
    monkeypatch.setattr(GrammarProposer, "propose", lambda *_: {}["x"])
    with pytest.raises(KeyError) as caught:
        while engine.has_work:
            engine.step()
    assert "raised by proposer 'grammar' in propose()" in caught.value.__notes__
    assert engine.switch_off_failed() == ["grammar"] and engine.switch_off_failed() == []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert request.output == plain(params_of()).output
    with pytest.raises(SurefootError, match="failed, and was switched off"):
        engine.make_request("s", (3,), params_of(), SpeculationParams("grammar"))


def test_it_is_loaded_where_structured_output_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_decoder(BACKEND), draft_policy="fixed")
    assert engine.proposer_names == ("ngram", "grammar") and engine.state.max_drafts == 8
    assert engine.drafts_from == "ngram (up to 8 tokens), grammar (texts with a grammar)"
    monkeypatch.setattr(proposer_module, "missing_package", lambda: "needs llguidance")
    assert make_engine(tiny_decoder(BACKEND), draft_policy="fixed").proposer_names == ("ngram",)
    with pytest.raises(SurefootError, match="llguidance"):
        make_engine(tiny_decoder(BACKEND), proposers=("grammar",))


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "llguidance, which is not installed"),
        ("1.6.1", "llguidance of version 1.7 or later; 1.6.1 is installed"),
        ("1.7.0rc1", None),
        ("2.0", None),
    ],
)
def test_an_older_library_is_as_good_as_none(
    version: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    names = make_engine(tiny_decoder(BACKEND), draft_policy="fixed").proposer_names
    assert names == (("ngram", "grammar") if problem is None else ("ngram",))
    if problem is not None:
        with pytest.raises(SurefootError, match=problem):
            make_engine(tiny_decoder(BACKEND), proposers=("grammar",))
        with pytest.raises(SurefootError, match=problem):
            grammar_text(StructuredOutputsParams(json_object=True))


def test_a_library_that_cannot_be_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SurefootError, match="llguidance, which cannot be imported"):
        grammar_text(StructuredOutputsParams(json_object=True))


# --- offers and chances ---------------------------------------------------------------------------


class Script(HostProposer):
    """Offers what it is told."""

    name = "script"
    drafts: Any = HostDrafts()

    def propose(self, request: Request, most: int) -> HostDrafts:
        return self.drafts


class Anything:
    """A grammar that allows every text but those with token 9."""

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        return drafts.index(9) if 9 in drafts else len(drafts)


def hosts_and_request() -> tuple[HostOffers, Request]:
    engine: Engine = make_engine(tiny_decoder(BACKEND), max_draft_tokens=0)
    request = engine.make_request("r", (3, 4), SamplingParams())
    grammar: Any = Anything()
    request.slot, request.grammar = 0, grammar
    return HostOffers([Script(None)], 2, VOCAB), request


def test_chances_begin_high_and_follow_what_happens() -> None:
    hosts, request = hosts_and_request()
    Script.drafts = HostDrafts([5, 6], [SURE, LAST])

    def chances(*text: int) -> list[float]:
        request.output += text
        offer = hosts.of(request, 4)
        assert offer is not None and (offer.proposer, offer.tokens) == (2, [5, 6])
        return offer.chances

    first = chances()
    assert first[0] > 0.9 and first[1] == pytest.approx(first[0] * 0.5625)
    # Asked again, or while the text has said nothing yet, nothing has changed.
    assert chances() == first == chances(5)
    right = chances(6)
    assert right[0] > first[0] and right[1] / right[0] > first[1] / first[0]
    wrong = chances(7)
    assert wrong[0] < first[0] and wrong[1] / wrong[0] == pytest.approx(right[1] / right[0])
    # Another request has learnt from this one, but less than it did itself.
    hosts.forget(0)
    assert wrong[0] < chances()[0] < right[0]


def test_offers_are_cut_and_checked() -> None:
    hosts, request = hosts_and_request()
    Script.drafts = HostDrafts([5, 6, 9, 5], [SURE] * 4)
    offer = hosts.of(request, 4)
    assert offer is not None and offer.tokens == [5, 6] and len(offer.chances) == 2
    offer = hosts.of(request, 1)
    assert offer is not None and offer.tokens == [5]
    assert hosts.of(request, 0) is None
    for wrong in ([5], HostDrafts([5], []), HostDrafts([VOCAB], [0.5]), HostDrafts([-1], [0.5])):
        Script.drafts = wrong
        with pytest.raises(SurefootError, match="'script' offers"):
            hosts.of(request, 4)
        assert hosts.proposers[2].has_raised


# --- rounds ---------------------------------------------------------------------------------------

HOSTED = np.array([[0.9, 0.8, 0.0], [np.nan] * 3], dtype=np.float32)


@pytest.mark.parametrize("proposers", [(), (0, 1)])
def test_planners_verify_what_the_host_offers_whoever_proposes(proposers: Any) -> None:
    """Also where nobody proposes on the device, and nothing that costs more than it brings."""
    for cost, drafts in ((0.02, 2), (0.9, 0)):
        planner = planner_of(GivenCosts([((0,), 0)], cost))
        none = [0.0] * 3
        now = situation(none, none, proposers=proposers, hosted=HOSTED)
        assert planner.decide(now).drafts == drafts
        decisions = play(planner, now, 40)[20:]
        assert {each.drafts for each in decisions if not each.explores} == {drafts}
        if not proposers:
            assert planner.decide(situation(none, none, proposers=())).drafts == 0
    for exact in (True, False):
        fixed = FixedPlanner(3, exact)
        now = situation([0.0] * 3, [0.5, 0.0, 0.0], proposers=(), hosted=HOSTED)
        assert fixed.decide(now).drafts == 2
    now = situation([0.0] * 3, [0.5, 0.0, 0.0], proposers=(0,), hosted=HOSTED)
    assert FixedPlanner(3, True).decide(now).drafts == 3


def test_a_round_that_may_verify_is_one_that_has_room() -> None:
    class Sized(GivenCosts):
        def with_drafts(self, requests: int, action: Any) -> Any:
            return ((0,), 0) if action == NOTHING else action

    planner = planner_of(Sized([((0,), 0)], 0.02))
    none = [0.0] * 3
    assert planner.decide(situation(none, none, proposers=())).action == NOTHING
    decision = planner.decide(situation(none, none, proposers=(), hosted=HOSTED))
    assert (decision.action, decision.drafts) == (((0,), 0), 2)


def test_forced_text_is_the_whole_of_what_is_forced() -> None:
    state = grammars().start(StructuredOutputsParams(regex=FORCED["regex"]))
    assert isinstance(state, GrammarState)
    state.sync([BYTES.index(b"11")])
    tokens, _ = state.forced(20)
    assert text_of(tokens) == b"11a1cab"
