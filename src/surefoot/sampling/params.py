"""Sampling parameters of running requests as slot tensors, one row a slot."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from surefoot.kernels.draws import CHANGED, READ, UNREAD
from surefoot.kernels.upload import Uploads, places_of, sending, upload
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
        return cls.together(map(_stages_of, all_params))

    @classmethod
    def together(cls, stages: Iterable[SamplingStages]) -> SamplingStages:
        """Those of rounds that need all of these."""
        # Hundreds of requests are asked that come together, and mostly want the same.
        every = list({id(each): each for each in stages}.values())
        if len(every) == 1:
            return every[0]
        return cls(
            noise=any(each.noise for each in every),
            penalties=any(each.penalties for each in every),
            bias=any(each.bias for each in every),
            min_tokens=any(each.min_tokens for each in every),
            min_p=any(each.min_p for each in every),
            top_k=max((each.top_k for each in every), default=0),
            top_p=any(each.top_p for each in every),
        )

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return self.penalties or self.bias or self.min_tokens

    @property
    def without_adjusting(self) -> SamplingStages:
        """Those that follow, of logits that are adjusted already."""
        return replace(self, penalties=False, bias=False, min_tokens=False)


_shared = lru_cache(maxsize=1024)(SamplingStages)


def _stages_of(params: SamplingParams) -> SamplingStages:
    """Those of one request: one object for all that need the same."""
    noise = not params.greedy
    return _shared(
        noise,
        params.penalised,
        bool(params.logit_bias),
        bool(params.min_tokens),
        noise and bool(params.min_p),
        max(0, params.top_k) if noise else 0,
        noise and params.top_p < 1,
    )


_STOPS, _BIASES = 16, 16
"""Columns at first, more than most requests need: recorded rounds are recorded anew where a table
becomes wider."""


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
        self._integers = torch.zeros((6, slots), dtype=torch.int64, device=device)
        self.top_k, self.seed, self.choice, self.prompt_length = self._integers[:4]
        self.min_length, self.use = self._integers[4:]
        """Prompt length + min_tokens: ends are masked while the sampled position is below. And
        what becomes of the logits: ``UNREAD``, ``READ`` or ``CHANGED``."""
        self.top_p.fill_(1)
        self.repetition.fill_(1)
        self.top_k.fill_(vocab_size)
        self._biased: set[int] = set()
        self._written: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {}
        """By slot: entries of ``_floats``, and stop tokens, also those that are not sent yet."""
        self.stop_ids = torch.full((slots, _STOPS), -1, dtype=torch.int64, device=device)
        self.bias_ids = torch.full((slots, _BIASES), -1, dtype=torch.int64, device=device)
        self.bias = torch.zeros((slots, _BIASES), dtype=torch.float32, device=device)

    def spread(self, slots: torch.Tensor) -> SlotParams:
        """The parameters of ``slots`` int64 [M], one entry each."""
        spread = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor) and not name.startswith("_"):
                setattr(spread, name, value[slots])
        return spread

    def write(self, requests: Sequence[Request]) -> None:
        """Enter requests' parameters into their slots now."""
        with sending(self.device) as uploads:
            self.enter(requests, np.array([request.slot for request in requests]), uploads)
        self.write_biases(requests)

    def enter(self, requests: Sequence[Request], slots: np.ndarray, uploads: Uploads) -> None:
        """Have ``uploads`` enter requests' parameters, but for biases, into their ``slots`` int64
        [B]; the table of stop tokens becomes as wide as they need. What most have in common is
        written where a slot has something else."""
        integers = np.array([_integers(each, self.vocab_size) for each in requests], np.int64)
        uploads.write(self._integers, places_of(slots, self._integers.shape, 1), integers.T)
        changed: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {}
        for slot, request in zip(slots.tolist(), requests, strict=True):
            own = _floats(request.params), request.stop_token_ids
            if self._written.get(slot) != own:
                changed[slot] = own
        if changed:
            floats, stops = zip(*changed.values(), strict=True)
            self.stop_ids = _widened(self.stop_ids, stops, -1)
            rows = np.array(_padded(stops, self.stop_ids.shape[1], -1), dtype=np.int64)
            index, table = np.array(list(changed)), np.array(floats, dtype=np.float32).T
            uploads.write(self._floats, places_of(index, self._floats.shape, 1), table)
            uploads.add(self._enter_stops, index, rows)
            self._written |= changed

    def _enter_stops(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        # Others may have widened the table since, for all with nothing.
        self.stop_ids[:, : rows.shape[1]].index_copy_(0, slots, rows)

    def forget_written(self) -> None:
        """Nobody knows what arrived of what was to be entered."""
        self._written.clear()

    def write_biases(self, requests: Sequence[Request]) -> None:
        """Enter the biases of requests that have or had any."""
        biases = [dict(request.params.logit_bias or {}) for request in requests]
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
    """Set padded rows of a table, widened where it is too narrow, which is returned."""
    table = _widened(table, rows, fill)
    table[slots] = upload(_padded(rows, table.shape[1], fill), table.device, table.dtype)
    return table


def _widened(table: torch.Tensor, rows: Sequence[Sequence[Any]], fill: int) -> torch.Tensor:
    """``table``, or one that has room for ``rows``: widths are powers of two."""
    longest = max(map(len, rows))
    if longest <= table.shape[1]:
        return table
    wider = table.new_full((table.shape[0], 1 << (longest - 1).bit_length()), fill)
    wider[:, : table.shape[1]] = table
    return wider


def _padded(rows: Iterable[Sequence[Any]], width: int, fill: int) -> list[list]:
    return [[*row, *[fill] * (width - len(row))] for row in rows]


def _integers(request: Request, vocab_size: int) -> tuple[int, ...]:
    """A slot's entries of ``SlotParams._integers``."""
    params, prompt = request.params, len(request.prompt)
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    least = prompt + params.min_tokens
    return top_k, request.seed, request.choice, prompt, least, _use_of_logits(request)


def _use_of_logits(request: Request) -> int:
    params = request.params
    if params.hosted or request.grammar is not None or _stages_of(params).adjusts:
        return CHANGED
    return UNREAD if params.greedy and params.logprobs is None else READ


def _floats(params: SamplingParams) -> tuple[float, ...]:
    """A slot's entries of ``SlotParams._floats``."""
    return (
        params.temperature,
        params.min_p,
        params.top_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
