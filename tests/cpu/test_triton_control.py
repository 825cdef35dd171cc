"""The kernels of a recorded round's book-keeping against the torch operations they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from harness import Job, make_engine, on_torch_alone, random_weights, run_jobs, tiny_config
from surefoot.engine.engine import Engine
from surefoot.engine.graphs import RoundGraphs
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import control
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams, SpeculationParams

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)


def build(compiled: bool, **options: Any) -> Engine:
    config = tiny_config()
    backend = TorchBackend(triton_interpreter.DEVICE, torch.float32)
    backend.control = control if compiled else None
    decoder = Decoder(config, random_weights(config), backend)
    values: dict[str, Any] = dict(max_num_seqs=3, max_draft_tokens=4, kv_blocks=200)
    return on_torch_alone(make_engine(decoder, True, **{**values, **options}))


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
    """Everything that rounds told the host, as they told it; the chances as floats."""
    assert engine.pipeline is not None
    graphs, seen = engine.pipeline.graphs, []
    launch = graphs.launch

    def record(size: Any) -> Any:
        report = launch(size)
        report.landed()
        seen.append(report.rows[: size.spans].clone())
        return report

    monkeypatch.setattr(graphs, "launch", record)
    return seen


def guess_costs(engines: list[Engine]) -> None:
    """Measured times differ on a device, and with them the sizes of rounds."""
    for engine in engines:
        assert engine.pipeline is not None
        RoundGraphs.measure(engine.pipeline.graphs, engine.kv_blocks)
        engine.pipeline.graphs._tables_by.clear()


@pytest.mark.parametrize("policy", ["auto", "fixed"])
@pytest.mark.parametrize("names", [("ngram",), ("saboteur", "ngram")])
def test_decisions_are_those_of_the_torch_path(
    names: tuple[str, ...], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [job for job in jobs(6) if job.speculation.method in ("auto", "off", *names)]
    engines = [build(way, proposers=names, draft_policy=policy) for way in (False, True)]
    guess_costs(engines)
    seen = [reports(engine, monkeypatch) for engine in engines]
    texts = [[r.output for r in run_jobs(engine, work)] for engine in engines]
    assert texts[0] == texts[1]
    assert len(seen[0]) == len(seen[1]) > 10
    width = 4
    drafted = 0
    for left, right in zip(*seen, strict=True):
        living = left[:, 0] > 0
        # Whose the drafts are says nothing where there are none; tokens end with the counts.
        assert torch.equal(left[:, :4], right[:, :4])
        drafts = left[:, 3] > 0
        assert torch.equal(left[drafts, 4], right[drafts, 4])
        assert torch.equal(left[living, 5], right[living, 5])
        for row in torch.nonzero(living).flatten().tolist():
            count = int(left[row, 0])
            assert torch.equal(left[row, 6 : 6 + count], right[row, 6 : 6 + count])
        chances = [x[living, 7 + width :].contiguous().view(torch.float32) for x in (left, right)]
        torch.testing.assert_close(*chances, rtol=1e-5, atol=1e-7)
        drafted += int(left[:, 3].sum())
    assert drafted > 20
    for name in ("all_trials", "all_hits", "hits", "trials"):
        pairs = zip(*(engine.controller.estimators for engine in engines), strict=True)
        for left, right in pairs:
            if name.startswith("all"):
                continue  # The last round's news are entered by the next one.
            slots = slice(0, 3)
            torch.testing.assert_close(getattr(left, name)[slots], getattr(right, name)[slots])


@pytest.mark.parametrize(("spans", "width"), [(1, 1), (3, 4), (9, 8), (20, 63)])
def test_rows_go_to_the_most_likely_drafts(spans: int, width: int) -> None:
    from surefoot.speculation.controller import fill_rows

    torch.manual_seed(spans)
    slots = torch.randperm(spans + 2)[:spans]
    chances = (torch.rand(spans + 2, width) * 8).round() / 8
    chances = chances.sort(dim=1, descending=True).values
    chances[:, width // 2 + 1 :] *= (torch.rand(spans + 2, 1) > 0.5).float()
    alive = (torch.rand(spans + 2) > 0.2).long()
    history = torch.zeros((spans + 2, 10 + width), dtype=torch.int64)
    length = torch.randint(1, 9, (spans + 2,))
    tokens = torch.randint(1, 99, (spans + 2, width))
    seen, news = torch.ones(4, 8 * width), torch.ones(4, 8 * width)
    for rows in (spans, spans + 1, spans * 2, spans * (1 + width)):
        known, drafts = control.split(
            slots, -1, alive, chances, tokens, history, length, rows, seen, news, -0.5, True
        )
        assert torch.equal(known, alive[slots])
        room = torch.tensor(rows) - known.sum()
        assert torch.equal(drafts, fill_rows(chances[slots] * known.unsqueeze(1), room))
        for slot in slots.tolist():
            at = int(length[slot])
            assert torch.equal(history[slot, at : at + width], tokens[slot])
    # The news were entered once.
    assert not news.any()
    torch.testing.assert_close(seen, torch.full_like(seen, 2**-0.5 + 1))


@pytest.mark.parametrize("names", [("ngram",), ("saboteur", "ngram")])
def test_rounds_that_the_host_plans_keep_the_same_books(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and after recorded ones, which have to wait now and then."""
    engines = [build(way, proposers=names, draft_policy="fixed") for way in (False, True)]
    requests: list[list[Any]] = [[], []]
    recorded = planned = drafted = step = 0
    for engine in engines:
        assert engine.pipeline is not None
        fits = engine.pipeline.fits
        monkeypatch.setattr(
            engine.pipeline, "fits", lambda running, fits=fits: step % 10 > 4 and fits(running)
        )
    for step in range(50):
        for engine, known in zip(engines, requests, strict=True):
            if step in (0, 25):
                for index, job in enumerate(jobs(3)):
                    params = replace(job.params, max_tokens=14 + 6 * index)
                    known.append(
                        engine.make_request(
                            f"{step}-{index}", job.prompt, params, SpeculationParams("auto")
                        )
                    )
                    engine.add(known[-1])
            engine.step()
        left, right = engines
        assert [r.output for r in requests[0]] == [r.output for r in requests[1]]
        replays, recorded = recorded, left.stats.replays
        if recorded > replays or not left.has_work:
            continue
        planned += 1
        assert left.runner.offered == right.runner.offered
        drafted += sum(left.runner.offered.values())
        busy = [request.slot for request in left.scheduler.running]
        for mine, other in zip(*(e.controller.estimators for e in engines), strict=True):
            torch.testing.assert_close(mine.seen, other.seen)
            for name in ("hits", "trials", "watched_length"):
                torch.testing.assert_close(getattr(mine, name)[busy], getattr(other, name)[busy])
    assert recorded > 5 and planned > 10 and drafted > 20
