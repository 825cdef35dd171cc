"""The kernels of a recorded round's book-keeping against the torch operations they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from harness import Job, make_engine, random_weights, run_jobs, tiny_config
from surefoot.engine.chunks import ChunkLimits
from surefoot.engine.engine import Engine
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.books import book_keeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.size import Size
from surefoot.speculation.state import SlotState
from tree_proposers import Bush

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)


def build(compiled: bool, **options: Any) -> Engine:
    config = tiny_config()
    backend = TorchBackend(triton_interpreter.DEVICE, torch.float32)
    backend.book_keeping = "triton" if compiled else "torch"
    decoder = Decoder(config, random_weights(config), backend)
    values: dict[str, Any] = dict(max_num_seqs=3, max_draft_tokens=4, kv_blocks=200)
    return make_engine(decoder, True, **{**values, **options})


def jobs(count: int) -> list[Job]:
    made = []
    for index in range(count):
        piece = tuple((index * 5 + i) % 30 + 2 for i in range(1 + index % 3))
        params = SamplingParams(
            temperature=0.0 if index % 2 else 0.7, seed=index, max_tokens=6 + 5 * index
        )
        method = ("auto", "ngram", "off", "saboteur")[index % 4]
        limit = 2 if index == 3 else None
        made.append(Job(piece * 5, params, SpeculationParams(method, limit), arrival=index // 2))
    return made


def reports(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Everything that rounds told the host, as they told it."""
    rounds, seen = engine.rounds, []
    launch = rounds.launch

    def record(size: Any, *rest: Any) -> Any:
        report = launch(size, *rest)
        report.wait()
        seen.append(torch.from_numpy(report.rows[: size.spans].copy()))
        return report

    monkeypatch.setattr(rounds, "launch", record)
    return seen


@pytest.mark.parametrize("policy", ["auto", "fixed"])
@pytest.mark.parametrize(
    "names", [("ngram",), ("saboteur", "ngram"), (Bush.name,), ("ngram", Bush.name)]
)
def test_decisions_are_those_of_the_torch_path(
    names: tuple[str, ...], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [job for job in jobs(6) if job.speculation.method in ("auto", "off", *names)]
    engines = [build(way, proposers=names, draft_policy=policy) for way in (False, True)]
    # The planner of one decides for both, and how long chunks are and how many rounds are in
    # flight is fixed: measured times differ.
    for engine in engines:
        engine.loop.gathering.limits = ChunkLimits()
        monkeypatch.setattr(engine.loop.clock, "compare", lambda host, seconds: None)
    decisions: list[Any] = []
    decide = engines[0].loop.planner.decide
    monkeypatch.setattr(
        engines[0].loop.planner, "decide", lambda s: decisions.append(decide(s)) or decisions[-1]
    )
    seen = [reports(engine, monkeypatch) for engine in engines]
    texts = [[r.output for r in run_jobs(engines[0], work)]]
    monkeypatch.setattr(engines[1].loop.planner, "decide", lambda s: decisions.pop(0))
    texts.append([r.output for r in run_jobs(engines[1], work)])
    assert texts[0] == texts[1]
    assert len(seen[0]) == len(seen[1]) > 10
    columns, drafted = engines[0].round.books.columns, 0
    for left, right in zip(*seen, strict=True):
        # Whose the drafts are says nothing where there are none; tokens end with the counts.
        assert torch.equal(left[:, :4], right[:, :4])
        drafts = left[:, columns.VERIFIED] > 0
        assert torch.equal(left[drafts, columns.WHOSE], right[drafts, columns.WHOSE])
        goes = (left[:, columns.COUNT] > 0) & (left[:, columns.END] == 0)
        assert torch.equal(left[goes, columns.OFFERED], right[goes, columns.OFFERED])
        for row in torch.nonzero(left[:, columns.COUNT]).flatten().tolist():
            first, end = columns.FIRST_TOKEN, columns.FIRST_TOKEN + int(left[row, columns.COUNT])
            assert torch.equal(left[row, first:end], right[row, first:end])
            offered = int(left[row, columns.OFFERED])
            if offered and goes[row]:
                assert left[row, columns.OFFERER] == right[row, columns.OFFERER]
                for first in (columns.offer, columns.parents)[: 1 + columns.trees]:
                    offer = slice(first, first + offered)
                    assert torch.equal(left[row, offer], right[row, offer])
        chances = [
            x[goes, columns.chances : columns.offer].contiguous().view(torch.float32)
            for x in (left, right)
        ]
        torch.testing.assert_close(*chances, rtol=1e-5, atol=1e-7)
        drafted += int(left[:, columns.VERIFIED].sum())
    # How much the planner finds worth trying depends on the times this machine measures.
    assert drafted > (20 if policy == "fixed" else 0)
    for name in ("all_trials", "all_hits", "hits", "trials"):
        pairs = zip(*(engine.controller.estimators for engine in engines), strict=True)
        for left, right in pairs:
            if name.startswith("all"):
                continue  # The last round's news are entered by the next one.
            slots = slice(0, 3)
            torch.testing.assert_close(getattr(left, name)[slots], getattr(right, name)[slots])


@pytest.mark.parametrize(("spans", "width"), [(1, 1), (3, 4), (9, 8), (20, 63)])
def test_rows_go_to_prompts_and_to_the_most_likely_drafts(spans: int, width: int) -> None:
    torch.manual_seed(spans)
    state = SlotState(spans + 1, 40, width, 4, 99, triton_interpreter.DEVICE)
    backend = TorchBackend(triton_interpreter.DEVICE, torch.float32)
    controller = Controller(state, ("a",))
    books = book_keeping(backend, state, controller, spans)
    backend.book_keeping = "triton"
    kernels = book_keeping(backend, state, controller, spans)
    slots = torch.randperm(spans + 1)[:spans]
    slots[-1:] = state.padding_slot
    chances = (torch.rand(state.slots, width) * 8).round() / 8
    chances = chances.sort(dim=1, descending=True).values
    chances[:, width // 2 + 1 :] *= (torch.rand(state.slots, 1) > 0.5).float()
    state.alive[:-1] = (torch.rand(spans + 1) > 0.2).long()
    state.length[:-1] = torch.randint(5, 39, (spans + 1,))
    state.computed[:] = state.length - 1 - 4 * (torch.rand(state.slots) > 0.6).long()
    quota = torch.randint(1, 7, (spans,))
    books.offers.chances.copy_(chances)
    books.offers.tokens.copy_(torch.randint(1, 99, chances.shape))
    for name in ("chances", "tokens"):
        getattr(kernels.offers, name).copy_(getattr(books.offers, name))
    for rows in (spans, spans * 5, spans * (6 + width)):
        for samples in (spans, spans + 1, spans * (1 + width)):
            size = Size(spans, rows, samples, SamplingStages(), (), verifies=True)
            expected = books.split(slots, quota, size)
            text = state.history[:-1].clone()
            state.history.zero_()
            found = kernels.split(slots, quota, size)
            for name in ("known", "samples", "drafts"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
            assert torch.equal(state.history[:-1], text)


@pytest.mark.parametrize("cuts", [1, 5])
def test_what_a_grammar_cuts_is_neither_on_offer_nor_in_view(cuts: int) -> None:
    """Proposer 2 works on the host: what it offers is in view there. What is in view of an earlier
    offer stays."""
    torch.manual_seed(cuts)
    device, width = triton_interpreter.DEVICE, 6
    state = SlotState(7, 40, width, 4, 99, device)
    controller = Controller(state, ("a", "b"))
    backend = TorchBackend(device, torch.float32)
    books = book_keeping(backend, state, controller, 4)
    backend.book_keeping = "triton"
    kernels = book_keeping(backend, state, controller, 4)
    records, tables = controller.records, books.offers
    state.length[:] = torch.randint(5, 9, state.length.shape)
    records.watched_length[:] = torch.randint(0, width + 1, records.watched_length.shape)
    records.watched_start[:] = torch.randint(5, 9, records.watched_start.shape)
    tables.lengths[:] = width
    tables.chances[:] = torch.rand(tables.chances.shape)
    slots = torch.randperm(7)[:cuts]
    # In view of them: a whole offer, one that is shorter than the cut, and an earlier one.
    for slot, start, length in zip(slots, (0, -1, 0, 0), (width, 4, 5, 3), strict=False):
        records.watched_start[:, slot] = state.length[slot] + start
        records.watched_length[:, slot] = length
    whose = torch.tensor([1, 0, 2, 1, 0])[:cuts]
    table = torch.stack((slots, whose, torch.tensor([2, 0, 3, 5, 1])[:cuts])).to(device)
    before = records.watched_length.clone(), tables.lengths.clone(), tables.chances.clone()
    books.cut(table)
    expected = records.watched_length.clone()
    records.watched_length.copy_(before[0])
    kernels.offers.lengths.copy_(before[1])
    kernels.offers.chances.copy_(before[2])
    kernels.cut(table)
    assert torch.equal(records.watched_length, expected) and not torch.equal(expected, before[0])
    assert torch.equal(kernels.offers.lengths, tables.lengths)
    assert torch.equal(kernels.offers.chances, tables.chances)
    assert expected[1, slots[0]] == 2 and expected[0, slots[0]] == width
    left = tables.chances[slots].count_nonzero(dim=1).tolist()
    assert left == tables.lengths[slots].tolist() == table[2].tolist()
