"""What a request brings to its slot, and finds there: nothing of the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from eagle3_engines import folder, target
from harness import Job, fresh_logits, make_engine, run_alone, run_jobs, tiny_decoder
from structured_harness import grammars, params_with
from surefoot.engine.engine import Engine
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.upload import Uploads
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from surefoot.speculation.controller import Controller
from surefoot.speculation.state import SlotState

BACKEND = "torch" if native_unavailable() else "native"
"""The faster one."""
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
FIRST = Job(
    (5, 9, 5, 9, 5, 9),
    params_with({"regex": "(ab1|bc){1,40}"}, temperature=0, max_tokens=60, logit_bias={7: 9.0}),
)
NEXT = Job((7, 8, 7), GREEDY, SpeculationParams("ngram", 2))


def engine_of(used: bool) -> tuple[Engine, Request]:
    """One slot, into which the ``NEXT`` request was let; ``used`` by one that drafted, and was
    ended from outside."""
    engine = make_engine(
        target(BACKEND), max_num_seqs=1, draft_policy="fixed", max_draft_tokens=3,
        proposers=("ngram", "eagle3"), enable_prefix_caching=False, calibration_seconds=0.0,
        proposer_options={"eagle3": {"path": folder("random"), "draft_tokens": 2}},
    )  # fmt: skip
    engine.grammars = grammars()
    if used:
        before = engine.make_request("before", FIRST.prompt, FIRST.params)
        engine.add(before)
        offers = engine.round.books.offers
        while before.stats.rounds < 12 or not int(offers.lengths[0]):
            engine.step()
        slot = torch.tensor([0])
        assert all(int(e.watched_length[slot]) for e in engine.controller.estimators[1:])
        # On the device it has ended: a host that is a round behind does not know yet.
        engine.state.alive[slot] = 0
        engine.finish(before, FinishReason.ABORT)
    request = engine.make_request("next", NEXT.prompt, NEXT.params, NEXT.speculation)
    engine.add(request)
    assert engine.loop.gathering.next(()) is not None
    engine.loop.uploads.send()
    return engine, request


def known(engine: Engine) -> dict[str, Any]:
    """All that is known of the slot, as far as anybody may look at it."""
    state, controller, loop = engine.state, engine.controller, engine.loop
    records, offers, params = controller.records, engine.round.books.offers, state.params
    names = ("length", "computed", "limit", "alive", "structured")
    found = {name: getattr(state, name)[0] for name in names}
    found |= {name: getattr(records, name)[:, 0] for name in ("hits", "trials", "watched_length")}
    found["offered"] = controller.lengths[:, 0]
    found["allowed"] = controller.allowed[:, 0]
    found["draft_limit"] = controller.draft_limit[0]
    found["offers.lengths"], found["offers.chances"] = offers.lengths[0], offers.chances[0]
    found["text"] = state.history[0, : int(state.length[0])]
    found["bias"] = params.bias[0].sum()
    found["stop_ids"] = params.stop_ids[0]
    batch = loop.gathering.next(())
    assert batch is not None
    decoding = replace(batch, chunks=(), ending=0)
    chances, *_ = loop._reported.of(decoding)
    found["reported"] = torch.from_numpy(chances).nan_to_num(-1)
    found["of grammars"] = torch.tensor(0 in loop._grammars._known)
    found["feature"] = engine.proposers[1].before[0]  # type: ignore[attr-defined]
    return found


def test_a_request_inherits_nothing_from_the_slots_last() -> None:
    (fresh, first), (used, second) = engine_of(False), engine_of(True)
    assert first.slot == second.slot == 0
    wanted, got = known(fresh), known(used)
    # Without a prefix hit position 0 has no feature before it, and nobody reads this.
    del wanted["feature"], got["feature"]
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    for engine in (fresh, used):
        while engine.has_work:
            engine.step()
            engine.check_integrity()
    assert first.output == second.output == run_alone(target(BACKEND), NEXT).output


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_whoever_enters_gets_what_it_wants(data: Any) -> None:
    """Whatever the slots' last requests wanted, alone or together with others, though some of them
    were gone before anything was sent, and though what was to be sent was lost."""
    state = SlotState(3, 20, 4, 4, 9, torch.device("cpu"))
    controller = Controller(state, ["a", "b"])
    method = st.sampled_from(["off", "a", "b", "auto"])
    uploads, running = Uploads(state.device), dict[int, Request]()
    for _ in range(6):
        requests = []
        for slot in data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]:
            choice = SpeculationParams(data.draw(method), data.draw(st.sampled_from([None, 1, 9])))
            temperature = data.draw(st.sampled_from([0.0, 0.5]))
            stops = data.draw(st.sampled_from([(), (3,), (2, 3), tuple(range(20))]))
            params = SamplingParams(temperature=temperature, stop_token_ids=stops)
            requests.append(Request("r", (1, 2), params, choice, 5, 9, slot=slot))
            running[slot] = requests[-1]
        controller.admit(requests, state.admit(requests, uploads), uploads)
        what = data.draw(st.sampled_from(["send", "wait", "lose"]))
        if what == "lose":
            uploads = Uploads(state.device)
            state.forget_written()
            controller.forget_written()
            running.clear()
        if what != "send":
            continue
        controller.lengths[:] = controller.records.watched_length[:] = 1
        uploads.send()
        for request in requests:
            assert not controller.lengths[:, request.slot].any()
            assert not controller.records.watched_length[:, request.slot].any()
        for slot, request in running.items():
            limit = request.speculation.max_draft_tokens
            assert controller.draft_limit[slot] == (4 if limit is None else min(4, limit))
            allowed = [request.allows(name) for name in ("a", "b")]
            assert controller.allowed[:, slot].tolist() == allowed
            assert state.params.temperature[slot] == request.params.temperature
            stops = [each for each in state.params.stop_ids[slot].tolist() if each >= 0]
            assert stops == list(request.stop_token_ids)


def test_who_is_replaced_before_anything_was_sent_leaves_nothing() -> None:
    """The slot's next request wants what is there already, but not what is on its way."""
    state = SlotState(1, 20, 4, 4, 9, torch.device("cpu"))
    controller, uploads = Controller(state, ["a"]), Uploads(state.device)
    for limit, temperature, sends in ((1, 0.5, True), (2, 0.0, False), (1, 0.5, True)):
        params, choice = SamplingParams(temperature=temperature), SpeculationParams("a", limit)
        requests = [Request("r", (1, 2), params, choice, 5, 9, slot=0)]
        controller.admit(requests, state.admit(requests, uploads), uploads)
        if sends:
            uploads.send()
    assert controller.draft_limit[0] == 1 and state.params.temperature[0] == 0.5


def test_a_table_that_becomes_wider_keeps_what_is_on_its_way() -> None:
    state = SlotState(2, 20, 4, 4, 9, torch.device("cpu"))
    uploads, wide = Uploads(state.device), list(range(20))
    for slot, stops in enumerate(([3], wide)):
        params = SamplingParams(stop_token_ids=stops)
        state.admit([Request("r", (1, 2), params, SpeculationParams(), 5, 9, slot=slot)], uploads)
    uploads.send()
    assert state.params.stop_ids[:2, :20].tolist() == [[3] + 19 * [-1], wide]


def scores(request: Request) -> list[Any]:
    return [(each.token_id, each.logprob, each.rank, each.top) for each in request.prompt_logprobs]


def test_prompt_logprobs_over_a_preemption() -> None:
    """After every round of the prompt's and of the text's."""
    decoder, prompt = tiny_decoder(BACKEND), tuple(3 + (7 * i + i // 5) % 40 for i in range(18))
    params = replace(GREEDY, max_tokens=9, prompt_logprobs=2)
    undisturbed = run_alone(decoder, Job(prompt, params))
    expected = fresh_logits(decoder, prompt)[:-1].double().log_softmax(-1)
    assert len(undisturbed.prompt_logprobs) == len(prompt) - 1
    for place, found in enumerate(undisturbed.prompt_logprobs):
        assert found.token_id == prompt[place + 1]
        assert found.logprob == pytest.approx(float(expected[place, found.token_id]), abs=1e-4)
        assert found.top[0][0] == int(expected[place].argmax())
    stages = set()
    engine = make_engine(
        decoder, max_num_batched_tokens=5, max_num_seqs=2, max_draft_tokens=0,
        calibration_seconds=0.0,
    )  # fmt: skip
    for at in range(1, 8):
        # Its blocks are in the prefix cache by then: they must not stand in for rows with scores.
        request = engine.make_request(f"r{at}", prompt, params)
        engine.add(request)
        for _ in range(at):
            engine.step()
        stages.add(len(request.prompt_logprobs))
        assert engine.scheduler.preempt() is request
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        assert request.preemptions == 1 and request.output == undisturbed.output
        assert [each[0] for each in scores(request)] == list(prompt[1:])
        for mine, other in zip(scores(request), scores(undisturbed), strict=True):
            assert mine[2:3] == other[2:3] and mine[1] == pytest.approx(other[1], abs=1e-4)
    assert stages == {5, 10, 15, 17}


def oracle(text: tuple[int, ...], **options: Any) -> Engine:
    return make_engine(
        tiny_decoder(BACKEND), draft_policy="fixed", proposers=("oracle",), max_draft_tokens=4,
        proposer_options={"oracle": {"texts": (text,)}}, calibration_seconds=0.0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["max_tokens", "stop_token_ids", "end of text"])
def test_drafts_behind_an_end_count_as_verified_and_not_as_accepted(kind: str) -> None:
    """The end is at each place of a run of drafts that are all right."""
    prompt, bias = (2, 3, 4, 5), {11: 30.0, 12: 30.0, 13: 30.0}
    params = replace(GREEDY, temperature=0.9, seed=7, logit_bias=bias)
    text = run_alone(tiny_decoder(BACKEND), Job(prompt, params)).output
    cut = 0
    for length in range(4, 10):
        if kind == "max_tokens":
            ending = replace(params, max_tokens=length)
        elif kind == "stop_token_ids":
            ending = replace(params, stop_token_ids=[40], logit_bias={40: 100.0})
            ending = replace(ending, min_tokens=length - 1, logit_bias={**bias, 40: 100.0})
        else:
            ending = replace(params, ignore_eos=False, min_tokens=length - 1)
            ending = replace(ending, logit_bias={**bias, 0: 100.0})
        wanted = run_alone(tiny_decoder(BACKEND), Job(prompt, ending)).output
        assert len(wanted) == length
        # What would follow is known, too.
        behind = text[length:] if kind == "max_tokens" else [wanted[-1]] * 9
        engine = oracle((*prompt, *wanted, *behind), ahead=length % 2 == 0)
        landed, accepted = engine.planner.landed, []

        def count(decision: Any, situation: Any, outcome: Any, landed: Any = landed) -> None:
            accepted.append(outcome.accepted)  # noqa: B023
            landed(decision, situation, outcome)

        engine.planner.landed = count  # type: ignore[method-assign]
        [request] = run_jobs(engine, [Job(prompt, ending)])
        stats, sources = request.stats, request.proposed_by
        assert request.output == wanted
        assert sum(accepted) == stats.accepted == sum(map(bool, sources))
        assert stats.accepted_by_proposer == {"oracle": stats.accepted}
        # Every round commits one token of the target's own, unless it ends with a draft.
        assert stats.rounds + stats.accepted == length + (sources[-1] is not None)
        cut += sources[-1] is not None
    assert cut >= 3 or kind == "max_tokens"
