"""Defects of sampling that only rows behind drafts have: a parameter of the request that is not, or
not rightly, applied there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from surefoot.certify.defect import Defect
from surefoot.certify.seams import by_row, rows_of_drafts, sample_with, with_parameters, wrap
from surefoot.certify.seams import wrap_in_rounds as wrap_round
from surefoot.engine.engine import Engine
from surefoot.kernels.upload import Uploads
from surefoot.request import Request
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, adjust, filtered_scores, sample_rows

LOW_HALF = (1 << 32) - 1


def cut_seeds(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        params.seed = torch.where(of_drafts, params.seed & LOW_HALF, params.seed)

    if speculative:
        with_parameters(engine, change)


def forget_choices(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        params.choice = params.choice.masked_fill(of_drafts, 0)

    if speculative:
        with_parameters(engine, change)


def forget_bias(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        params.bias = params.bias.masked_fill(of_drafts.unsqueeze(1), 0.0)

    if speculative:
        with_parameters(engine, change)


def allow_early_ends(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        params.min_length = params.min_length.masked_fill(of_drafts, 0)

    if speculative:
        with_parameters(engine, change)


def share_temperature(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        drawn = of_drafts & (params.temperature > 0)
        first = params.temperature[0].clamp(min=0.05)
        params.temperature = torch.where(drawn, first, params.temperature)

    if speculative:
        with_parameters(engine, change)


def widen_top_k(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        params.top_k = torch.where(of_drafts, params.top_k + 1, params.top_k)

    if speculative:
        with_parameters(engine, change)


def penalise_prompts(engine: Engine, speculative: bool) -> None:
    def change(of_drafts: torch.Tensor, params: SlotParams) -> None:
        params.prompt_length = params.prompt_length.masked_fill(of_drafts, 0)

    if speculative:
        with_parameters(engine, change)


def filter_before_penalties(engine: Engine, speculative: bool) -> None:
    """The nucleus comes from the logits as they were."""

    def mixed(
        logits: torch.Tensor,
        rows: SampleRows,
        params: SlotParams,
        stages: SamplingStages,
        backend: Any = None,
        masks: Any = None,
        in_place: bool = False,
        maxima: Any = None,
    ) -> torch.Tensor:
        if not (stages.penalties and stages.top_p):
            return sample_rows(logits, rows, params, stages, backend, masks, in_place, maxima)
        of_drafts = rows_of_drafts(engine, rows)
        only = SamplingStages(noise=True, top_p=True)
        outside = filtered_scores(logits, rows.slots, params, only).isinf()
        sampled = params.temperature[rows.slots] > 0
        outside &= (of_drafts & sampled).unsqueeze(1)
        adjusted = adjust(logits, rows, params, stages).masked_fill(outside, float("-inf"))
        _, rows, params = by_row(engine, rows, params)
        params.top_p = params.top_p.masked_fill(of_drafts, 1.0)
        stages = stages.without_adjusting
        return sample_rows(adjusted, rows, params, stages, backend, masks, False, maxima)

    if speculative:
        sample_with(engine, mixed)


def misplace_logprobs(engine: Engine, speculative: bool) -> None:
    def shifted(of_tokens: Any, size: Any, layout: Any, logits: torch.Tensor, *rest: Any) -> Any:
        # The texts are longer by now: what is no span's first row is a draft's.
        behind = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        behind.index_fill_(0, layout.first_sample.clamp(max=len(logits) - 1), False)
        logits = torch.where(behind.unsqueeze(1), logits.roll(1, dims=0), logits)
        return of_tokens(size, layout, logits, *rest)

    if speculative:
        wrap_round(engine, engine.round.scores, "of_tokens", shifted)


def forget_prompts_when_resumed(engine: Engine, speculative: bool) -> None:
    state = engine.state

    def forget(slot: int, length: int) -> None:
        state.params.prompt_length[slot] = length

    def admit(method: Any, requests: Sequence[Request], uploads: Uploads) -> np.ndarray:
        slots = method(requests, uploads)
        for request in requests:
            if request.output:
                uploads.add(partial(forget, request.slot, request.length))
        return slots

    if speculative:
        wrap(state, "admit", admit)


DEFECTS = (
    Defect("uses 32 bits of the seed behind drafts", cut_seeds, "sampled parity"),
    Defect(
        "takes the batch's first temperature behind drafts", share_temperature, "sampled parity"
    ),
    Defect(
        "finds top-p behind drafts before penalties", filter_before_penalties, "sampling parameters"
    ),
    Defect("keeps one token more than top-k behind drafts", widen_top_k, "sampling parameters"),
    Defect("forgets logit bias behind drafts", forget_bias, "sampling parameters"),
    Defect("forgets min_tokens behind drafts", allow_early_ends, "sampling parameters"),
    Defect("forgets the choice of n behind drafts", forget_choices, "sampling parameters"),
    Defect("penalises the prompt as output behind drafts", penalise_prompts, "sampling parameters"),
    Defect(
        "reports the logprobs of the row before a draft's", misplace_logprobs, "sampling parameters"
    ),
    Defect(
        "takes the output of resumed requests for prompt",
        forget_prompts_when_resumed,
        "sampling parameters",
        scenario="batch of 8, chunked, prefix hits, shortage",
    ),
)
