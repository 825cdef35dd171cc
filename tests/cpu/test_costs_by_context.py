"""Costs of recorded rounds follow the length of the texts, on a device whose times are made up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import (
    Job,
    make_engine,
    on_torch_alone,
    random_weights,
    run_alone,
    run_jobs,
    tiny_config,
    tiny_decoder,
)
from surefoot.engine.costs import interpolate
from surefoot.engine.cuda_graphs import SPARE, CudaRoundGraphs
from surefoot.engine.engine import Engine
from surefoot.engine.graphs import RoundGraphs
from surefoot.engine.pipeline import LOOK_EVERY
from surefoot.engine.rehearsal import CONTEXTS, contexts_to_time, rehearsal
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams
from surefoot.speculation.replay import DRAWN, GREEDY, ReplayRound, Size

WIDTH = 3


def graphs_of(engine: Engine) -> RoundGraphs:
    assert engine.pipeline is not None
    return engine.pipeline.graphs


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        # A straight line is one everywhere; of a bent one, the two nearest points count.
        ([(100, 2.0), (500, 4.0)], {100: 2, 200: 2.5, 500: 4, 900: 6, 60: 1.8}),
        ([(100, 2.0), (200, 4.0), (400, 5.0)], {150: 3, 300: 4.5, 600: 6, 200: 4, 50: 1}),
        # Times that fall are noise: what was measured last holds.
        ([(100, 2.0), (500, 1.5)], {1: 2, 300: 1.75, 500: 1.5, 10_000: 1.5}),
        # Never below 0: no faster than in proportion.
        ([(100, 1.0), (200, 5.0)], {50: 0.5, 1: 0.01}),
        ([(128, 3.0)], {1: 3, 128: 3, 4096: 3}),
    ],
)
def test_lines_between_contexts_and_beyond(
    points: list[tuple[int, float]], expected: dict[int, float]
) -> None:
    assert {at: interpolate(points, at) for at in expected} == pytest.approx(expected)


def long_engine(requests: int, blocks: int, longest: int) -> Engine:
    config = tiny_config(max_positions=longest)
    decoder = Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32))
    return make_engine(
        decoder, True, max_num_seqs=requests, max_draft_tokens=WIDTH, kv_blocks=blocks,
        block_size=16,
    )  # fmt: skip


def longest_with_keys_of_their_own(replay: ReplayRound, blocks: int, spans: int) -> int:
    """Found by trying, block by block, with one token more than the drafts in the last."""
    state, best = replay.state, 0
    for context in range(16 - WIDTH - 1, (state.history.shape[1] - WIDTH - 1) * 3 // 4 + 1, 16):
        with rehearsal(replay, blocks, context) as seat:
            seat(spans)
            busy = state.block_tables[: min(spans, replay.idle_slot)]
            used = busy[:, : -(-(context + WIDTH + 1) // 16)].flatten().tolist()
        if len(used) != len(set(used)):
            break
        best = context
    return best


@pytest.mark.parametrize("blocks", [12, 41, 300, 1100])
def test_a_small_pool_skips_long_contexts(blocks: int) -> None:
    """So that everybody reads keys of their own, which no cache holds."""
    replay = graphs_of(long_engine(3, blocks, 9000)).replay
    for spans in (1, 2, 4):
        most = min(longest_with_keys_of_their_own(replay, blocks + 1, spans), 6750)
        found = contexts_to_time(replay, blocks + 1, spans)
        assert found[0] == min(128, most) and found[-1] <= most
        wanted = {context for context in CONTEXTS if context <= most}
        assert wanted <= set(found), (found, most)
        assert all(b >= 2 * a for a, b in itertools.pairwise(found))


def test_contexts_are_bounded_by_the_longest_text() -> None:
    found = {}
    for longest in (3, 100, 400, 2048, 6000, 40_000):
        replay = graphs_of(long_engine(1, 2600, longest)).replay
        found[longest] = contexts_to_time(replay, 2601, 1)
    assert found == {
        3: [2], 100: [75], 400: [128, 300], 2048: [128, 1024], 6000: [128, 1024, 4096],
        40_000: [128, 1024, 4096, 16384],
    }  # fmt: skip
    replay = graphs_of(long_engine(4, 2, 9000)).replay
    assert contexts_to_time(replay, 3, 4) == [1]  # Not even a block for each.


class FakeCuda(CudaRoundGraphs):
    """Records nothing; rounds run when they are timed, and take what ``seconds`` says."""

    def __init__(self, replay: ReplayRound, spans: int, seconds: Callable[..., float]) -> None:
        RoundGraphs.__init__(self, replay, spans)
        self.graphs: dict[Size, Any] = {}
        self.recorded: Counter[Size] = Counter()
        self.seconds_of = seconds
        self.runs: list[tuple[Size, int]] = []
        self.params = replay.state.params
        self._tables = [
            (t.data_ptr(), t.shape[1]) for t in (self.params.stop_ids, self.params.bias_ids)
        ]

    def capture(self, size: Size) -> Any:
        self.recorded[size] += 1
        return size

    def time(self, graph: Any, prepare: Callable[[], None]) -> float:
        prepare()
        state, replay = self.replay.state, self.replay
        slots = replay.slots[replay.slots != replay.idle_slot]
        assert len(slots) == min(graph.spans, replay.idle_slot)
        [context] = set(state.length[slots].tolist())
        replay(graph)
        assert int(replay.report[: len(slots), 3].sum()) == min(
            graph.rows - len(slots) if graph.rows > graph.spans else 0, len(slots) * WIDTH
        )
        self.runs.append((graph, context))
        return self.seconds_of(graph.spans, graph.rows, context)


def made_up(spans: int, rows: int, context: int) -> float:
    return 1.0 + 0.01 * rows + 0.001 * spans * context


def test_each_size_is_recorded_once_and_timed_at_every_context() -> None:
    engine = long_engine(3, 480, 9000)
    tensors = {name: t.clone() for name, t in vars(engine.state).items() if torch.is_tensor(t)}
    graphs = FakeCuda(graphs_of(engine).replay, 3, made_up)
    graphs.measure(481)
    for name, before in tensors.items():
        assert torch.equal(getattr(engine.state, name), before), name
    assert set(graphs.recorded.values()) == {1}
    sizes = {(s.spans, s.rows, s.steps) for s in graphs.recorded if s.proposers}
    assert sizes == {(n, *variant) for n in graphs.spans for variant in graphs.variants(n)}
    at = {n: {c for size, c in graphs.runs if size.spans == n} for n in graphs.spans}
    # 160 blocks of 16 for each of 3 requests, 240 of 2.
    assert at == {1: {128, 1024, 4096}, 2: {128, 1024, 3836}, 4: {128, 1024, 2556}}
    assert len(graphs.runs) == sum(
        len(at[size.spans]) for size in graphs.recorded if size.proposers
    )
    # And rounds that look for no drafts.
    resting = {size for size in graphs.recorded if not size.proposers}
    assert resting == {Size(n, n, GREEDY, ()) for n in graphs.spans}
    # A middling context, until somebody says how long the texts are.
    for context in (1024, 128, 64, 2048, 8192):
        if context != 1024:
            graphs.attend(context)
        assert set(graphs.costs) == sizes
        for (spans, rows, _), seconds in graphs.costs.items():
            assert seconds == pytest.approx(made_up(spans, rows, context))


def graphs_with(times: Callable[[float, int], float]) -> RoundGraphs:
    """For up to 4 requests, timed at 10 and 100 tokens."""
    engine = make_engine(
        tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=WIDTH, kv_blocks=200
    )
    fill(graphs_of(engine), times)
    return graphs_of(engine)


def fill(graphs: RoundGraphs, times: Callable[[float, int], float]) -> None:
    for spans in graphs.spans:
        for rows, steps in graphs.variants(spans):
            for context in (10, 100):
                graphs.times.enter((spans, rows, steps), context, times(rows / spans, context))


def dear_when_short(rows: float, context: float) -> float:
    """Another row doubles a short round, and costs next to nothing in a long one."""
    return rows if context == 10 else 3.0 + 0.001 * rows


def test_costs_change_in_steps_and_tables_with_them() -> None:
    graphs = graphs_with(lambda rows, context: rows * context)
    base, changes, before = Size(4, 4, GREEDY, (0,)), [], None
    for context in range(10, 161):
        graphs.attend(context)
        table = graphs.table(base, 4)
        assert graphs.seconds(base) == pytest.approx(context, rel=0.2)
        assert float(table[0]) == pytest.approx(graphs.seconds(base))
        if table is not before:
            changes.append(context)
        before = table
    assert 15 <= len(changes) <= 17  # Four octaves, in quarters.
    graphs.attend(128)
    kept = graphs.table(base, 4)
    for context in (118, 139, 120, 128, 145):
        graphs.attend(context)
        assert graphs.table(base, 4) is kept
    graphs.attend(20)
    assert graphs.table(base, 4) is not kept
    assert graphs.seconds(base) == pytest.approx(20, rel=0.2)


def test_costs_that_were_not_measured_by_context_stay() -> None:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=WIDTH)
    graphs = graphs_of(engine)
    guesses = dict(graphs.costs)
    graphs.attend(10)
    assert graphs.costs == guesses
    graphs.times.enter((4, 4, None), 10, 7.0)
    graphs.attend(100)
    assert graphs.costs == {**guesses, (4, 4, None): 7.0}
    # Guesses replace all.
    graphs.measure(engine.kv_blocks)
    graphs.attend(10)
    assert graphs.costs == guesses and not graphs.times


def run_with_an_oracle(times: Callable[[float, int], float]) -> list[tuple[int, Size]]:
    """Two texts, known beforehand. (Length of the first, size) of every launched round."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    jobs = [Job((5, 9, 5, 9, 5 + i), params) for i in range(2)]
    plain = [run_alone(tiny_decoder(), job) for job in jobs]
    texts = tuple(tuple(request.tokens) for request in plain)
    engine = on_torch_alone(
        make_engine(
            tiny_decoder(), True, max_num_seqs=2, max_draft_tokens=WIDTH, kv_blocks=200,
            proposers=("oracle",), proposer_options={"oracle": {"texts": texts}},
        )
    )  # fmt: skip
    graphs, sizes = graphs_of(engine), []
    fill(graphs, times)
    launch = graphs.launch
    length = engine.state.length

    def record(size: Size) -> Any:
        sizes.append((int(length[0]), size))
        return launch(size)

    graphs.launch = record
    requests = run_jobs(engine, jobs)
    assert [request.output for request in requests] == [request.output for request in plain]
    return [(at, size) for at, size in sizes if size.spans == 2]


def test_rounds_draft_more_where_texts_grow_long() -> None:
    sizes = run_with_an_oracle(dear_when_short)
    short = [size for at, size in sizes if at < 12]
    long = [size for at, size in sizes if 25 < at < 110]
    assert len(short) > 3 and all(size.rows == size.spans for size in short)
    assert len(long) > 10 and all(size.rows == 2 * (1 + WIDTH) for size in long)


def test_rounds_draft_less_where_that_costs_more() -> None:
    """Here rows become dear towards 100 tokens, and beyond."""
    sizes = run_with_an_oracle(lambda rows, context: dear_when_short(rows, 110 - context))
    short = [size for at, size in sizes if at < 80]
    long = [size for at, size in sizes if 115 < at < 125]
    assert len(short) > 10 and all(size.rows == 2 * (1 + WIDTH) for size in short)
    assert len(long) > 5 and all(size.rows == size.spans for size in long)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_pipeline_reports_the_mean_length_now_and_then(count: int) -> None:
    engine = make_engine(
        tiny_decoder(), True, max_num_seqs=count, max_draft_tokens=2, kv_blocks=40 * count
    )
    graphs, seen, launches = graphs_of(engine), [], []
    attend, launch = graphs.attend, graphs.launch

    def record(context: float) -> None:
        # What the device has: up to two rounds of three tokens ahead of what the host has read.
        slots = [request.slot for request in engine.scheduler.running]
        true = float(engine.state.length[slots].float().mean())
        assert true - 6 <= context <= true
        seen.append((len(launches), context))
        attend(context)

    graphs.attend = record
    graphs.launch = lambda size: launches.append(size) or launch(size)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    run_jobs(engine, [Job(tuple(range(2, 5 + i)), params) for i in range(count)])
    alone = [at for at, _ in seen]
    assert seen[0][1] == pytest.approx(sum(3 + i for i in range(count)) / count + 1, abs=1)
    if count == 1:
        assert alone == list(range(len(launches)))
    elif count == 20:
        # Companies change at the end, when one after the other is done.
        assert alone[:3] == [0, LOOK_EVERY, 2 * LOOK_EVERY] and len(launches) > 30
    assert max(context for _, context in seen) > 60


def test_rounds_that_draw_are_recorded_in_idle_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smallest first, each once, as long as the device has memory to spare."""
    engine = long_engine(3, 480, 400)
    graphs = FakeCuda(graphs_of(engine).replay, 3, made_up)
    memory = [SPARE]
    monkeypatch.setattr(graphs, "spare_memory", lambda: memory[-1])
    assert not graphs.prepare() and not graphs.recorded, "an engine that records nothing ahead"
    graphs.measure(481)
    greedy = set(graphs.recorded)
    for _ in range(5):
        assert graphs.prepare()
    assert len(graphs.recorded) == len(greedy) + 5
    memory.append(SPARE - 1)
    assert not graphs.prepare() and len(graphs.recorded) == len(greedy) + 5
    memory.append(SPARE)
    while graphs.prepare():
        pass
    assert set(graphs.recorded) == greedy | {replace(size, kind=DRAWN) for size in greedy}
    assert set(graphs.recorded.values()) == {1}


def test_an_engine_prepares_nothing_while_it_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=2)
    monkeypatch.setattr(graphs_of(engine), "prepare", lambda: True)
    assert engine.prepare()
    engine.add(engine.make_request("a", (5, 6), SamplingParams(max_tokens=2)))
    assert not engine.prepare()
    assert not make_engine(tiny_decoder(), False).prepare()
