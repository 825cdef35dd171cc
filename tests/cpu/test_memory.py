"""The GPU's memory plan: its arithmetic, and requests that could never fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import Job, make_engine, run_jobs, tiny_decoder
from surefoot.config import EngineConfig
from surefoot.engine.memory import OTHER, Allocations, MemoryPlan, divide, plan_memory
from surefoot.errors import SurefootError
from surefoot.kernels.backend import Backend, FlatBatch
from surefoot.request import SamplingParams
from surefoot.speculation.proposer import Needs

GIB = 1 << 30
TAKEN = {"weights": 8 * GIB, "slots": GIB // 8, "drafters": GIB}


def plan(*fixed: int, ours: int = 80 * GIB, **options: Any) -> MemoryPlan:
    config = EngineConfig(device="cuda", **options)
    needs = [Needs(longest_draft=3, fixed_bytes=size) for size in fixed]
    return divide(80 * GIB, ours, config, TAKEN, needs, rounds=2 * GIB)


def test_parts_add_up_to_what_may_be_used() -> None:
    found = plan(GIB)
    parts = found.bytes_by_part()
    assert parts.pop("total") == 80 * GIB
    assert sum(parts.values()) == int(80 * GIB * 0.9)
    assert (found.rounds, found.recorded, found.other) == (2 * GIB, 4 * GIB, OTHER)


def test_what_drafters_have_yet_to_take_is_kept_for_them() -> None:
    # 1 GiB is allocated already; of 3 GiB needed in all, 2 are to come.
    assert plan(GIB, 2 * GIB).kv == plan(GIB).kv - 2 * GIB
    assert plan().drafters == GIB


def test_rounds_that_are_not_recorded_take_no_room() -> None:
    assert plan(enforce_eager=True).kv == plan().kv + 4 * GIB


def test_what_others_hold_is_not_ours() -> None:
    assert plan(ours=40 * GIB).kv == plan().kv - (72 - 40) * GIB


def test_nothing_left_for_kv_is_refused_with_the_parts() -> None:
    with pytest.raises(SurefootError, match="drafters 66560") as caught:
        plan(65 * GIB)
    assert caught.value.option == "gpu_memory_utilization"


def test_pools_beyond_what_is_left_are_refused() -> None:
    found = plan()
    assert found.with_kv(found.kv, 1000, 2000).kv == found.kv
    with pytest.raises(SurefootError) as caught:
        found.with_kv(found.kv + 1, 1000, 2000)
    assert caught.value.option == "kv_cache_memory"


def test_the_table_tells_limits_and_recorded_rounds() -> None:
    found = plan(GIB).with_kv(GIB, 1000, 4096)
    text = "\n".join(found.lines())
    assert "1000 tokens; max_num_seqs x max_model_len are 4096" in text
    measured = {"recorded_rounds": 53, "recording_seconds": 31.6, "recorded_bytes": 700 << 20}
    done = MemoryPlan(**{**vars(found), **measured})
    assert "53 rounds recorded in 31.6 s hold 700 MiB" in "\n".join(done.lines())
    assert "weights 8.0" in done.summary() and "53 rounds" in done.summary()


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_that_never_fit_the_pool_are_refused_and_others_run(ahead: bool) -> None:
    # 5 blocks of 4 positions.
    engine = make_engine(tiny_decoder(), ahead, kv_blocks=5, max_num_seqs=2)
    assert engine.kv_tokens == 20 < engine.max_model_len
    prompt = tuple(range(2, 12))

    def params(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    with pytest.raises(SurefootError, match="the KV pool, 20") as caught:
        engine.make_request("long", prompt, params(11))
    assert caught.value.option == "max_tokens"
    with pytest.raises(SurefootError, match="the KV pool, 20") as caught:
        engine.make_request("longer", prompt * 2, params(1))
    assert caught.value.option == "prompt"
    jobs = [Job(prompt, params(10)), Job(prompt[:4], params(16))]
    assert [len(request.output) for request in run_jobs(engine, jobs)] == [10, 16]


def test_the_largest_round_is_run_before_memory_is_shared_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a made-up GPU that others hold 10 of 80 GiB of."""
    decoder, rows = tiny_decoder(), []
    forward, logits = decoder.forward, decoder.logits
    held = SimpleNamespace(now=9 * GIB, peak=0)

    def watched(batch: FlatBatch, kv: Any, layers: Any) -> Any:
        rows.append((len(batch.tokens), len(kv), layers))
        held.peak = held.now + 3 * GIB
        return forward(batch, kv, layers)

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(decoder, "forward", watched)
    monkeypatch.setattr(decoder, "logits", counted)
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "mem_get_info": (61 * GIB, 80 * GIB),
        "memory_reserved": 9 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: held.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: held.peak)
    taken = Allocations(torch.device("cuda"))
    for part, size in TAKEN.items():
        held.now = sum(taken.parts.values()) + size
        taken.enter(part)
    assert taken.parts == TAKEN and taken.reserved() == 9 * GIB
    config = EngineConfig(device="cuda", max_num_seqs=4, max_num_batched_tokens=32)
    needs = [Needs(longest_draft=3, captured_layers=(1,)), Needs(longest_draft=3)]
    found = plan_memory(decoder, config, 3, taken, needs)
    # Every request verifies 3 drafts beside the prompts, and all those rows are sampled.
    assert rows == [(32 + 4 * 3, decoder.config.layers, [1]), 4 * 4]
    assert found.rounds == 3 * GIB and found.kv == plan_of(3 * GIB, ours=70 * GIB).kv


def plan_of(rounds: int, ours: int) -> MemoryPlan:
    return divide(80 * GIB, ours, EngineConfig(device="cuda"), TAKEN, [], rounds)


def test_blocks_that_would_change_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "smallest_block", lambda *_: 8)
    for size in (1, 4, 12, 48):
        with pytest.raises(SurefootError, match="a power of two from 8 on") as caught:
            make_engine(tiny_decoder(), block_size=size)
        assert caught.value.option == "block_size"
    for size in (8, 32):
        make_engine(tiny_decoder(), block_size=size)
