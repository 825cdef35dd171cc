"""Embeddings: means of hidden states, however prompts are cut and whoever shares the rounds."""

from __future__ import annotations

import pytest
import torch

from harness import (
    Job,
    fresh_hidden,
    make_engine,
    needs_native,
    random_weights,
    run_alone,
    tiny_config,
    tiny_decoder,
)
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams, SpeculationParams

PROMPTS = [[5], [5, 6, 7, 8] * 6, [5, 6, 7, 8] * 6, [9, 4], list(range(2, 40)), [7] * 9]
ONE = SamplingParams(max_tokens=1, temperature=0)


def mean_of(decoder: Decoder, prompt: list[int]) -> torch.Tensor:
    """By definition, in float64."""
    hidden = fresh_hidden(decoder, prompt).double()
    weight = random_weights(tiny_config())["model.norm.weight"].double()
    normed = hidden / (hidden.pow(2).mean(1, keepdim=True) + tiny_config().norm_eps).sqrt()
    return (normed * weight).mean(0)


@pytest.mark.parametrize(
    ("backend", "ahead"),
    [("torch", None), ("torch", True), pytest.param("native", None, marks=needs_native)],
)
def test_means_are_those_of_whole_prompts(backend: str, ahead: bool | None) -> None:
    decoder = tiny_decoder(backend)
    engine = make_engine(
        decoder,
        ahead,
        kv_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=7,
        draft_policy="fixed",
        max_draft_tokens=3,
        calibration_seconds=0.0,
    )
    text = Job((5, 6, 7) * 4, SamplingParams(temperature=1, seed=3, max_tokens=30))
    scored = Job((8, 9) * 5, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    others = [engine.make_request("text", text.prompt, text.params)]
    others.append(engine.make_request("scored", scored.prompt, scored.params))
    pooled: list[Request] = [
        engine.make_request(f"e{index}", prompt, ONE, SpeculationParams("off"), pools=True)
        for index, prompt in enumerate(PROMPTS)
    ]
    for request in [*others, *pooled]:
        engine.add(request)
    steps = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        steps += 1
        if steps == 7:
            # As after an exception: what runs begins again.
            assert any(
                request.pooling and request.pooling.rows for request in engine.scheduler.running
            )
            engine.restore()
    assert sum(request.preemptions for request in pooled) > 0
    for prompt, request in zip(PROMPTS, pooled, strict=True):
        assert request.pooling is not None and request.pooling.rows == len(prompt)
        found = torch.tensor(request.pooling.mean, dtype=torch.float64)
        torch.testing.assert_close(found, mean_of(decoder, prompt), rtol=1e-4, atol=1e-5)
    for request, job in zip(others, (text, scored), strict=True):
        alone = run_alone(decoder, job)
        assert request.output == alone.output
        assert len(request.prompt_logprobs) == len(alone.prompt_logprobs)
