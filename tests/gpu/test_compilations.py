"""Serving compiles nothing: the start has compiled what rounds of any size launch."""

from __future__ import annotations

import multiprocessing
import random

import pytest

pytest.importorskip("triton")

import torch

from harness import tiny_config
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights
from surefoot.request import SamplingParams, SpeculationParams

pytestmark = pytest.mark.gpu
ON_DEVICE = False
LENGTHS = (1, 2, 3, 8, 15, 16, 17, 40, 64, 100, 150)


def compiled_while_serving(proposer: str) -> list[str]:
    """Kernels that waves of greedy requests make Triton compile or load, or NVRTC compile. Run it
    in a new process: one that has served before has them all."""
    from triton import knobs

    from surefoot.kernels.cuda import machine_code
    from surefoot.kernels.triton.backend import TritonBackend

    config = tiny_config(
        layers=4, heads=8, hidden_size=128, head_dim=64, vocab_size=1009, max_positions=512
    )
    device = torch.device("cuda")
    decoder = Decoder(
        config, DummyWeights(config, device, torch.bfloat16), TritonBackend("cuda", torch.bfloat16)
    )
    options = {"eagle3": {"draft_tokens": 3}} if "eagle3" in proposer else {}
    engine = Engine(
        decoder,
        EngineConfig(
            device="cuda",
            max_num_seqs=24,
            max_num_batched_tokens=256,
            max_model_len=256,
            max_draft_tokens=4,
            kv_blocks=24 * 17,
            proposers=(proposer,),
            proposer_options=options,
            enable_prefix_caching=False,
        ),
    )
    names: list[str] = []
    begun = machine_code.compiled.cache_info().misses
    knobs.compilation.listener = lambda **event: names.append(event["src"].name)
    chance = random.Random(0)
    for wave in range(12):
        for index in range(chance.randint(1, 24)):
            prompt = [chance.randrange(1009) for _ in range(chance.choice(LENGTHS))]
            params = SamplingParams(
                temperature=0, max_tokens=chance.randint(1, 60), ignore_eos=True
            )
            way = SpeculationParams(method=chance.choice(["auto", "auto", "off"]))
            engine.add(engine.make_request(f"{wave}.{index}", prompt, params, way))
            if chance.random() < 0.3:
                engine.step()
        while engine.has_work:
            engine.step()
    assert engine.stats.rounds == engine.stats.replays > 0
    return names + ["product.cu"] * (machine_code.compiled.cache_info().misses - begun)


@pytest.mark.parametrize("proposer", ["ngram", "eagle3=dummy", "dflash=dummy"])
def test_serving_compiles_nothing(proposer: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(compiled_while_serving, (proposer,)) == []
