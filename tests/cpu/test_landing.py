"""What a landed round gives its requests, and the KV that is held for the rounds in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Job, make_engine, run_jobs, tiny_decoder
from surefoot.engine import landing as landings
from surefoot.engine import reserving
from surefoot.engine.batch import Batch, Wishes, group
from surefoot.engine.landing import Draftings, Landing, read_report
from surefoot.engine.reports import Report
from surefoot.engine.reserving import AHEAD, Reservations
from surefoot.kernels.upload import sending
from surefoot.kv.block_pool import chain_hash
from surefoot.kv.transaction import KVManager
from surefoot.request import (
    Drafting,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationParams,
    Status,
)
from surefoot.speculation.books import ReportColumns
from surefoot.speculation.scoring import PromptScores
from surefoot.speculation.state import SlotState

COLUMNS = ReportColumns(2, trees=False)


def running(count: int, caching: bool, finished: set[int]) -> tuple[KVManager, list[Request]]:
    kv, requests = KVManager(40, 2, caching), []
    for index in range(count):
        request = Request(
            f"r{index}", (7, index, 3), SamplingParams(), SpeculationParams(), 0, 30, slot=index
        )
        kv.open(request.request_id, request)
        with kv.transaction() as transaction:
            assert transaction.reserve({request.request_id: 8})
            transaction.keep()
        request.computed, request.status = 2, Status.RUNNING
        kv.keep(kv.leases[request.request_id])
        if index in finished:
            request.finish(FinishReason.ABORT)
        requests.append(request)
    return kv, requests


def read(rows: torch.Tensor, scores: Any, requests: list[Request]) -> Landing:
    Wishes.note(requests)
    batch = Batch(group(requests, {0: "a", 1: "b"}, 2), (), 0)
    report = Report(rows.numpy(), scores, PromptScores([], []), lambda: None, lambda: None)
    alive = [request.status is Status.RUNNING for request in requests]
    committed = report.rows[: len(requests), COLUMNS.COUNT] * np.array(alive)
    return read_report(report, batch, committed, Draftings(("a", "b")), COLUMNS, 2, {})


@pytest.fixture(params=[1, 100], ids=["as of many", "as of few"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landings, "MANY", request.param)


def told(landing: Landing) -> list[Any]:
    got = [(item.request.request_id, item.tokens, item.drafting) for item in landing.progress]
    return [got, [(item.request.request_id, end) for item, end in landing.ended]]


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5), st.booleans())
def test_rounds_without_drafts_land_as_any_other(data: Any, count: int, caching: bool) -> None:
    """With logprobs in the report and without."""
    finished = data.draw(st.sets(st.integers(0, count - 1)))
    rounds = data.draw(st.integers(1, 3))
    reports = []
    for _ in range(rounds):
        rows = torch.zeros((count + 2, COLUMNS.count), dtype=torch.int32)
        for column, most in ((COLUMNS.COUNT, 1), (COLUMNS.END, 2), (COLUMNS.FIRST_TOKEN, 9)):
            drawn = [data.draw(st.integers(0, most)) for _ in range(count + 2)]
            rows[:, column] = torch.tensor(drawn)
        reports.append(rows)
    outcomes = []
    for scores in (None, torch.zeros((count + 2, 3, 4), dtype=torch.int32)):
        kv, requests = running(count, caching, finished)
        leases = [kv.leases[request.request_id] for request in requests]
        landed = [read(rows, scores, requests) for rows in reports]
        for before, after in zip(reports, landed, strict=True):
            expected = [i for i in range(count) if before[i, COLUMNS.COUNT] and i not in finished]
            assert [item.request.slot for item in after.progress] == expected
            tokens = [[before[i, COLUMNS.FIRST_TOKEN]] for i in expected]
            assert [item.tokens for item in after.progress] == tokens
            ends = [end for i in expected if (end := before[i, COLUMNS.END])]
            assert [end for _, end in after.ended] == ends
        kv.check_integrity()
        for request, lease in zip(requests, leases, strict=True):
            kv.close(request.request_id)
            assert len(lease.hashes) == (request.computed // 2 if caching else 0)
        found = [(lease.blocks, lease.hashes) for lease in leases], kv.pool._block_of
        state = [replace(request, params=SamplingParams(), arrived=0.0) for request in requests]
        told_of = [told(landing) for landing in landed]
        fields = [{name: getattr(r, name) for name in Request.__slots__} for r in state]
        outcomes.append((found, told_of, fields))
    assert outcomes[0] == outcomes[1]


@pytest.mark.usefixtures("ways")
def test_a_draft_is_its_proposer_s_and_the_rest_the_target_s() -> None:
    kv, (request,) = running(1, True, set())
    lease = kv.leases["r0"]
    # Columns: tokens committed, accepted, end, verified, whose, on offer, whose these are.
    for start, drafting in (
        ([1, 0, 0, 0, 0, 2, 1, 4, 0, 0], Drafting(None, 2, 0, 0, "b")),
        ([3, 2, 0, 2, 1, 0, 1, 5, 6, 7], Drafting("b", 0, 2, 2, None)),
        ([1, 0, 2, 1, 0, 2, 1, 8, 0, 0], Drafting("a", 2, 1, 0, "b")),
    ):
        row = start + [0] * (COLUMNS.count - len(start))
        landing = read(torch.tensor([row], dtype=torch.int32), None, [request])
        assert landing.drafting == len(landing.progress) == 1
        assert landing.progress[0].drafting == drafting
    assert request.output == [4, 5, 6, 7, 8]
    assert request.proposed_by == [None, "b", "b", None, None]
    assert request.stats.verified_by_proposer == {"b": 2, "a": 1}
    assert landing.ended == [(landing.progress[0], 2)]
    assert request.computed == 7
    # What can be found is what was written: prompt and drafts in their order.
    kv.close("r0")
    first = chain_hash(b"", (7, 0))
    second = chain_hash(first, (3, 4))
    assert lease.hashes == [first, second, chain_hash(second, (5, 6))]


@pytest.mark.usefixtures("ways")
def test_whose_tokens_are_is_the_same_whenever_somebody_asks() -> None:
    """In the middle of a text, only at its end, and behind a token that was taken back."""
    rounds = [
        ([4], 0, 0),
        ([5, 6, 7], 2, 1),
        ([8, 9], 1, 0),
        ([1], 0, 1),
    ]
    # Nobody asks of the last one until a token of it was taken back.
    asked_of, *others = (running(1, True, set()) for _ in range(4))
    for _, (request,) in (asked_of, *others):
        for tokens, accepted, whose in rounds:
            row = [len(tokens), accepted, 0, 2, whose, 0, 0, *tokens]
            row += [0] * (COLUMNS.count - len(row))
            read(torch.tensor([row], dtype=torch.int32), None, [request])
            if request is asked_of[1][0]:
                assert len(request.proposed_by) == len(request.output)
    expected = [None, "b", "b", None, "a", None, None]
    assert [request.proposed_by for _, (request,) in (asked_of, *others[:-1])] == [expected] * 3
    for _, (request,) in (asked_of, *others):
        del request.output[4:]
        request.settle()
        request.output += [3, 3]
        assert request.proposed_by == [*expected[:4], None, None]


@pytest.mark.usefixtures("ways")
def test_drafts_behind_the_end_of_a_text_are_not_accepted() -> None:
    """Two were right, and the first of them ends the text."""
    _, (request,) = running(1, True, set())
    row = [1, 2, 1, 2, 0, 0, 0, 8, 9, 3]
    row += [0] * (COLUMNS.count - len(row))
    landing = read(torch.tensor([row], dtype=torch.int32), None, [request])
    assert request.output == [8] and request.proposed_by == ["a"]
    assert request.stats.accepted == landing.accepted == 1 and request.stats.verified == 2


@pytest.mark.usefixtures("ways")
def test_drafts_of_those_who_left_are_not_counted() -> None:
    _, requests = running(2, True, {0})
    row = [2, 1, 0, 2, 0, 2, 1, 8, 9, 0]
    row += [0] * (COLUMNS.count - len(row))
    landing = read(torch.tensor([row, row], dtype=torch.int32), None, requests)
    assert (landing.drafting, landing.verified, landing.accepted) == (1, 2, 1)
    assert [request.stats.verified for request in requests] == [0, 2]


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5))
def test_reports_of_many_are_read_as_those_of_few(data: Any, count: int) -> None:
    finished = data.draw(st.sets(st.integers(0, count - 1)))
    rows = torch.zeros((count, COLUMNS.count), dtype=torch.int32)
    for row in rows:
        verified, offered = (data.draw(st.integers(0, 2)) for _ in range(2))
        accepted = data.draw(st.integers(0, verified))
        tokens = data.draw(st.integers(0, accepted + 1))
        ends, whose, offerer = (data.draw(st.integers(0, 1)) for _ in range(3))
        row[:8] = torch.tensor([tokens, accepted, ends, verified, whose, offered, offerer, 9])
    outcomes = []
    for many in (1, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(landings, "MANY", many)
            _, requests = running(count, True, finished)
            landing = read(rows, None, requests)
            counts = landing.drafting, landing.verified, landing.accepted
            texts = [(each.output, each.proposed_by, each.stats) for each in requests]
            outcomes.append((counts, texts, told(landing)))
    assert outcomes[0] == outcomes[1]


@given(st.lists(st.integers(1, 29), max_size=3), st.integers(0, 3), st.booleans(), st.data())
def test_prompts_leave_room_for_drafts(
    chunks: list[int], decoding: int, whole: bool, data: Any
) -> None:
    """In rounds of as many rows as are recorded; seven eighths of the prompts' rows go on."""
    drafts, most = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 90))
    ending = len(chunks) - (not whole) if chunks else 0
    _, requests = running(len(chunks) + decoding, False, set())
    Wishes.note(requests)
    batch = Batch(group(requests, {}, 0), tuple(chunks), ending)
    shorter = batch.beside(drafts, most)
    assert shorter.group is batch.group and len(shorter.chunks) == len(chunks)
    put_off = batch.rows - shorter.rows
    assert 8 * put_off <= sum(chunks) and min(shorter.chunks, default=1) >= 1
    cut = [new < old for new, old in zip(shorter.chunks, chunks, strict=True)]
    if put_off:
        first = cut.index(True)
        # Of those before a chunk that is cut all are whole, of those behind it one row is left.
        assert all(rows == 1 for rows in shorter.chunks[first + 1 :])
        assert shorter.ending == min(ending, first) and shorter.rows + drafts >= most
    else:
        assert shorter is batch
    if shorter.rows + drafts > most and chunks:
        assert set(shorter.chunks) == {1} or 8 * (put_off + 1) > sum(chunks)


def jobs(*lengths: int) -> list[Job]:
    """Texts of so many tokens, prompts included."""
    every = [SamplingParams(temperature=0, max_tokens=n - 3, ignore_eos=True) for n in lengths]
    return [Job((5, 9, i), p, SpeculationParams("off")) for i, p in enumerate(every)]


@pytest.mark.parametrize("lengths", [(103,) * 4, (103, 75, 80, 93)])
def test_launches_seldom_ask_for_blocks(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where one text after the other ends."""
    asked = []
    mirror = Reservations._mirror
    monkeypatch.setattr(
        Reservations, "_mirror", lambda self, *args: asked.append(0) or mirror(self, *args)
    )
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4, kv_blocks=400)
    run_jobs(engine, jobs(*lengths))
    assert engine.stats.replays >= 99 and len(asked) <= 4 + 100 // AHEAD


def test_where_blocks_are_scarce_none_is_reserved_for_later_rounds() -> None:
    """Two texts get the blocks they end with when the third has ended, and no earlier."""
    engine = make_engine(
        tiny_decoder(), True,
        max_num_seqs=3, block_size=16, kv_blocks=6, enable_prefix_caching=False,
    )  # fmt: skip
    finished = run_jobs(engine, jobs(48, 48, 12))
    assert [len(request.tokens) for request in finished] == [48, 48, 12]
    assert not engine.stats.preemptions


def test_what_was_reserved_for_later_rounds_is_given_back_before_anybody_is_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two texts hold blocks for rounds to come when a third one wants them."""
    monkeypatch.setattr(reserving, "AHEAD", 32)
    monkeypatch.setattr(reserving, "PART", 1)
    engine = make_engine(
        tiny_decoder(), True,
        max_num_seqs=3, block_size=4, kv_blocks=52, enable_prefix_caching=False,
    )  # fmt: skip
    first, second = jobs(40, 40)
    for index, job in enumerate((first, second)):
        engine.add(engine.make_request(f"r{index}", job.prompt, job.params, job.speculation))
    for _ in range(4):
        engine.step()
    held = [len(lease.blocks) for lease in engine.kv.leases.values()]
    assert min(held) > engine.kv.blocks_for(12)
    # All blocks that are free, so that there is none for its first token.
    prompt, params = [3] * (4 * engine.kv.pool.num_free), jobs(11)[0].params
    engine.add(engine.make_request("late", prompt, params, SpeculationParams("off")))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert not engine.stats.preemptions


@pytest.mark.parametrize(("blocks", "held"), [(52, 5), (7, 3)])
def test_a_prompt_reserves_for_what_follows_where_there_are_plenty(
    blocks: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the rounds after it need not: it has 9 tokens, and 8 more would have room."""
    monkeypatch.setattr(reserving, "AHEAD", 8)
    engine = make_engine(tiny_decoder(), False, max_num_seqs=1, block_size=4, kv_blocks=blocks)
    engine.add(
        engine.make_request("r", (2, 3, 4) * 3, jobs(20)[0].params, SpeculationParams("off"))
    )
    engine.step()
    [lease] = engine.kv.leases.values()
    assert len(lease.blocks) == held


def test_what_landed_is_no_longer_in_flight() -> None:
    """Of what rounds may write beyond the known, nothing is left when all are read."""
    engine = make_engine(tiny_decoder(), False, max_num_seqs=2, draft_policy="fixed")
    for index, job in enumerate(jobs(30, 40)):
        engine.add(engine.make_request(f"r{index}", (2, 3, 4) * 5, job.params))
    while engine.has_work:
        engine.step()
        slots = [request.slot for request in engine.scheduler.running]
        assert not engine.loop.flights and not engine.loop.reservations.reach[slots].any()
    assert engine.stats.draft_rows


def test_drafts_are_given_up_before_anybody_is_preempted() -> None:
    """There is room for the tokens of both, not for all that they might be in a round."""
    engine = make_engine(
        tiny_decoder(), max_num_seqs=2, block_size=1, kv_blocks=24, enable_prefix_caching=False,
        proposers=("saboteur",), draft_policy="fixed", max_draft_tokens=8,
    )  # fmt: skip
    work = [Job(job.prompt, job.params) for job in jobs(10, 23)]
    requests = run_jobs(engine, work)
    assert [len(request.tokens) for request in requests] == [10, 23]
    assert not engine.stats.preemptions and requests[1].stats.verified


@settings(max_examples=40)
@given(st.data())
def test_requests_that_come_together_enter_as_one_by_one(data: Any) -> None:
    device, vocab = torch.device("cpu"), 50

    def some() -> Request:
        number = st.integers(0, vocab - 1)
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7])),
            top_k=data.draw(st.sampled_from([0, 5, vocab + 3])),
            top_p=data.draw(st.sampled_from([1.0, 0.5])),
            min_tokens=data.draw(st.integers(0, 3)),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
            stop_token_ids=data.draw(st.lists(number, max_size=7)),
            logit_bias=data.draw(st.dictionaries(number, st.sampled_from([-2.0, 3.0]), max_size=3)),
        )
        prompt = tuple(data.draw(st.lists(number, min_size=1, max_size=9)))
        seed, choice = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 3))
        computed = data.draw(st.integers(0, len(prompt) - 1))
        output = data.draw(st.lists(number, max_size=4))
        return Request(
            "r", prompt, params, SpeculationParams(), seed, 20, (1,), choice,
            output=output, computed=computed,
        )  # fmt: skip

    together, alone = (SlotState(4, 20, 2, 4, vocab, device) for _ in range(2))
    for _ in range(3):
        requests = [some() for _ in range(data.draw(st.integers(1, 4)))]
        slots = data.draw(st.permutations(range(4)))[: len(requests)]
        for slot, request in zip(slots, requests, strict=True):
            request.slot = slot
            with sending(device) as uploads:
                alone.admit([request], uploads)
        with sending(device) as uploads:
            together.admit(requests, uploads)
        for slot, request in zip(slots, requests, strict=True):
            assert together.history[slot, : request.length].tolist() == request.tokens
            assert together.limit[slot] == request.max_length
            assert together.params.seed[slot] == request.seed
            names = ("temperature", "min_p", "top_p")
            shared = [float(getattr(together.params, name)[slot]) for name in names]
            assert shared == pytest.approx([getattr(request.params, name) for name in names])
            assert float(together.params.presence[slot]) == request.params.presence_penalty
            stops = [token for token in together.params.stop_ids[slot].tolist() if token >= 0]
            assert stops == list(request.stop_token_ids)
            ids, values = together.params.bias_ids[slot].tolist(), together.params.bias[slot]
            bias = {i: v for i, v in zip(ids, values.tolist(), strict=True) if i >= 0}
            assert bias == (request.params.logit_bias or {})
    for state in (together, alone):
        # Beyond a text, a slot holds whatever its last request left.
        for slot in range(4):
            state.history[slot, state.length[slot] :] = 0
    for owner in ("", "params"):
        left, right = (getattr(s, owner) if owner else s for s in (together, alone))
        for name, value in vars(left).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(right, name)), name


def test_who_was_aborted_meanwhile_leaves_the_others_their_own_tokens() -> None:
    """Drafts of some, no drafts of others, and a place of one that has ended with both."""
    _, requests = running(5, True, {0, 2})
    rows = torch.zeros((6, COLUMNS.count), dtype=torch.int32)
    for place, (count, drafts) in enumerate([(3, 2), (2, 2), (1, 0), (1, 0), (3, 2)]):
        tokens = torch.tensor([10, 11, 12]) + 10 * place
        rows[place, COLUMNS.COUNT], rows[place, COLUMNS.ACCEPTED] = count, count - 1
        rows[place, COLUMNS.VERIFIED] = drafts
        rows[place, COLUMNS.FIRST_TOKEN : COLUMNS.FIRST_TOKEN + 3] = tokens
    landing = read(rows, None, requests)
    outputs = [request.output for request in requests]
    assert outputs == [[], [20, 21], [], [40], [50, 51, 52]]
    assert [item.tokens for item in landing.progress] == [[20, 21], [40], [50, 51, 52]]
    assert (landing.verified, landing.accepted) == (4, 3)
