"""The three implementations of the book-keeping around a round do the same: on random slots, offers
and texts, those in C and in Triton against the one in torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from harness import (
    Job,
    admit_alone,
    make_engine,
    native_backend,
    needs_native,
    random_weights,
    run_jobs,
    tiny_config,
    tiny_decoder,
)
from surefoot.config import EngineConfig
from surefoot.engine.build import choose_backend
from surefoot.kernels.backend import Backend
from surefoot.kernels.cpu import build
from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.books import BookKeeping, book_keeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.native_books import NativeBooks
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.size import Size
from surefoot.speculation.state import SlotState
from tree_proposers import Bush

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if find_spec("triton"):
    import triton_interpreter  # noqa: F401

pytestmark = pytest.mark.skipif(ON_GPU, reason="tests/gpu run the same checks compiled")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
K, VOCAB, SLOTS = 4, 6, 5
OTHERS = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "native",
            marks=[needs_native, pytest.mark.skipif(ON_GPU, reason="tensors on a CPU")],
        ),
        pytest.param("triton", marks=needs_triton),
    ],
)


def seeds(name: str, count: int) -> range:
    """``count`` of them; fewer for kernels that are interpreted."""
    return range(count if name == "native" or ON_GPU else count // 20)


def backend_of(name: str) -> Backend:
    if name == "native":
        return native_backend()
    backend = TorchBackend(DEVICE, torch.float32)
    backend.book_keeping = name
    return backend


def make_books(name: str, trees: tuple[bool, ...] = (False,), width: int = K) -> BookKeeping:
    backend = backend_of(name)
    state = SlotState(SLOTS, 60, width, 4, VOCAB, backend.device)
    controller = Controller(state, [f"p{index}" for index in range(len(trees))], trees)
    return book_keeping(backend, state, controller, SLOTS + 3)


class Dice:
    """Random tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 from ``low`` to ``high`` - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def share(self, *shape: int) -> torch.Tensor:
        """float32 from 0 to 1."""
        return torch.rand(shape, generator=self.generator)


def fill_slots(pair: list[BookKeeping], dice: Dice) -> None:
    every = SLOTS + 1
    width = pair[0].state.history.shape[1]
    history, length = dice.draw(0, VOCAB, every, width), dice.draw(10, 20, every)
    back, room = dice.draw(1, 10, every), dice.draw(1, 8, every)
    stops, alive = dice.draw(-1, VOCAB + 20, every, 4), dice.draw(0, 5, every).sign()
    for books in pair:
        state = books.state
        state.history.copy_(history)
        state.length.copy_(length)
        state.computed.copy_(length - back)
        state.limit.copy_(length + room)
        state.alive.copy_(alive)
        state.params.stop_ids[:, : stops.shape[1]].copy_(stops)
        # Nobody's slot is as it is made.
        state.length[SLOTS], state.computed[SLOTS], state.limit[SLOTS] = 1, 0, 0


def make_spans(dice: Dice, state: SlotState) -> tuple[RoundSpans, int, int]:
    """Prompt chunks, last chunks, decoding spans and unused entries, with the rows and the sampled
    rows of a round that holds them, padded at random."""
    slots = torch.randperm(SLOTS, generator=dice.generator)[: 1 + int(dice.draw(0, SLOTS))]
    known, drafts, samples = [], [], []
    for slot in slots.tolist():
        missing = int(state.length[slot] - state.computed[slot])
        kind = ("chunk", "end", "decoding", "ended")[int(dice.draw(0, 4))]
        if kind == "decoding":
            state.computed[slot] = state.length[slot] - 1
        if kind == "chunk":
            state.computed[slot] -= 1
        known.append({"chunk": missing, "end": missing, "decoding": 1, "ended": 0}[kind])
        drafts.append(int(dice.draw(0, K + 1)) if kind == "decoding" else 0)
        samples.append(int(kind in ("end", "decoding")))
    unused = int(dice.draw(0, 3))
    columns = slots.tolist() + [SLOTS] * unused, known + [0] * unused, drafts + [0] * unused
    spans = RoundSpans(*(torch.tensor(column) for column in (*columns, samples + [0] * unused)))
    sampled = sum(drafts) + sum(samples)
    rows = max(1, sum(known) + sum(drafts) + int(dice.draw(0, 4)))
    return spans, rows, max(1, sampled + int(dice.draw(0, 3)))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()


def commit(books: BookKeeping, spans: RoundSpans, size: Size, given: list[torch.Tensor]) -> Any:
    """Everything that a round's rows, texts and verdict are, as far as it means something."""
    state, (offers, sampled) = books.state, given
    books.write_drafts(spans.slots, offers)
    layout = books.lay_out(spans, size, 60)
    found = books.judge(spans, layout.first_sample, sampled)
    used, batch = spans.known > 0, layout.batch
    own = int((spans.known + spans.drafts)[used].sum())
    taken = int((spans.drafts + spans.samples)[used].sum())
    lines = batch.tokens, batch.positions, batch.key_index
    sampling = layout.sample_index, layout.sample_slots, layout.sample_positions
    return [
        batch.row_slot,
        *(line[:own] for line in lines),
        *(line[:taken] for line in sampling),
        *(layout.first_row[used], layout.first_sample[used]),
        *(found.accepted, found.counts, found.ends, found.settled, found.going),
        *(row[:count] for row, count in zip(found.tokens, found.counts, strict=True)),
        *(state.history[slot, : state.length[slot]] for slot in range(SLOTS)),
        *(state.length[:SLOTS], state.computed[:SLOTS]),
    ]


@OTHERS
def test_a_round_commits_the_same(name: str) -> None:
    pair, ends, accepted = [make_books(name), make_books("torch")], set(), 0
    for seed in seeds(name, 600):
        dice = Dice(seed)
        fill_slots(pair, dice)
        spans, rows, sampled_rows = make_spans(dice, pair[0].state)
        pair[1].state.computed.copy_(pair[0].state.computed)
        sampled = dice.draw(0, VOCAB, sampled_rows)
        offers = dice.draw(0, VOCAB, len(spans.slots), K)
        if seed % 2:
            # Mostly right drafts, so that whole spans are accepted too.
            first = 0
            for count, samples, row in zip(spans.drafts, spans.samples, offers, strict=True):
                row[:count] = sampled[first : first + count]
                first += int(count + samples)
        size = Size(len(spans.slots), rows, sampled_rows, SamplingStages(), ())
        ours, theirs = (commit(books, spans, size, [offers, sampled]) for books in pair)
        same(ours, theirs)
        accepted += int(theirs[9].sum())
        ends.update(theirs[11].tolist())
    assert ends == {0, 1, 2} and accepted > 20


@OTHERS
def test_rows_go_to_the_likeliest_drafts(name: str) -> None:
    """As many as a round has left, of the requests that have nothing else to run."""
    short = 0
    for seed in seeds(name, 100):
        dice, pair = Dice(seed), [make_books(name), make_books("torch")]
        slots = torch.randperm(SLOTS, generator=dice.generator)[: 2 + seed % (SLOTS - 1)]
        missing = torch.where(dice.share(SLOTS) < 0.3, 3, 1)
        chances = dice.share(SLOTS, K).sort(dim=1, descending=True).values
        chances *= torch.arange(K) < dice.draw(0, K + 1, SLOTS).unsqueeze(1)
        known = missing[slots].clamp(max=2)
        samples = (missing[slots] == 1).long()
        room, apart = int(dice.draw(0, K * len(slots) + 2)), int(dice.draw(0, 2))
        rows, sampled = int(known.sum()) + room, int(samples.sum()) + room - apart
        alone = chances[slots] * samples.unsqueeze(1)
        least = alone.flatten().sort(descending=True).values[max(0, room - apart) :]
        want = (alone > (float(least[0]) if len(least) else 0.0)).sum(dim=1)
        short += bool(len(least) and least[0] > 0)
        size = Size(len(slots), rows, max(0, sampled), SamplingStages(), (), verifies=True)
        for books in pair:
            state = books.state
            state.alive[:SLOTS], state.length[:SLOTS] = 1, 9
            state.computed[:SLOTS] = 9 - missing
            books.offers.chances[:SLOTS], books.offers.lengths[:SLOTS] = chances, K
            spans = books.split(slots, torch.full_like(slots, 2), size)
            assert spans.known.tolist() == known.tolist()
            assert spans.samples.tolist() == samples.tolist()
            assert spans.drafts.tolist() == want.tolist()
    assert short


# --- what is learnt ----------------------------------------------------------------------------


def random_drafts(dice: Dice, slots: torch.Tensor, tree: bool, width: int) -> Drafts:
    """Offers of any width, length and strides, some of them with tokens that are none."""
    shape = len(slots), int(dice.draw(1, width + 3))
    tokens = dice.draw(0, 2, *shape)
    tokens = torch.where(dice.share(*shape) < 0.05, dice.draw(-1, VOCAB + 2, *shape), tokens)
    order = torch.arange(shape[1])
    parents = (dice.share(*shape) * (order + 1.2)).long() - 1
    lengths = dice.draw(0, shape[1] + 2, shape[0])
    confidence = dice.share(*shape) * 1.1
    if int(dice.draw(0, 2)):
        tokens, confidence, parents = (
            x.t().contiguous().t() for x in (tokens, confidence, parents)
        )
        lengths = lengths.unsqueeze(1).repeat(1, 2)[:, 0]
    return Drafts(tokens, lengths, confidence, parents if tree else None)


def random_verdict(dice: Dice, pair: list[BookKeeping]) -> tuple[torch.Tensor, RoundVerdict]:
    """Texts grow by random tokens, entered here; (slots of the round, its verdict)."""
    state = pair[0].state
    order = torch.randperm(SLOTS, generator=dice.generator).tolist()
    slots = torch.tensor(order[: 1 + int(dice.draw(0, SLOTS))] + [SLOTS] * int(dice.draw(0, 3)))
    counts = dice.draw(0, state.max_drafts + 2, len(slots)) * (slots != SLOTS)
    counts = torch.minimum(counts, (state.limit - state.length)[slots]).clamp(min=0)
    tokens = dice.draw(0, 2, len(slots), state.max_drafts + 1)
    ends = dice.draw(0, 12, len(slots)) // 10 * counts.sign()
    for books in pair:
        state = books.state
        for slot, count, row in zip(slots.tolist(), counts.tolist(), tokens, strict=True):
            at = int(state.length[slot])
            state.history[slot, at : at + count] = row[:count]
            state.length[slot] += count
        state.computed.copy_((state.length - 1).clamp(min=0))
    going = torch.where((counts > 0) & (ends == 0), slots, SLOTS)
    none = torch.zeros_like(counts)
    return slots, RoundVerdict(tokens, (counts - 1).clamp(min=0), counts, ends, none, going)


def run_round(books: BookKeeping, given: Any, seed: int, awake: tuple[int, ...]) -> None:
    """The end of a round, and the split of the next one, which enters what is left to enter."""
    (slots, verdict), trees, width = given, books.controller.trees, books.state.max_drafts

    def propose(index: int, going: torch.Tensor) -> Drafts:
        return random_drafts(Dice(seed + index), going, trees[index], width)

    size = Size(len(slots), 99, 99, SamplingStages(), awake, verifies=True)
    books.finish(slots, size, verdict.accepted, verdict, propose)
    books.split(slots, torch.ones_like(slots), size)


def check_equal(ours: BookKeeping, theirs: BookKeeping, slots: torch.Tensor) -> None:
    """All that is kept of requests and all that is reported of them."""
    records = ours.controller.records, theirs.controller.records
    for name in ("watched_length", "hits", "trials"):
        mine, other = (getattr(table, name)[:, :SLOTS] for table in records)
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(records[0].seen, records[1].seen, rtol=5e-5, atol=5e-5)
    pair = ours.controller, theirs.controller
    lengths = pair[1].lengths[:, :SLOTS]
    assert torch.equal(pair[0].lengths[:, :SLOTS], lengths)
    width = ours.state.max_drafts
    offered = torch.arange(width) < lengths.unsqueeze(2)
    for name in ("tokens", "confidence", "parents"):
        mine, other = (getattr(controller, name) for controller in pair)
        if other is not None:
            assert torch.equal(mine[:, :SLOTS][offered], other[:, :SLOTS][offered]), name
    totals = [books.offers.chances[:SLOTS].sum(dim=1) for books in (ours, theirs)]
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-4)
    # Of offers that are worth the same, a device's own last bits may choose either.
    whose = ours.offers.proposer[:SLOTS], theirs.offers.proposer[:SLOTS]
    alike = whose[0] == whose[1]
    lengths = theirs.offers.lengths[:SLOTS]
    held = lengths > 0
    assert alike[held].all() or theirs.offers.lengths.is_cuda
    assert torch.equal(ours.offers.lengths[:SLOTS][alike], lengths[alike])
    offered = (torch.arange(width) < lengths.unsqueeze(1)) & alike.unsqueeze(1)
    for name in ("tokens", "parents"):
        mine, other = getattr(ours.offers, name), getattr(theirs.offers, name)
        if other is not None:
            assert torch.equal(mine[:SLOTS][offered], other[:SLOTS][offered]), name
    chances = ours.offers.chances[:SLOTS], theirs.offers.chances[:SLOTS]
    torch.testing.assert_close(*(each[alike] for each in chances), rtol=2e-5, atol=1e-6)
    assert torch.equal(ours.state.alive[:SLOTS], theirs.state.alive[:SLOTS])
    columns, count = ours.columns, len(slots)
    chosen = alike[slots.clamp(max=SLOTS - 1)]
    reports = ours.report[:count][chosen], theirs.report[:count][chosen]
    for mine, other in zip(*reports, strict=True):
        meant = [0, 1, 2, 3, columns.OFFERED]
        meant += range(columns.FIRST_TOKEN, columns.FIRST_TOKEN + int(other[columns.COUNT]))
        number = int(other[columns.OFFERED])
        if number:
            meant.append(columns.OFFERER)
            meant += range(columns.offer, columns.offer + number)
            meant += range(columns.parents, columns.parents + number) if columns.trees else ()
        if other[columns.VERIFIED] and not other.is_cuda:
            # Theirs was chosen rounds ago.
            meant.append(columns.WHOSE)
        assert mine[meant].tolist() == other[meant].tolist()
    chances = [
        report[:, columns.chances : columns.offer].contiguous().view(torch.float32)
        for report in reports
    ]
    torch.testing.assert_close(*chances, rtol=2e-5, atol=1e-6)


def fresh_pair(name: str, trees: tuple[bool, ...], width: int, dice: Dice) -> list[BookKeeping]:
    pair = [make_books(name, trees, width), make_books("torch", trees, width)]
    allowed, limit = dice.share(len(trees), SLOTS) < 0.9, dice.draw(1, 2 * width, SLOTS)
    history, room = dice.draw(0, 2, SLOTS, 3), dice.draw(20, 50, SLOTS)
    for books in pair:
        state, controller = books.state, books.controller
        state.history[:SLOTS, :3], state.length[:SLOTS] = history, 3
        state.limit[:SLOTS], state.alive[:SLOTS] = 3 + room, 1
        controller.allowed[:, :SLOTS] = allowed
        controller.draft_limit[:SLOTS] = limit.clamp(max=width)
    return pair


@OTHERS
@pytest.mark.parametrize("width", [1, K, 8, 9])
@pytest.mark.parametrize("trees", [(False,), (True,), (False, True), (False, False), (True, True)])
def test_they_learn_and_choose_the_same(name: str, trees: tuple[bool, ...], width: int) -> None:
    """Over many rounds, with proposers that sleep, requests that end, and rounds without drafts."""
    learnt = 0.0
    for seed in seeds(name, 24):
        dice = Dice(seed)
        pair = fresh_pair(name, trees, width, dice)
        before = pair[1].controller.records.seen.clone()
        for step in range(8):
            given = random_verdict(dice, pair)
            awake = tuple(i for i in range(len(trees)) if float(dice.share()) < 0.8)
            for books in pair:
                run_round(books, given, 100 * step + seed, awake)
            check_equal(pair[0], pair[1], given[0])
        learnt += float((pair[1].controller.records.seen - before).abs().sum())
    assert learnt > 5


@OTHERS
def test_a_proposer_that_sleeps_learns_from_its_last_offer(name: str) -> None:
    for books in (make_books(name, (False, False)), make_books("torch", (False, False))):
        check_that_sleepers_learn(books)


def check_that_sleepers_learn(books: BookKeeping) -> None:
    state, controller = books.state, books.controller
    controller.allowed.fill_(True)
    controller.draft_limit.fill_(K)
    state.limit.fill_(50)
    slots = torch.tensor([2])
    offer = Drafts(torch.full((1, K), 3), torch.tensor([K]), torch.full((1, K), 0.5))
    for index in (0, 1):
        books.learn(index, slots, offer)
    state.history[2, : K + 1] = 3
    state.length[2] = K + 1
    one, none = slots.new_ones(1), slots.new_zeros(1)
    tokens = slots.new_full((1, K + 1), 3)
    verdict = RoundVerdict(tokens, none, one, none, none, slots)
    books.finish(slots, Size(1, 1, 1, SamplingStages(), (0,)), none, verdict, lambda *_: offer)
    for estimator in controller.estimators:
        assert float(estimator.trials[2, 4].sum()) == K
    assert controller.lengths[:, 2].tolist() == [K, 0]


@OTHERS
def test_a_proposer_that_was_switched_off_is_not_asked(name: str) -> None:
    """Whatever the round was sized for."""
    books = make_books(name, (False, False))
    slots, asked = torch.tensor([0]), []
    none = torch.zeros_like(slots)
    verdict = RoundVerdict(none.view(1, 1), none, none, none, none, slots)
    offer = Drafts(none.view(1, 1), none, torch.zeros(1, 1))
    del books.controller.active[1]

    def propose(index: int, going: torch.Tensor) -> Drafts:
        asked.append(index)
        return offer

    admit_alone(
        books.controller, Request("r", (1,), SamplingParams(), SpeculationParams(), 0, 9, slot=0)
    )
    books.finish(slots, Size(1, 1, 1, SamplingStages(), (0, 1)), none, verdict, propose)
    assert asked == [0] and books.controller.allowed[:, 0].tolist() == [True, False]


@pytest.mark.parametrize("proposers", [0, 2])
@pytest.mark.parametrize("name", ["torch", *OTHERS.args[1]])
def test_nothing_stays_on_offer_where_nobody_proposes(name: str, proposers: int) -> None:
    """What proposers on the host entered, neither, whether there are others on the device or not:
    a later round would verify it against masks that were not made for it."""
    books = make_books(name, (False,) * proposers)
    offers, slots = books.offers, torch.tensor([2, 0])
    offers.lengths.fill_(K)
    offers.chances.fill_(0.5)
    one, none = torch.ones_like(slots), torch.zeros_like(slots)
    verdict = RoundVerdict(slots.new_full((2, K + 1), 3), none, one, none, none, slots)
    books.finish(
        slots, Size(2, 2, 2, SamplingStages(), ()), none, verdict, lambda *_: pytest.fail("asked")
    )
    left = [int(slot not in (0, 2)) for slot in range(SLOTS)]
    assert offers.lengths[:SLOTS].tolist() == [K * each for each in left]
    assert offers.chances[:SLOTS].tolist() == [[each * 0.5] * K for each in left]
    assert books.report[:2, books.columns.OFFERED].tolist() == [0, 0]


@needs_triton
@pytest.mark.parametrize("trees", [(False,), (True,)])
def test_what_all_requests_teach_does_not_depend_on_their_order(trees: tuple[bool, ...]) -> None:
    """Programs of a GPU run in any order; those of the interpreter run in that of the slots."""
    found = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        books, dice = make_books("triton", trees, 7), Dice(5)
        state, controller, slots = books.state, books.controller, torch.tensor(order)
        state.limit.fill_(60)
        controller.allowed.fill_(True)
        controller.draft_limit.fill_(7)
        controller.records.hits.copy_(dice.share(*controller.records.hits.shape))
        controller.records.trials.copy_(controller.records.hits * 2.7)
        # All are right, and in one bin, so that sums are of several numbers.
        shape = SLOTS, 7
        tokens, confidence = torch.zeros(shape, dtype=torch.int64), torch.full(shape, 0.5)
        parents = (dice.share(*shape) * (torch.arange(7) + 1)).long() - 1
        parents = parents[slots] if trees[0] else None
        books.learn(0, slots, Drafts(tokens, torch.full((SLOTS,), 7), confidence, parents))
        state.length[:SLOTS] += 9
        books.learn(0, slots, None)
        news = getattr(books, "news")  # noqa: B009
        taught = news.clone()
        books.split(slots, torch.ones_like(slots), Size(SLOTS, 9, 9, SamplingStages(), ()))
        assert taught.any() and not news.any()
        found.append((taught, controller.records.seen.clone()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# --- the choice --------------------------------------------------------------------------------


@needs_native
def test_the_backend_names_its_book_keeping() -> None:
    engine = make_engine(tiny_decoder("native"), max_num_seqs=2)
    assert isinstance(engine.round.books, NativeBooks)


@pytest.mark.parametrize("proposers", [("ngram",), ("ngram", Bush.name)])
def test_torch_alone_never_loads_the_compiled_library(
    proposers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("the compiled library was asked for")

    monkeypatch.setattr(build, "_load", refuse)
    config, backend = tiny_config(), choose_backend(EngineConfig(backend="torch", dtype="float32"))
    decoder = Decoder(config, random_weights(config), backend)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.1)
    engine = make_engine(decoder, max_num_seqs=2, draft_policy="fixed", proposers=proposers)
    [request] = run_jobs(engine, [Job((2, 3, 4, 2, 3), params)])
    assert len(request.output) == 40 and request.stats.offered
