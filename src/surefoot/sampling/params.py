"""Sampling parameters of running requests as slot tensors, one row a slot."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from surefoot.request import Request, SamplingParams


@dataclass(frozen=True)
class Features:
    """Which sampling stages some row of a round needs; host-side, from the requests in it."""

    noise: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False
    min_p: bool = False
    top_k: int = 0
    """Largest top_k of the round, 0 for none."""
    top_p: bool = False

    @classmethod
    def of(cls, all_params: Iterable[SamplingParams]) -> Features:
        every = list(all_params)
        drawn = [params for params in every if not params.greedy]
        return cls(
            noise=bool(drawn),
            penalties=any(params.penalised for params in every),
            bias=any(params.logit_bias for params in every),
            min_tokens=any(params.min_tokens for params in every),
            min_p=any(params.min_p for params in drawn),
            top_k=max((0, *(params.top_k for params in drawn))),
            top_p=any(params.top_p < 1 for params in drawn),
        )


class SlotParams:
    """Tensors [slots] (or [slots, n], padded with -1) on the device.

    ``stop_ids`` and the bias lists grow to the widest request seen.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.temperature = column(torch.float32)
        self.min_p = column(torch.float32)
        # A slot that nobody has is sampled too, as padding: its entries must be valid.
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.top_k = torch.full((slots,), vocab_size, dtype=torch.int64, device=device)
        self.repetition = torch.ones(slots, dtype=torch.float32, device=device)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)
        self.seed = column(torch.int64)
        self.choice = column(torch.int64)
        self.prompt_length = column(torch.int64)
        self.min_length = column(torch.int64)
        """Prompt length + min_tokens: ends are masked while the sampled position is below."""
        self.stop_ids = torch.full((slots, 4), -1, dtype=torch.int64, device=device)
        self.bias_ids = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        self.bias = torch.zeros((slots, 1), dtype=torch.float32, device=device)

    def spread(self, slots: torch.Tensor) -> SlotParams:
        """The parameters of ``slots`` int64 [M], one entry each."""
        spread = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(spread, name, value[slots])
        return spread

    def write(self, slot: int, request: Request) -> None:
        """Enter a request's parameters into its slot."""
        params = request.params
        self.temperature[slot] = params.temperature
        self.min_p[slot] = params.min_p
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.seed[slot] = request.seed
        self.choice[slot] = request.choice
        self.prompt_length[slot] = len(request.prompt)
        self.min_length[slot] = len(request.prompt) + params.min_tokens
        self.stop_ids = _write_row(self.stop_ids, slot, list(request.stop_token_ids), -1)
        bias = dict(params.logit_bias or {})
        self.bias_ids = _write_row(self.bias_ids, slot, list(bias), -1)
        self.bias = _write_row(self.bias, slot, list(bias.values()), 0)


def _write_row(table: torch.Tensor, slot: int, values: list, fill: int) -> torch.Tensor:
    """Set a padded row, widening the table (by powers of two) where it is too narrow."""
    if len(values) > table.shape[1]:
        width = 1 << (len(values) - 1).bit_length()
        wider = table.new_full((table.shape[0], width), fill)
        wider[:, : table.shape[1]] = table
        table = wider
    table[slot] = fill
    if values:
        table[slot, : len(values)] = torch.tensor(values, dtype=table.dtype, device=table.device)
    return table
