"""The core's loop on a tiny engine, with the front's messages written down: what it takes between
rounds, when it waits, and what it says."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Job, make_engine, run_alone, tiny_decoder
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.models.loading.sampling_defaults import SamplingDefaults
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.server import core as core_module
from surefoot.server.core import Core
from surefoot.server.messages import (
    Abort,
    Accepted,
    Add,
    Ready,
    Refused,
    Round,
    Start,
    Stop,
    SwitchedOff,
    decode_score,
    decode_scores,
    decode_to_core,
    decode_to_front,
    encode,
)
from surefoot.speculation.proposers.ngram import NgramProposer
from surefoot.structured import StructuredOutputsParams

PROMPT = [5, 6, 7, 8] * 3


class WrittenLink:
    """Messages arrive after so many rounds. When the core waits, those that are next arrive; when
    none are left, it is told to stop."""

    def __init__(self, arrivals: Mapping[int, Sequence[Any]]) -> None:
        self.sent: list[Any] = []
        self.waits = 0
        self._pending = [(at, m) for at in sorted(arrivals) for m in arrivals[at]]

    @property
    def rounds(self) -> list[Round]:
        return [m for m in self.sent if isinstance(m, Round) and m.news]

    def receive(self, wait: bool) -> Any:
        due = self._pending and self._pending[0][0] <= len(self.rounds)
        if not wait and not due:
            return None
        self.waits += wait
        message = self._pending.pop(0)[1] if self._pending else Stop()
        return decode_to_core(encode(message))

    def wake(self) -> None:
        """Nothing here waits for what another thread does."""

    def send(self, message: Any) -> None:
        self.sent.append(decode_to_front(encode(message)))

    def tokens(self, name: str) -> list[int]:
        return [t for r in self.rounds for news in r.news if news.id == name for t in news.tokens]


def run(arrivals: Mapping[int, Sequence[Any]], **options: Any) -> tuple[Any, WrittenLink]:
    engine = make_engine(tiny_decoder(), draft_policy="fixed", **options)
    link: Any = WrittenLink(arrivals)
    core = Core(engine, link)
    core.run()
    assert not core.requests and not engine.has_work
    assert engine.kv.pool.num_free == engine.kv.pool.capacity, "blocks leaked"
    return engine, link


def add(*names: str, speculation: str = "auto", **params: Any) -> Add:
    values = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, **params}
    sampling = SamplingParams(**values, n=len(names))
    return Add(list(names), PROMPT, sampling, SpeculationParams(speculation))


def alone(**params: Any) -> list[int]:
    values = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, **params}
    return run_alone(tiny_decoder(), Job(tuple(PROMPT), SamplingParams(**values))).output


def test_tokens_are_those_of_the_engine_alone() -> None:
    _, link = run({0: [add("a"), add("b", seed=4)], 3: [add("c", "d", max_tokens=9)]})
    assert link.tokens("a") == alone()
    assert link.tokens("b") == alone(seed=4)
    assert link.tokens("c") == alone(max_tokens=9) != link.tokens("d")
    accepted = [m.ids for m in link.sent if isinstance(m, Accepted)]
    assert accepted == [["a"], ["b"], ["c", "d"]]
    ends = [(n.id, n.finish) for r in link.rounds for n in r.news if n.finish]
    assert sorted(ends) == [(name, "length") for name in "abcd"]
    verified = [n for r in link.rounds for n in r.news if n.verified]
    assert verified and all(n.accepted <= n.verified and n.proposer == 0 for n in verified)


def test_an_abort_takes_effect_before_the_next_round() -> None:
    engine, link = run({0: [add("a", "b"), add("c")], 4: [Abort(["a"]), Abort(["b", "x"])]})
    last = max(i for i, r in enumerate(link.rounds) for n in r.news if n.id in "ab")
    assert last == 3, "rounds were computed for nobody"
    assert link.tokens("c") == alone()
    assert engine.stats.rounds == len(link.rounds)


def test_what_waits_can_be_aborted() -> None:
    _, link = run({0: [add("a"), add("b")], 2: [Abort(["b"])]}, max_num_seqs=1)
    assert link.tokens("a") == alone() and not link.tokens("b")


def test_what_can_be_prepared_is_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    left, found = 7, []

    def prepare(engine: Engine) -> bool:
        nonlocal left
        assert not engine.has_work
        left -= 1
        found.append(engine.stats.rounds)
        return left > 0

    monkeypatch.setattr(Engine, "prepare", prepare)
    # The second request comes with the fourth round of the first.
    engine, link = run({0: [add("a", max_tokens=5)], 4: [add("b", max_tokens=5)]})
    assert link.tokens("a") == alone(max_tokens=5) == link.tokens("b")
    assert found == [engine.stats.rounds] * 7, "all of it at the end, none of it between"
    assert link.waits == 1, "for the stop, when all was prepared"


def test_it_waits_only_when_there_is_nothing_to_do() -> None:
    engine, link = run({0: [add("a", max_tokens=5)], 99: [add("b", max_tokens=5)]})
    # Before the second, and before the stop: the first was there.
    assert link.waits == 2
    assert engine.stats.rounds == len(link.rounds)
    for last in link.rounds[-1], [r for r in link.rounds if r.news[0].id == "a"][-1]:
        assert not last.totals.running and not last.totals.used_blocks


def test_the_front_hears_that_an_abort_left_nothing_running() -> None:
    _, link = run({0: [add("a")], 3: [Abort(["a"])], 4: [Abort(["a"])]})
    resting = link.sent[-1]
    assert isinstance(resting, Round) and not resting.news
    assert not resting.totals.running and not resting.totals.used_blocks


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", ["admit", "catch_up", "expect", "propose"])
def test_a_proposer_that_fails_is_switched_off_and_the_texts_go_on(
    monkeypatch: pytest.MonkeyPatch, method: str, ahead: bool
) -> None:
    inner, calls = getattr(NgramProposer, method), 0
    # "c" waits for "b", so that there are two waves before "e".
    well = 1 if method == "admit" else 2

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > well:
            raise KeyError("first\nsecond")
        return inner(*args)

    monkeypatch.setattr(NgramProposer, method, failing)
    engine = make_engine(tiny_decoder(), ahead, draft_policy="fixed")
    first = [add("a", prompt_logprobs=1), add("b", "c", seed=4), add("d", speculation="ngram")]
    link: Any = WrittenLink({0: first, 9: [add("e", speculation="ngram"), add("f")]})
    Core(engine, link).run()
    for name in "adf":
        assert link.tokens(name) == alone(), name
    assert link.tokens("b") == alone(seed=4) and len(link.tokens("c")) == 20
    scores = [n.prompt_logprobs for r in link.rounds for n in r.news if n.prompt_logprobs]
    assert [len(decode_scores(each)) for [each] in scores] == [len(PROMPT) - 1]
    [off] = [m for m in link.sent if isinstance(m, SwitchedOff)]
    told = "propose" if method == "expect" else method
    assert off.proposers == ["ngram"] and calls == well + 1
    assert off.error == f"KeyError: 'first\\nsecond'; raised by proposer 'ngram' in {told}()"
    [refused] = [m for m in link.sent if isinstance(m, Refused)]
    assert refused.ids == ["e"] and "failed, and was switched off" in refused.problem
    assert refused.fix == "use one of auto, off, grammar"


def test_what_no_proposer_raises_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_decoder(), draft_policy="fixed")
    monkeypatch.setattr(engine.loop, "land", lambda: {}["landed"])
    link: Any = WrittenLink({0: [add("a")]})
    with pytest.raises(KeyError, match="landed"):
        Core(engine, link).run()


class SlowGrammars:
    """Compiles as long as the neighbour's text takes."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.in_time = False

    def knows(self, wanted: StructuredOutputsParams) -> bool:
        return False

    def start(self, wanted: StructuredOutputsParams) -> Any:
        self.in_time = self.go.wait(60)
        raise SurefootError("structured_outputs.regex", "is bad")


class PatientLink(WrittenLink):
    """Lets the compiler end when a text has, and waits for what that has to say."""

    def __init__(self, arrivals: Mapping[int, Sequence[Any]], grammars: SlowGrammars) -> None:
        super().__init__(arrivals)
        self.grammars = grammars
        self.woken = threading.Event()
        self.waited = False

    def receive(self, wait: bool) -> Any:
        if any(news.finish for round_ in self.rounds for news in round_.news):
            self.grammars.go.set()
        if wait and not self._pending and not self.waited:
            # Once, however early it was woken: the core has yet to look why.
            self.waited = self.woken.wait(60)
            assert self.waited
            return None
        return super().receive(wait)

    def wake(self) -> None:
        self.woken.set()


def test_a_grammar_that_takes_long_holds_up_nobody() -> None:
    """Its neighbour's text comes to its end before it is compiled."""
    grammars: Any = SlowGrammars()
    engine = make_engine(tiny_decoder())
    engine.grammars = grammars
    large = add("large", structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=False)
    link: Any = PatientLink({0: [large, add("a")]}, grammars)
    Core(engine, link).run()
    assert grammars.in_time and link.tokens("a") == alone()
    assert [m.ids for m in link.sent if isinstance(m, Refused)] == [["large"]]


def test_a_refusal_names_the_option_and_takes_no_place() -> None:
    bad = [add("a", max_tokens=999), add("b", logit_bias={999: 1.0}), add("c", speculation="x")]
    _, link = run({0: [*bad, add("d")]})
    refused = [m for m in link.sent if isinstance(m, Refused)]
    assert [m.option for m in refused] == ["max_tokens", "logit_bias", "speculation.method"]
    assert [m.ids for m in refused] == [["a"], ["b"], ["c"]]
    assert link.tokens("d") == alone()


def test_those_who_run_do_not_wait_for_all_who_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "TAKING_SECONDS", -1.0)
    _, link = run({0: [add("a")], 3: [add("b", seed=4), add("c", seed=5), add("d", seed=6)]})
    kinds = [m.ids[0] if isinstance(m, Accepted) else "" for m in link.sent]
    places = [kinds.index(name) for name in "bcd"]
    assert all(isinstance(link.sent[place + 1], Round) for place in places)
    assert link.tokens("a") == alone() and link.tokens("d") == alone(seed=6)


def test_a_prompt_is_scored_once_for_all_choices() -> None:
    _, link = run({0: [add("a", "b", prompt_logprobs=1, logprobs=2)]})
    news = [n for r in link.rounds for n in r.news]
    [scored] = [n for n in news if n.prompt_logprobs is not None]
    [packed] = scored.prompt_logprobs or [b""]
    assert scored.id == "a" and len(decode_scores(packed)) == len(PROMPT) - 1
    for item in news:
        assert item.logprobs is not None and len(item.logprobs) == len(item.tokens)


def test_the_core_forgets_logprobs_that_the_front_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, add_to_engine = [], Engine.add

    def spy(engine: Engine, request: Request) -> None:
        requests.append(request)
        add_to_engine(engine, request)

    monkeypatch.setattr(Engine, "add", spy)
    _, link = run({0: [add("a", "b", logprobs=1)]})
    for request in requests:
        assert len(request.output) == 20 and not request.logprobs
        news = [item for sent in link.rounds for item in sent.news if item.id == request.request_id]
        told = [decode_score(score).token_id for item in news for score in item.logprobs or []]
        assert told == request.output


def test_what_was_loaded_is_left_out_of_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through torch and a model's objects takes a tenth of a second, in which no round
    runs."""
    engine, counts = make_engine(tiny_decoder()), []
    built = (engine, SimpleNamespace(sampling_defaults=SamplingDefaults()))
    monkeypatch.setattr(core_module, "build_engine", lambda config, progress: built)
    monkeypatch.setattr(core_module.Core, "run", lambda core: counts.append(len(gc.get_objects())))
    link: Any = WrittenLink({0: [Start(EngineConfig())]})
    before = len(gc.get_objects())
    try:
        assert core_module._serve(link) == 0
    finally:
        gc.unfreeze()
    assert counts[0] < before / 10
    assert isinstance(link.sent[-1], Ready)
