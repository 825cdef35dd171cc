"""Only the logits that somebody reads are there: whoever is greedy and wants nothing else gets NaN
in their place, and texts stay the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given

import test_exactness as exactness
from harness import Job, random_weights, tiny_config
from surefoot.kernels.draws import CHANGED, READ, UNREAD, Draws, Maxima
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, sample_rows

TILE = 5
seen = {UNREAD: 0, READ: 0, CHANGED: 0}


class Sparing(TorchBackend):
    """As an NVIDIA GPU's does."""

    def head_where_used(
        self, norm: Any, eps: float, linear: Any, x: torch.Tensor, slots: Any, use: Any
    ) -> tuple[torch.Tensor, Maxima | None]:
        logits = self.head(norm, eps, linear, x)
        use = use[slots]
        tiles = [tile.max(dim=1) for tile in logits.split(TILE, dim=1)]
        first = TILE * torch.arange(len(tiles))
        columns = first + torch.stack([tile.indices for tile in tiles], dim=1)
        logits = torch.where((use == UNREAD).unsqueeze(1), torch.nan, logits)
        for kind in seen:
            seen[kind] += int((use == kind).sum())
        return logits, Maxima(torch.stack([tile.values for tile in tiles], dim=1), columns.int())

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor | None:
        if draws.maxima is None:
            return None
        values, columns = draws.maxima
        likeliest = columns.gather(1, values.argmax(dim=1, keepdim=True))[:, 0].long()
        use = draws.use[draws.slots]
        assert not logits[use != UNREAD].isnan().any()
        params: Any = SimpleNamespace(**vars(draws))
        rows = SampleRows(draws.slots, draws.positions, draws.slots[:, None], 0)
        stages = SamplingStages(draws.noise, min_p=True, top_k=logits.shape[1], top_p=True)
        found = sample_rows(logits.nan_to_num(-1.0), rows, params, stages)
        known = (use != CHANGED) & (draws.temperature[draws.slots] == 0)
        return torch.where(known, likeliest, found)


@exactness.patient
@exactness.BOTH
@pytest.mark.parametrize("ahead", [False, True])
def test_any_scenario_gives_the_plain_text(seeds: Any, ahead: bool) -> None:
    config = tiny_config()
    decoder = Decoder(config, random_weights(config), Sparing("cpu", torch.float32))

    def check(scenario: tuple[list[Job], dict[str, Any]]) -> None:
        work, options = scenario
        for job in work[1::2]:
            job.params = SamplingParams(temperature=0, max_tokens=job.params.max_tokens)
        exactness.check_scenario("torch", (work, options), None, ahead, decoder)

    seen.update(dict.fromkeys(seen, 0))
    seeds = type(seeds)(seeds, max_examples=60)
    seeds(given(exactness.scenarios())(check))()
    exactness.tally.check()
    assert min(seen.values()) > 20, seen


def use_of(params: SamplingParams, grammar: Any = None) -> int:
    table = SlotParams(2, 40, torch.device("cpu"))
    request = Request("a", (3, 4), params, SpeculationParams(), 1, 99)
    request.slot, request.grammar = 1, grammar
    table.write([request])
    assert table.use[0] == UNREAD, "nobody's"
    return int(table.use[1])


def test_whose_logits_are_read() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=9)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=9)
    assert use_of(greedy) == UNREAD
    assert use_of(replace(greedy, top_p=0.5, top_k=3, seed=4)) == UNREAD, "not of greedy ones"
    assert use_of(drawn) == READ
    assert use_of(replace(greedy, logprobs=0)) == READ
    changes: tuple[dict[str, Any], ...] = (
        dict(repetition_penalty=1.1),
        dict(presence_penalty=0.1),
        dict(frequency_penalty=-0.1),
        dict(logit_bias={3: 1.0}),
        dict(min_tokens=1),
        dict(allowed_token_ids=[3, 4]),
        dict(bad_words=["no"]),
    )
    for change in changes:
        for params in (greedy, drawn, replace(greedy, logprobs=2)):
            assert use_of(replace(params, **change)) == CHANGED, change
    assert use_of(greedy, grammar=object()) == CHANGED
