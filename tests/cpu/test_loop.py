"""The loop: what a round may hold, what it may write, and what needs nobody's wait."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import AtMost, Job, make_engine, run_alone, run_jobs, tiny_decoder
from surefoot.engine.batch import Batch
from surefoot.engine.chunks import ChunkLimits
from surefoot.engine.engine import Engine
from surefoot.engine.gathering import TOGETHER_ROUNDS
from surefoot.engine.reports import Report
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.upload import Uploads
from surefoot.request import FinishReason, SamplingParams, SpeculationParams
from surefoot.speculation.decisions import Decision, Landed, Situation

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def watch_spans(engine: Engine) -> list[dict[str, int]]:
    """Known rows by request, of every round from now on."""
    seen: list[dict[str, int]] = []
    launch = engine.rounds.launch

    def watched(*args: Any) -> Any:
        by_slot = {request.slot: request.request_id for request in engine.scheduler.running}
        pairs = zip(engine.round.slots.tolist(), engine.round.quota.tolist(), strict=True)
        seen.append({by_slot[slot]: quota for slot, quota in pairs if slot in by_slot})
        return launch(*args)

    engine.rounds.launch = watched  # type: ignore[method-assign]
    return seen


def add(engine: Engine, name: str, prompt: int, params: SamplingParams = GREEDY) -> Any:
    tokens = [2 + (7 * place + len(name)) % 40 for place in range(prompt)]
    request = engine.make_request(name, tokens, params, SpeculationParams("off"))
    engine.add(request)
    return request


def test_a_long_prompt_is_chunked_beside_running_requests() -> None:
    engine = make_engine(tiny_decoder(), max_num_batched_tokens=8, max_num_seqs=4)
    seen = watch_spans(engine)
    add(engine, "a", 3)
    engine.step()
    add(engine, "b", 20)
    for _ in range(4):
        engine.step()
    assert seen[1:] == [{"b": 7, "a": 1}, {"b": 7, "a": 1}, {"b": 6, "a": 1}, {"b": 1, "a": 1}]


def test_who_comes_first_by_priority_goes_before_a_prompt_that_is_under_way() -> None:
    """Where the rest of that prompt leaves rows for it, and too few."""
    engine = make_engine(
        tiny_decoder(), max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=False
    )
    params = SamplingParams(max_tokens=2)
    long = engine.make_request("long", list(range(1, 13)), params)
    engine.add(long)
    engine.step()
    urgent = engine.make_request("urgent", list(range(8)), params, priority=-1)
    engine.add(urgent)
    engine.step()
    assert urgent.output and not long.output


def test_chunks_are_as_long_as_running_requests_can_bear() -> None:
    engine = make_engine(
        tiny_decoder(), max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=False
    )
    engine.loop.gathering.limits = AtMost(lambda decoding: 4 - decoding)
    seen = watch_spans(engine)
    # Nobody waits for the next token beside the first prompt.
    add(engine, "a", 8)
    add(engine, "b", 3)
    engine.step()
    engine.step()
    assert seen == [{"a": 8}, {"b": 3, "a": 1}]
    add(engine, "c", 7)
    for _ in range(4):
        engine.step()
    assert [spans["c"] for spans in seen[2:]] == [2, 2, 2, 1]


def test_limits_are_told_of_all_prompts_that_could_run() -> None:
    """The rest of those that do, and those that wait for nothing but a round: three have slots, of
    which one is the second choice of another's prompt."""
    asked: list[tuple[int, int]] = []

    class Watching(ChunkLimits):
        def short(self, decoding: int, pending: int) -> int:
            asked.append((decoding, pending))
            return 4

    engine = make_engine(
        tiny_decoder(), max_num_batched_tokens=64, max_num_seqs=5, enable_prefix_caching=False
    )
    engine.loop.gathering.limits = Watching()
    add(engine, "a", 5)
    engine.step()
    add(engine, "b", 11)
    engine.step()
    assert asked == [(1, 11), (1, 11)], "before b is let in, and behind"
    asked.clear()
    first = add(engine, "c", 7)
    add(engine, "d", 9).leader = first
    add(engine, "e", 10)
    add(engine, "f", 13)
    # Whoever asks does not wait for a long queue to be counted.
    assert engine.scheduler.due_rows(7) == 7 and engine.scheduler.due_rows(64) == 17
    engine.step()
    assert asked[0] == (1, 7 + 7 + 10)


def test_chunks_whose_logprobs_are_wanted_are_shorter_beside_running_requests() -> None:
    engine = make_engine(
        tiny_decoder(), max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=False
    )
    engine.loop.gathering.limits = AtMost(lambda decoding: 5)
    seen = watch_spans(engine)
    scored = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    add(engine, "a", 8, scored)
    engine.step()
    assert seen == [{"a": 8}], "nobody waits beside it"
    add(engine, "b", 5, scored)
    add(engine, "c", 5)
    for _ in range(3):
        engine.step()
    chunks = [{name: rows for name, rows in spans.items() if name != "a"} for spans in seen[1:]]
    # A row of b takes the place of two.
    assert chunks == [{"b": 2}, {"b": 2, "c": 1}, {"b": 1, "c": 4}]


def test_chunks_far_from_their_prompts_beginning_are_shorter_beside_running_requests() -> None:
    engine = make_engine(
        tiny_decoder(), max_num_batched_tokens=20, max_num_seqs=4, enable_prefix_caching=False
    )
    engine.loop.gathering.limits = limits = AtMost(lambda decoding: 8)
    limits.rows_per_key = 0.125
    seen, loads = watch_spans(engine), []
    situation = engine.loop._situation

    def watch(batch: Batch) -> Situation:
        loads.append((batch.prompt_rows, batch.prompt_load, situation(batch).prompt_rows))
        return situation(batch)

    engine.loop._situation = watch  # type: ignore[method-assign]
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    add(engine, "a", 20, long)
    engine.step()
    assert seen == [{"a": 20}], "nobody waits beside it"
    add(engine, "b", 20)
    for _ in range(6):
        engine.step()
    # A row weighs 1, and an eighth more for each token before it: after 8 tokens two.
    assert [spans.get("b", 0) for spans in seen[1:]] == [8, 4, 3, 2, 2, 1]
    # 3 rows after 12 tokens take as long as 7.5: what the planner is told where rounds are called.
    # The last row alone is a current token's.
    assert loads[1:] == [(8, 8, 8), (4, 8, 8), (3, 8, 8), (2, 6, 6), (2, 6, 6), (0, 0, 0)]


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_ride_with_drafts(ahead: bool) -> None:
    """A prompt that arrives costs its neighbours neither their drafts nor a round of their own."""
    job = Job((2, 3, 4, 5), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    text = (*job.prompt, *run_alone(tiny_decoder(), job).output)
    engine = make_engine(
        tiny_decoder(), ahead, draft_policy="fixed", max_num_batched_tokens=16, max_num_seqs=4,
        proposers=("oracle",), proposer_options={"oracle": {"texts": (text,)}}, max_draft_tokens=3,
    )  # fmt: skip
    late = Job(tuple(range(2, 42)), GREEDY, SpeculationParams("off"), arrival=4)
    first, _ = run_jobs(engine, [job, late])
    assert first.output == list(text[4:]) and first.stats.accepted > 30
    kinds = engine.stats.kinds
    assert kinds["prompts with drafts"][0] >= 2
    rounds = sum(count for count, _ in kinds.values())
    assert rounds == engine.stats.rounds <= 32


def test_a_prompt_finds_the_blocks_of_one_that_is_still_in_flight() -> None:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4, max_num_batched_tokens=64)
    first = add(engine, "same", 33)
    engine.loop.launch()
    again = add(engine, "mase", 33)
    engine.loop.launch()
    assert len(engine.loop.flights) == 2 and not first.output
    assert again.cached == 32
    while engine.has_work:
        engine.step()
    assert first.output == again.output


@pytest.mark.parametrize(
    ("ahead", "spare", "grammar", "most"),
    [(True, 2e-3, False, 2), (True, 5e-4, False, 3), (True, 5e-4, True, 2), (False, 0, False, 1)],
)
def test_more_rounds_are_in_flight_where_the_host_is_busy(
    ahead: bool, spare: float, grammar: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not beside a request that needs the host between its rounds."""
    engine = make_engine(tiny_decoder(), ahead, max_num_seqs=4)
    monkeypatch.setattr(engine.loop.clock, "compare", lambda host, seconds: None)
    engine.loop.clock.spare = spare
    monkeypatch.setattr(type(engine.loop.gathering), "needs_host", property(lambda own: grammar))
    requests = [add(engine, name, 3) for name in ("a", "bc")]
    flights = []
    land = engine.loop.land
    monkeypatch.setattr(
        engine.loop, "land", lambda: (flights.append(len(engine.loop.flights)), land())[1]
    )
    while engine.has_work:
        engine.step()
    assert max(flights) == most
    assert len(requests[0].output) == len(requests[1].output) == GREEDY.max_tokens
    # None is launched in vain, however many are in flight.
    assert engine.stats.rounds == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("hurried", "decoding", "arrivals", "waits"),
    [
        # One in each round: whoever comes behind another waits, but for four rounds at most.
        (True, 48, [1] * 9, [0, 3, 2, 1, 0, 3, 2, 1, 0]),
        (False, 48, [1] * 9, [0] * 9),
        # Seldom: nobody waits.
        (True, 32, [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1], [0, 0, 0]),
        # More than a sixteenth of those that decode, and beside few.
        (True, 32, [1, 3, 2, 0, 3], [0, 0, 0, 0, 2, 2, 0, 0, 0]),
        (True, 11, [1] * 5, [0] * 5),
    ],
)
def test_where_the_host_has_no_time_requests_come_in_together(
    hurried: bool,
    decoding: int,
    arrivals: list[int],
    waits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``waits``: rounds that each waited."""
    engine = make_engine(tiny_decoder(), True, max_num_seqs=64, kv_blocks=1000)
    monkeypatch.setattr(engine.loop.clock, "compare", lambda host, seconds: None)
    engine.loop.clock.spare = 1e-4 if hurried else 1e-2
    for place in range(decoding):
        add(engine, f"long{place}", 3, replace(GREEDY, max_tokens=60))
    for _ in range(8):
        engine.step()
    came, waited = dict[Any, int](), dict[Any, int]()
    for step, count in enumerate([*arrivals, *[0] * TOGETHER_ROUNDS]):
        for place in range(count):
            came[add(engine, f"{step}.{place}", 3)] = step
        engine.step()
        for request in came:
            if request.slot >= 0:
                waited.setdefault(request, step - came[request])
    assert [waited[request] for request in came] == waits
    while engine.has_work:
        engine.step()


def test_who_comes_when_nobody_decodes_is_let_in_whatever_the_host_has_to_do() -> None:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=48)
    engine.loop.clock.spare = 0.0
    for place in range(3):
        request = add(engine, f"r{place}", 3, replace(GREEDY, max_tokens=2))
        engine.step()
        assert request.slot >= 0 or request.finished
        engine.finish(request, FinishReason.ABORT)


def test_who_comes_while_rounds_in_flight_end_everybody_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nobody else to launch a round for."""
    engine = make_engine(tiny_decoder(), True, max_num_seqs=64, kv_blocks=1000)
    monkeypatch.setattr(engine.loop.clock, "compare", lambda host, seconds: None)
    engine.loop.clock.spare = 0.0
    for place in range(32):
        add(engine, f"r{place}", 3, replace(GREEDY, max_tokens=6))
    first = add(engine, "first", 3, replace(GREEDY, max_tokens=3))
    while not first.finished:
        engine.step()
    add(engine, "before", 3, replace(GREEDY, max_tokens=1))
    engine.step()
    late = add(engine, "late", 3)
    engine.step()
    assert late.slot >= 0
    while engine.has_work:
        engine.step()


def test_choices_of_a_prompt_share_a_seed_that_no_other_has() -> None:
    engine, params = make_engine(tiny_decoder()), SamplingParams(n=2)
    first = engine.make_request("first", [3], params)
    second = engine.make_request("second", [3], params, choice=1, leader=first)
    assert second.seed == first.seed != engine.make_request("other", [3], params).seed


def test_nothing_is_launched_behind_rounds_that_end_everybody() -> None:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4)
    for name in ("a", "bc"):
        add(engine, name, 3)
    while engine.has_work:
        engine.step()
    # Each of them commits a token; the first is the prompt's.
    assert engine.stats.rounds == GREEDY.max_tokens and not engine.loop.flights


def check_writes(engine: Engine) -> None:
    """Every row writes a key into a block of its own request, which nobody else holds."""
    forward, state, kv = engine.round.forward, engine.state, engine.kv

    def checked(batch: FlatBatch, *rest: Any) -> Any:
        by_slot = {request.slot: request for request in engine.scheduler.running}
        rows = zip(batch.row_slot.tolist(), batch.key_index.tolist(), strict=True)
        for slot, key in rows:
            # Ended on the device, or by the host meanwhile: nobody reads what it writes.
            if slot < 0 or slot not in by_slot:
                continue
            block = int(state.block_tables[slot, key // kv.block_size])
            lease = kv.leases[by_slot[slot].request_id]
            assert lease.blocks[key // kv.block_size] == block
            assert kv.pool.references[block] == 1
        return forward(batch, *rest)

    engine.round.forward = checked  # type: ignore[method-assign]


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.booleans())
def test_every_key_lies_in_a_block_of_its_request(seed: int, ahead: bool) -> None:
    dice = random.Random(seed)
    decoder = tiny_decoder()
    engine = make_engine(
        decoder, ahead,
        draft_policy=dice.choice(["auto", "fixed"]), max_num_seqs=dice.randint(1, 4),
        max_num_batched_tokens=dice.choice([5, 12, 64]), kv_blocks=dice.randint(14, 40),
        enable_prefix_caching=dice.random() < 0.5, calibration_seconds=0.0,
    )  # fmt: skip
    check_writes(engine)
    jobs = []
    for index in range(5):
        prompt = (2, 3, 4) * 9 if dice.random() < 0.5 else (5, 6, 7, 8, 9) * 4
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.8]), seed=index, max_tokens=dice.randint(1, 24)
        )
        arrival = dice.randint(0, 12)
        cancel = arrival + dice.randint(0, 9) if dice.random() < 0.2 else None
        jobs.append(Job(prompt[: dice.randint(1, 27)], params, arrival=arrival, cancel=cancel))
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        alone = run_alone(decoder, job).output
        if job.cancel is None:
            assert request.output == alone
        else:
            assert request.output == alone[: len(request.output)]


@pytest.mark.parametrize("ahead", [False, True])
def test_offers_are_read_of_rounds_that_left_some(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on offer is what the last report says, and nothing after a round in which nobody
    proposed, or of which the planner wants to know nothing, whatever an earlier one said."""
    engine = make_engine(tiny_decoder(), ahead, proposers=("ngram",), max_num_seqs=2)
    loop, read, told, most = engine.loop, list[bool](), list[bool](), [0]
    asked = list[bool]()
    dice, landed, note = random.Random(3), loop.planner.landed, loop._reported.note

    def decide(situation: Situation) -> Decision:
        if told:
            assert (situation.chances is not None) == told[-1]
        if situation.chances is not None and told[-1]:
            lengths = (situation.chances > 0).sum(axis=1)
            most.append(int(lengths.max()))
            # In a round that is launched ahead the device is further than what was read.
            on_device = engine.round.books.offers.lengths[situation.slots].numpy()
            assert ahead or (on_device == lengths).all()
        return Decision(0, (0,), 4) if dice.random() < 0.5 else Decision(0, (), 0)

    def needs_offers(decision: Decision) -> bool:
        asked.append(dice.random() < 0.8)
        return asked[-1]

    def tell(decision: Decision, *rest: Any) -> None:
        told.append(bool(decision.proposers) and asked[-1])
        landed(decision, *rest)

    # How many rounds are in flight would depend on the time that they take.
    monkeypatch.setattr(loop.clock, "compare", lambda host, seconds: None)
    monkeypatch.setattr(loop.planner, "decide", decide)
    monkeypatch.setattr(loop.planner, "landed", tell)
    monkeypatch.setattr(loop.planner, "needs_offers", needs_offers)
    monkeypatch.setattr(loop._reported, "note", lambda *a: (read.append(True), note(*a))[1])
    for place in range(2):
        prompt = (3, 4, 5 + place) * 4
        engine.add(engine.make_request(f"r{place}", prompt, GREEDY))
    while engine.has_work:
        engine.step()
    assert 3 < len(read) == sum(told) < len(told) - 3 and max(most) > 1


@pytest.mark.parametrize(("count", "told"), [(3, False), (24, True)])
def test_rounds_for_those_who_had_ended_do_not_tell_what_rounds_of_as_many_take(
    count: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a GPU: a crowd's last rounds, launched before its ends were known, took less than
    rounds of as many requests do, and the next crowd's were believed to be as quick."""
    engine = make_engine(tiny_decoder(), True, max_num_seqs=24)
    seen, landed = list[tuple[int, bool]](), engine.planner.landed

    def watch(decision: Decision, situation: Situation, outcome: Landed) -> None:
        ended = sum(request.finished for request in requests)
        seen.append((ended, outcome.device_seconds is not None))
        landed(decision, situation, outcome)

    monkeypatch.setattr(engine.planner, "landed", watch)
    # One ends before the others.
    lengths = [6, *[20] * (count - 1)]
    requests = [
        add(engine, f"r{place}", 3, replace(GREEDY, max_tokens=length))
        for place, length in enumerate(lengths)
    ]
    while engine.has_work:
        engine.step()
    assert all(timed for ended, timed in seen if not ended)
    # One more had been launched with it.
    behind = [timed for ended, timed in seen if ended == 1]
    assert behind[0] == told and all(behind[3:])


def test_who_is_let_in_for_a_round_without_room_is_told_of_with_the_next() -> None:
    """The pool has room for its prompt, and not for that beside the others' next tokens. The last
    round in flight is read meanwhile."""
    engine = make_engine(
        tiny_decoder(), True, kv_blocks=9, block_size=4, max_num_seqs=4, max_draft_tokens=3,
        draft_policy="fixed", proposers=("ngram",),
    )  # fmt: skip
    params, prompt = replace(GREEDY, max_tokens=20), tuple(range(2, 10))
    requests = [engine.make_request(f"r{place}", prompt, params) for place in range(3)]
    waited = 0
    for step in range(200):
        if step in (0, 8):
            for request in requests[:2] if step == 0 else requests[2:]:
                engine.add(request)
        engine.step()
        engine.check_integrity()
        waited += engine.loop.uploads.waiting and not engine.loop.flights
    assert waited and not engine.has_work
    assert len({tuple(request.output) for request in requests}) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_launch_takes_one_upload(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes with it, and whatever blocks it needs: an upload takes the host as long as
    many rounds of a small model have to spare."""
    sent, launched = list[int](), list[int]()
    engine = make_engine(
        tiny_decoder(), ahead, proposers=("ngram",), max_num_seqs=4, max_num_batched_tokens=12
    )
    send, launch = Uploads.send, engine.rounds.launch

    def count(uploads: Uploads) -> None:
        if uploads.waiting:
            sent.append(len(uploads._writes))
        send(uploads)

    def start(*args: Any) -> Report:
        launched.append(len(sent))
        return launch(*args)

    monkeypatch.setattr(Uploads, "send", count)
    monkeypatch.setattr(engine.rounds, "launch", start)
    dice = random.Random(1)
    for place in range(12):
        params = replace(GREEDY, max_tokens=dice.randint(4, 40))
        prompt = tuple(dice.randrange(2, 30) for _ in range(dice.randint(3, 20)))
        engine.add(engine.make_request(f"r{place}", prompt, params))
        for _ in range(dice.randint(0, 3)):
            engine.step()
    while engine.has_work:
        engine.step()
    # Before each launch at most one: so many as launches, or fewer.
    assert {later - before for before, later in pairwise(launched)} == {0, 1}
    assert len(sent) < len(launched) - 10 and max(sent) > 7
