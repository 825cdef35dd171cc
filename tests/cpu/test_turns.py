"""One ``LLM`` and several callers: streams read in turn, calls from threads, and one that fails."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from surefoot import LLM, SamplingParams, SurefootError
from surefoot.engine.output import StreamChunk
from surefoot.speculation.proposer import Drafts, Proposer
from tiny_models import tiny_hf_model

PROMPTS = ["the cat sat on the mat and the cat", "dog ate the hat", "the hat sat on the dog"]


def params(seed: int, tokens: int = 40, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=tokens, ignore_eos=True, **values)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny_hf_model("llama", tmp_path_factory.mktemp("model"))
    return LLM(
        str(path), dtype="float32", kv_blocks=150, block_size=4, max_num_seqs=8,
        draft_policy="fixed", calibration_seconds=0.0,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_stays(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.capacity
    llm.engine.check_integrity()


def alone(llm: LLM, place: int, **values: Any) -> tuple[list[int], str, str | None]:
    output = llm.generate(PROMPTS[place], params(place, **values), speculation="off")[0].outputs[0]
    return output.token_ids, output.text, output.finish_reason


def whole(chunks: list[StreamChunk]) -> tuple[list[int], str, str | None]:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert {chunk.finish_reason for chunk in chunks[:-1]} <= {None}
    return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("gaps", [(1, 1), (1, 3)])
def test_streams_read_in_turn_lose_nothing(llm: LLM, gaps: tuple[int, int]) -> None:
    streams = [llm.stream(PROMPTS[place], params(place)) for place in range(2)]
    read: list[list[StreamChunk]] = [[], []]
    going = {0, 1}
    while going:
        for place in sorted(going):
            for _ in range(gaps[place]):
                chunk = next(streams[place], None)
                if chunk is None:
                    going.discard(place)
                    break
                read[place].append(chunk)
    assert [whole(chunks) for chunks in read] == [alone(llm, place) for place in range(2)]


def test_generate_while_a_stream_is_open_takes_nothing_of_it(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(0))
    chunks = [next(stream), next(stream)]
    output = llm.generate(PROMPTS[1], params(1, 25))[0].outputs[0]
    # It ran in the same rounds, and what it has got by then comes without another one.
    rounds = llm.engine.stats.rounds
    chunks.append(next(stream))
    assert llm.engine.stats.rounds == rounds and len(chunks[2].token_ids) > 10
    assert (output.token_ids, output.text, output.finish_reason) == alone(llm, 1, tokens=25)
    assert whole([*chunks, *stream]) == alone(llm, 0)


def test_others_rounds_may_end_what_generate_waits_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, take = alone(llm, 0), llm._turns.take

    def interrupted(work: Callable[[], Any]) -> Any:
        result = take(work)
        while llm.engine.has_work:
            llm.engine.step()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(llm._turns, "take", interrupted)
        output = llm.generate(PROMPTS[0], params(0, stop="@@@"))[0].outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == wanted


def test_what_was_torn_is_mended_before_anybody_reads_it(llm: LLM) -> None:
    """A token came, and before its logprobs did somebody pressed Ctrl-C twice."""
    stream = llm.stream(PROMPTS[0], params(0, logprobs=1))
    chunks = [next(stream), next(stream)]
    [request] = llm.engine.scheduler.running
    request.output.append(5)
    llm.engine.torn = True
    assert whole([*chunks, *stream]) == alone(llm, 0)


def test_a_stop_string_that_others_rounds_ran_past_still_ends_the_text(llm: LLM) -> None:
    tokens, text, _ = alone(llm, 0)
    stop = text[len(text) // 2 :][:3]
    wanted = alone(llm, 0, stop=stop)
    assert wanted[2] == "stop" and len(wanted[0]) < len(tokens)
    stream = llm.stream(PROMPTS[0], params(0, stop=stop))
    first = next(stream)
    llm.generate(PROMPTS[1], params(1, 60))
    assert whole([first, *stream]) == wanted


def test_drafts_behind_a_stop_string_are_not_accepted(llm: LLM) -> None:
    bias = {5: 40.0, 6: 40.0, 7: 40.0}
    loop = [5, 6, 7] * 4
    told = params(0, 36, logit_bias=bias)
    text = llm.generate(loop, told)[0].outputs[0].text
    cuts = 0
    for at in range(len(text) // 2, len(text) - 4, 3):
        output = llm.generate(loop, params(0, 36, logit_bias=bias, stop=text[: at + 3][-9:]))[
            0
        ].outputs[0]
        stats, sources = output.speculation, output.proposed_by
        assert stats.accepted == sum(map(bool, sources)) == sum(stats.accepted_by_proposer.values())
        cut = sources[-1] is not None
        assert stats.rounds + stats.accepted == len(output.token_ids) + cut
        cuts += cut
    assert cuts


def test_closing_a_stream_ends_its_request_and_no_other(llm: LLM) -> None:
    streams = [llm.stream(PROMPTS[place], params(place)) for place in range(3)]
    chunks = [[next(stream)] for stream in streams]
    streams[1].close()
    assert len(llm.engine.scheduler.running) == 2
    for place in (0, 2):
        assert whole([*chunks[place], *streams[place]]) == alone(llm, place)


def test_a_stream_that_is_forgotten_in_the_middle_of_a_round_is_closed_after_it(llm: LLM) -> None:
    held = [llm.stream(PROMPTS[0], params(0))]
    next(held[0])
    inner = llm.engine.round.forward

    def forgetful(*args: Any) -> Any:
        held.clear()
        gc.collect()
        assert len(llm.engine.scheduler.running) == 2
        llm.engine.round.forward = inner  # type: ignore[method-assign]
        return inner(*args)

    llm.engine.round.forward = forgetful  # type: ignore[method-assign]
    stream = llm.stream(PROMPTS[1], params(1))
    chunks = [next(stream)]
    assert not held and len(llm.engine.scheduler.running) == 1
    assert whole([*chunks, *stream]) == alone(llm, 1)


@pytest.fixture
def failing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a method of the engine's only proposer raise an error, so many times."""

    def fail(method: str, error: type[BaseException], times: int = 1) -> None:
        [proposer] = llm.engine.proposers
        inner, left = getattr(proposer, method), [error] * times

        def once(*args: Any) -> Any:
            if left:
                raise left.pop()("x")
            return inner(*args)

        monkeypatch.setattr(proposer, method, once)

    return fail


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_round_that_fails_ends_the_call_that_ran_it_and_no_other(
    llm: LLM, failing: Callable[..., None], error: type[BaseException]
) -> None:
    stream = llm.stream(PROMPTS[0], params(0))
    chunks = [next(stream), next(stream)]
    failing("propose", error)
    with pytest.raises(error):
        llm.generate(PROMPTS[1], params(1))
    assert len(llm.engine.scheduler.waiting) == 1
    assert whole([*chunks, *stream]) == alone(llm, 0)


@pytest.mark.parametrize("method", ["propose", "admit", "expect"])
def test_what_a_proposer_raises_names_it(
    llm: LLM, failing: Callable[..., None], method: str
) -> None:
    failing(method, KeyError, times=2)
    # As often as it fails: each call says so, and the first one after that gives the right text.
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            llm.generate(PROMPTS[1], params(1))
        told = "propose" if method == "expect" else method
        assert caught.value.__notes__ == [f"raised by proposer 'ngram' in {told}()"]
    assert llm.generate(PROMPTS[1], params(1))[0].outputs[0].text == alone(llm, 1)[1]


def test_what_a_proposer_raises_while_it_catches_up_names_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(Proposer):
        name = "careless"

        def catch_up(self, commits: Any) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr(Careless, "__abstractmethods__", frozenset())
    keeping_up, state = llm.engine.round.keeping_up, llm.engine.state
    monkeypatch.setattr(keeping_up, "proposers", [Careless(None, state)])  # type: ignore[abstract]
    monkeypatch.setattr(keeping_up, "_others", [0])
    with pytest.raises(ZeroDivisionError) as caught:
        llm.generate(PROMPTS[1], params(1))
    assert caught.value.__notes__ == ["raised by proposer 'careless' in catch_up()"]


def spoilt(**parts: Callable[[torch.Tensor], Any]) -> Callable[[Drafts], Any]:
    """An offer with other parts, each made of its tokens."""
    return lambda drafts: replace(drafts, **{k: make(drafts.tokens) for k, make in parts.items()})


WIDE = {
    "tokens": lambda x: x[:, :1].repeat(1, 64),
    "confidence": lambda x: torch.zeros(len(x), 64),
}


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda drafts: None, "NoneType instead of Drafts"),
        (lambda drafts: tuple(vars(drafts).values()), "tuple instead of Drafts"),
        (spoilt(tokens=torch.Tensor.tolist), "tokens that are list, not a tensor"),
        (spoilt(tokens=torch.Tensor.int), r"tokens int32 \[1, 8\] on cpu, not int64 \[1, 8\]"),
        (spoilt(tokens=lambda x: x[0]), r"tokens int64 \[8\] on cpu, not int64 \[1, K\] on cpu"),
        (
            spoilt(tokens=lambda x: x.repeat(2, 1)),
            r"tokens int64 \[2, 8\] on cpu, not .* \[1, 8",
        ),
        (spoilt(tokens=lambda x: x.to("meta")), "tokens .* on meta, not .* on cpu"),
        (spoilt(tokens=lambda x: x[:, :5]), r"confidence float32 \[1, 8\] on cpu, not .* \[1, 5\]"),
        (spoilt(lengths=lambda x: x[:, 0].float()), "lengths float32"),
        (
            spoilt(lengths=lambda x: x[:, :1]),
            r"lengths int64 \[1, 1\] on cpu, not int64 \[1\]",
        ),
        (spoilt(confidence=torch.Tensor.double), "confidence float64 .* not float32"),
        (spoilt(parents=lambda x: x[:, :3]), r"parents int64 \[1, 3\] on cpu, not int64 \[1, 8\]"),
        (spoilt(parents=torch.zeros_like), "a tree, and its needs"),
        (spoilt(**WIDE), "64 drafts at once, more than 63"),
    ],
)
def test_an_offer_that_kernels_would_misread_is_refused_by_name(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Drafts], Any], problem: str
) -> None:
    [proposer] = llm.engine.proposers
    propose = proposer.propose
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "propose", lambda slots: spoil(propose(slots)))
        with pytest.raises(SurefootError, match=f"'ngram' offers {problem}") as caught:
            llm.generate(PROMPTS[1], params(1))
        assert caught.value.__notes__ == ["raised by proposer 'ngram' in propose()"]
    llm.engine.check_integrity()


def test_a_proposer_that_calls_its_engine_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [proposer] = llm.engine.proposers
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "propose", lambda slots: llm.generate(PROMPTS[0], params(0)))
        with pytest.raises(SurefootError, match="in the middle of its own round"):
            llm.generate(PROMPTS[1], params(1))
    assert llm.generate(PROMPTS[1], params(1))[0].outputs[0].text == alone(llm, 1)[1]


def test_threads_share_an_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [alone(llm, place) for place in range(3)]
    rounds, take = llm.engine.stats.rounds, llm._turns.take
    found: list[Any] = []
    everybody, thread = threading.Barrier(3, timeout=60), threading.local()

    def first_together(work: Callable[[], Any]) -> Any:
        """A thread goes on from its first turn when the requests of all three are there."""
        result = take(work)
        if thread.first:
            thread.first = False
            everybody.wait()
        return result

    def generate(place: int) -> None:
        for _ in range(2):
            thread.first = True
            output = llm.generate(PROMPTS[place], params(place, stop="@@@"))[0].outputs[0]
            found.append((place, (output.token_ids, output.text, output.finish_reason)))

    def stream(place: int) -> None:
        for _ in range(2):
            thread.first = True
            found.append((place, whole(list(llm.stream(PROMPTS[place], params(place))))))

    monkeypatch.setattr(llm._turns, "take", first_together)
    together([lambda: generate(0), lambda: stream(1), lambda: stream(2)])
    assert len(found) == 6
    for place, got in found:
        assert got == wanted[place]
    # One batch for all of them.
    assert llm.engine.stats.rounds - rounds < 4 * 40


def test_nobody_has_two_turns_while_another_waits(llm: LLM) -> None:
    """One that streams a long text takes its next turn microseconds after the last one, sooner
    than another thread can wake up."""
    turns, order = llm._turns, list[int]()
    give_up = time.monotonic() + 10

    def caller(place: int) -> None:
        def turn() -> None:
            order.append(place)
            while not turns._next.locked() and len(order) < 30 and time.monotonic() < give_up:
                time.sleep(1e-4)

        while len(order) < 30:
            turns.take(turn)

    together([lambda place=place: caller(place) for place in range(3)])
    assert len(order) >= 30
    assert all(one != following for one, following in pairwise(order[:30]))


def together(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
