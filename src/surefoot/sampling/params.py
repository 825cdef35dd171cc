"""Sampling parameters of running requests as slot tensors, one row a slot."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from surefoot.kernels.upload import upload
from surefoot.request import Request, SamplingParams


@dataclass(frozen=True)
class SamplingStages:
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
    def of(cls, all_params: Iterable[SamplingParams]) -> SamplingStages:
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

        # Few tables, so that a request enters in few copies. A slot that nobody has is sampled
        # too, as padding: its entries must be valid.
        self._floats = torch.zeros((6, slots), dtype=torch.float32, device=device)
        self.temperature, self.min_p, self.top_p = self._floats[:3]
        self.repetition, self.presence, self.frequency = self._floats[3:]
        self._integers = torch.zeros((5, slots), dtype=torch.int64, device=device)
        self.top_k, self.seed, self.choice, self.prompt_length, self.min_length = self._integers
        """The last: prompt length + min_tokens; ends are masked while the sampled position is
        below."""
        self.top_p.fill_(1)
        self.repetition.fill_(1)
        self.top_k.fill_(vocab_size)
        self._biased: set[int] = set()
        self.stop_ids = torch.full((slots, 4), -1, dtype=torch.int64, device=device)
        self.bias_ids = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        self.bias = torch.zeros((slots, 1), dtype=torch.float32, device=device)

    def spread(self, slots: torch.Tensor) -> SlotParams:
        """The parameters of ``slots`` int64 [M], one entry each."""
        spread = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor) and not name.startswith("_"):
                setattr(spread, name, value[slots])
        return spread

    def write(self, requests: Sequence[Request]) -> None:
        """Enter requests' parameters into their slots."""
        every = [(request, request.params) for request in requests]
        slots = upload([request.slot for request in requests], self.device)
        floats = [
            (
                params.temperature,
                params.min_p,
                params.top_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            for _, params in every
        ]
        integers = [
            (
                params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size,
                request.seed,
                request.choice,
                len(request.prompt),
                len(request.prompt) + params.min_tokens,
            )
            for request, params in every
        ]
        self._floats[:, slots] = upload(torch.tensor(floats).t().contiguous(), self.device)
        self._integers[:, slots] = upload(torch.tensor(integers).t().contiguous(), self.device)
        stops = [list(request.stop_token_ids) for request in requests]
        self.stop_ids = _write_rows(self.stop_ids, slots, stops, -1)
        biases = [dict(params.logit_bias or {}) for _, params in every]
        changed = [i for i, r in enumerate(requests) if biases[i] or r.slot in self._biased]
        if changed:
            # Noted first, and what no longer holds last: biases are never left where nobody looks.
            self._biased.update(requests[i].slot for i in changed)
            slots = upload([requests[i].slot for i in changed], self.device)
            biases = [biases[i] for i in changed]
            self.bias_ids = _write_rows(self.bias_ids, slots, [list(bias) for bias in biases], -1)
            values = [list(bias.values()) for bias in biases]
            self.bias = _write_rows(self.bias, slots, values, 0)
            self._biased.difference_update(
                requests[i].slot for i, bias in zip(changed, biases, strict=True) if not bias
            )


def _write_rows(
    table: torch.Tensor, slots: torch.Tensor, rows: Sequence[list], fill: int
) -> torch.Tensor:
    """Set padded rows, widening the table (by powers of two) where it is too narrow."""
    longest = max(map(len, rows))
    if longest > table.shape[1]:
        width = 1 << (longest - 1).bit_length()
        wider = table.new_full((table.shape[0], width), fill)
        wider[:, : table.shape[1]] = table
        table = wider
    padded = [row + [fill] * (table.shape[1] - len(row)) for row in rows]
    table[slots] = upload(padded, table.device, table.dtype)
    return table
