"""Recorded rounds through the engine: book-keeping kernels, and texts that grow long."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from device_engines import device_decoder, device_engine, plain_texts, register_twins

import test_triton_control as control
from harness import Job, run_jobs
from surefoot.request import SamplingParams

pytestmark = pytest.mark.gpu
ON_DEVICE = False
LONG = 2000


@pytest.mark.parametrize("names", [("ngram",), ("saboteur", "ngram")])
def test_book_keeping_kernels_decide_as_torch(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows for every draft. Where some have to do without, the last bits of a chance, which a
    GPU's logarithms round in another way, may decide whose they are."""
    register_twins(monkeypatch)
    control.test_decisions_are_those_of_the_torch_path(names, "fixed", monkeypatch)


@pytest.mark.parametrize("requests", [1, 4])
def test_long_texts_equal_eager_ones(requests: int) -> None:
    """Recorded once, replayed while the lengths grow by 2,000 tokens, without drafts and with."""
    decoder = device_decoder(2304)
    jobs = [
        Job(
            tuple(range(3 + index, 20 + index)),
            SamplingParams(
                temperature=(1.0, 0.0, 0.6, 1.0)[index],
                top_p=(1.0, 1.0, 0.9, 1.0)[index],
                seed=index,
                max_tokens=LONG,
                ignore_eos=True,
            ),
        )
        for index in range(requests)
    ]
    sizes = {"kv_blocks": 600, "block_size": 16, "max_model_len": 2304}
    expected = [request.output for request in plain_texts(decoder, jobs, **sizes)]
    for options in (
        {"max_draft_tokens": 0, "proposers": ()},
        {"draft_policy": "fixed", "max_draft_tokens": 4},
        {"draft_policy": "auto"},
    ):
        engine = device_engine(decoder, max_num_seqs=requests, **{**sizes, **options})
        got = run_jobs(engine, jobs)
        assert [request.output for request in got] == expected, options
        assert engine.stats.replays == engine.stats.rounds
        if options.get("draft_policy") == "fixed":
            assert sum(request.stats.verified for request in got) > 50
