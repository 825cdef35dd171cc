"""Measuring rounds on an idle engine: they are full, and leave no trace."""

from __future__ import annotations

import torch

from harness import Job, make_engine, random_weights, run_jobs, tiny_config, tiny_decoder
from surefoot.engine.engine import Engine
from surefoot.engine.rehearsal import rehearsal
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams
from surefoot.speculation.replay import GREEDY, Size


def ahead_engine(**options: object) -> Engine:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=3, **options)
    assert engine.pipeline is not None
    return engine


def contents(engine: Engine) -> dict[str, torch.Tensor]:
    assert engine.pipeline is not None
    estimators = dict(enumerate(engine.controller.estimators))
    parts = {
        "state": engine.state,
        "replay": engine.pipeline.replay,
        "controller": engine.controller,
        **{f"estimator {index}": part for index, part in estimators.items()},
    }
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


def test_rehearsed_rounds_leave_no_trace() -> None:
    engine = ahead_engine()
    assert engine.pipeline is not None
    replay = engine.pipeline.replay
    engine.controller.allowed.fill_(True)
    engine.controller.draft_limit.fill_(3)
    tensors = contents(engine)
    before = {name: value.clone() for name, value in tensors.items()}
    with rehearsal(replay, engine.kv_blocks, 40) as seat:
        seat(4)
        for _ in range(6):
            replay(Size(4, 16, GREEDY, (0,)))
        assert not torch.equal(tensors["estimator 0.all_trials"], before["estimator 0.all_trials"])
    after = contents(engine)
    for name, value in tensors.items():
        assert after[name] is value, f"{name} is another tensor now"
        assert torch.equal(value, before[name]), f"{name} changed"


def test_rehearsed_rounds_verify_every_draft_of_everybody() -> None:
    engine = ahead_engine()
    assert engine.pipeline is not None
    replay = engine.pipeline.replay
    with rehearsal(replay, engine.kv_blocks, 40) as seat:
        for rows, drafts in ((4, [0, 0, 0, 0]), (8, [1, 1, 1, 1]), (16, [3, 3, 3, 3])):
            seat(4)
            replay(Size(4, rows, GREEDY, (0,)))
            assert replay.report[:4, 3].tolist() == drafts
            assert (replay.report[:4, 0] >= 1).all()
        seat(2)
        replay(Size(4, 8, GREEDY, (0,)))
        assert (replay.report[:4, 0] >= 1).tolist() == [True, True, False, False]


def test_rehearsing_requests_read_blocks_of_their_own() -> None:
    engine = ahead_engine(kv_blocks=44)
    assert engine.pipeline is not None
    with rehearsal(engine.pipeline.replay, engine.kv_blocks, 40):
        used = engine.state.block_tables[:4, :11].flatten().tolist()
        assert sorted(used) == list(range(1, 45))
    # Too small a pool is shared, and block 0 never used.
    with rehearsal(engine.pipeline.replay, 8, 40):
        used = engine.state.block_tables[:4, :11].flatten().tolist()
        assert set(used) == set(range(1, 8))


def test_requests_after_a_rehearsal_get_the_text_that_they_got_before() -> None:
    job = Job((5, 9, 5, 9, 5), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine = ahead_engine(draft_policy="fixed")
    assert engine.pipeline is not None
    [expected] = run_jobs(engine, [job])
    with rehearsal(engine.pipeline.replay, engine.kv_blocks, 40) as seat:
        seat(3)
        engine.pipeline.replay(Size(4, 16, GREEDY, (0,)))
    assert run_jobs(engine, [job])[0].output == expected.output


def test_rehearsals_stay_within_the_longest_text() -> None:
    """There are rotations for so many positions only."""
    decoder = tiny_decoder()
    for longest in (3, 12, 40):
        engine = make_engine(
            decoder, True, max_num_seqs=2, max_draft_tokens=8, max_model_len=longest
        )
        assert engine.pipeline is not None
        replay, state = engine.pipeline.replay, engine.state
        with rehearsal(replay, engine.kv_blocks, 1024) as seat:
            seat(2)
            context = int(state.length[0])
            replay(Size(2, 18, GREEDY, (0,)))
            drafts = replay.report[:2, 3]
            assert 1 <= context <= max(1, longest * 3 // 4)
            assert (context + drafts <= longest).all()


def test_costs_are_measured_within_the_longest_text() -> None:
    config = tiny_config()
    decoder = Decoder(config, random_weights(config), TorchBackend("cpu", torch.float32), 20)
    engine = make_engine(decoder, max_model_len=20, max_draft_tokens=8, calibration_seconds=5)
    assert engine.controller.cost.predict(20) > 0
