"""The EAGLE-3 network against what the official implementation gave for the same checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_golden import BLOCK, GOLDEN, Bench
from harness import native_backend, needs_native
from surefoot.kernels.backend import Backend
from surefoot.kernels.torch_backend import TorchBackend

TOLERANCE = 1e-4
ROUNDS = 4
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


def backend_of(name: str) -> Backend:
    if name == "native":
        return native_backend()
    if name == "torch":
        return TorchBackend("cpu", torch.float32)
    pytest.importorskip("triton")
    import triton_interpreter
    from surefoot.kernels.triton.backend import TritonBackend

    if triton_interpreter.ON_GPU:
        pytest.skip("compiled on a GPU")
    return TritonBackend("cpu", torch.float32)


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "eagle3_chain" / "rounds.safetensors")


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < TOLERANCE


def chain(
    bench: Bench, hidden: torch.Tensor, length: int, golden: Any, name: str, steps: int = 5
) -> None:
    """The steps after the live row, whose hidden state is ``hidden`` [1, n]."""
    drafter = bench.drafter
    assert drafter.target_ids is not None
    logits = drafter.logits(hidden)
    for step in range(steps):
        token = drafter.target_ids[logits.argmax(dim=-1)]
        assert token.tolist() == golden[f"{name}.draft_tokens"][step : step + 1].tolist()
        keys = torch.tensor([length + 1 + step])
        assert (keys - 1).tolist() == golden[f"{name}.chain_positions"][step : step + 1].tolist()
        hidden = drafter.step(drafter.fed_back(hidden).clone(), bench.batch(token, keys), bench.kv)
        near(hidden, golden[f"{name}.chain_y"][step : step + 1])
        logits = drafter.logits(hidden)
        near(logits, golden[f"{name}.chain_logits"][step : step + 1])
    assert drafter.target_ids[logits.argmax()] == golden[f"{name}.draft_tokens"][steps]


@pytest.mark.parametrize("name", BACKENDS)
def test_whole_passes_equal_the_official_ones(name: str, golden: Any) -> None:
    """Every row of prefill and catch-up through the whole network."""
    bench = Bench("eagle3_chain", backend_of(name), 512)
    for number in range(ROUNDS):
        r = f"r{number}"
        features = bench.drafter.fuse(golden[f"{r}.aux_cat"])
        near(features, golden[f"{r}.fc_out"])
        keys = golden[f"{r}.slot_positions"] + 1
        batch = bench.batch(golden[f"{r}.slot_tokens"], keys)
        hidden = bench.drafter.step(features.clone(), batch, bench.kv)
        near(hidden, golden[f"{r}.y"])
        near(bench.drafter.logits(hidden), golden[f"{r}.logits"])
        chain(bench, hidden[-1:].clone(), int(keys[-1]), golden, r)
        if name == "torch":
            check_keys(bench, golden, r)


def check_keys(bench: Bench, golden: Any, r: str) -> None:
    """The stable entries, from key 1 on."""
    count = golden[f"{r}.kv_k"].shape[1]
    # Steps have written behind them, and nowhere else.
    index = torch.arange(1, count + 1)
    blocks = bench.tables[1, index // BLOCK].long()
    for stored, kind in zip(bench.kv[0], "kv", strict=True):
        found = stored[blocks, index % BLOCK].transpose(0, 1)
        near(found, golden[f"{r}.kv_{kind}"])


@pytest.mark.parametrize("name", BACKENDS)
def test_pruned_catch_up_gives_the_same(name: str, golden: Any) -> None:
    check_pruned(backend_of(name), golden, ROUNDS, 5)


def test_pruned_catch_up_on_triton(golden: Any) -> None:
    """Interpreted, so that a few steps have to do."""
    check_pruned(backend_of("triton"), golden, rounds=1, steps=1)


def check_pruned(backend: Backend, golden: Any, rounds: int, steps: int) -> None:
    """Keys and values for settled rows, the network for the live row alone; the live row's entry
    is written again when its position has settled."""
    bench = Bench("eagle3_chain", backend, 512)
    drafter, before, first = bench.drafter, None, 0
    for number in range(rounds):
        r = f"r{number}"
        features = drafter.fuse(golden[f"{r}.aux_cat"])
        if before is None:
            # Position 0 has no feature before it; what is written there must not matter.
            before = torch.full_like(features[:1], 9.0)
        shifted = torch.cat((before, features[:-1]))
        ids = golden[f"{r}.ids"]
        keys = torch.arange(first, len(ids) - 1)
        batch = bench.batch(ids[keys], keys, (keys - 1).clamp(min=0))
        drafter.write_keys(shifted, batch, bench.kv)
        before, first = features[-1:].clone(), len(ids) - 1
        live = bench.batch(ids[-1:], torch.tensor([first]))
        hidden = drafter.step(before.clone(), live, bench.kv)
        near(hidden, golden[f"{r}.y"][-1:])
        chain(bench, hidden, first, golden, r, steps)
