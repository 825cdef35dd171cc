"""The sampler: penalties, bias, masked ends -> temperature -> min-p, top-k, top-p -> argmax of
score plus Gumbel noise. Twin: ``sampling.sampler.sample_rows``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.argmax import (
    BLOCK,
    argmax,
    largest,
    partial_argmax_kernel,
    parts_of,
    reduce_parts,
)
from surefoot.kernels.triton.filters import depth_of, find_limits, scores_of
from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.noise import gumbel, noise_words
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.penalties import apply_bias_and_ends, apply_penalties
from surefoot.kernels.triton.tables import DrawTables, SamplingTables, Stages


@jit
def draw_kernel(
    logits_ptr, largest_ptr, vocab, parts, slot_ptr, position_ptr, temperature_ptr, min_p_ptr,
    limit_ptr, seed_ptr, choice_ptr, value_ptr, index_ptr,
    MIN_P: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each part's best noised score. A greedy row's scores are its logits."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    temperature = tl.load(temperature_ptr + slot)
    column = part * BLOCK + tl.arange(0, BLOCK)
    if temperature == 0:
        values = tl.load(
            logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf")
        ).to(tl.float32)
    else:
        scores = scores_of(
            logits_ptr, largest_ptr, parts, temperature, row, column, vocab, PARTS
        )  # fmt: skip
        kept = column < vocab
        if MIN_P:
            kept = kept & (scores >= tl.log(tl.load(min_p_ptr + slot)))
        if LIMITED:
            kept = kept & (depth_of(scores) <= tl.load(limit_ptr + row))
        words = noise_words(
            tl.load(seed_ptr + slot), tl.load(choice_ptr + slot), tl.load(position_ptr + row),
            part * BLOCK, BLOCK,
        )  # fmt: skip
        values = tl.where(kept, scores + gumbel(words), float("-inf"))
    best, index = largest(values, column, vocab - 1)
    tl.store(value_ptr + row * parts + part, best)
    tl.store(index_ptr + row * parts + part, index)


class Sampler:
    """Samples up to ``rows`` rows a call; holds a scratch table for the penalties
    (int32 [rows, vocab]), made at the first call that needs it or by ``reserve``."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = device
        self._scratch: torch.Tensor | None = None

    def reserve(self) -> torch.Tensor:
        """The scratch table; before a graph capture that needs it."""
        if self._scratch is None:
            size = (self.rows, self.vocab_size)
            self._scratch = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._scratch

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
        max_history: int,
        params: SamplingTables,
        stages: Stages,
    ) -> torch.Tensor:
        """``logits`` [M, vocab] float32 or bf16 without NaN, contiguous; ``slots``, ``positions``
        and ``history`` as in ``sampling.sampler.SampleRows`` -> token ids int64 [M].

        Penalties, bias and masked ends change float32 ``logits`` in place: take logprobs before.
        ValueError for more rows than the scratch table has.
        """
        if stages.adjusts:
            logits = logits.float()
        if stages.penalties:
            if logits.shape[0] > self.rows:
                raise ValueError(f"{logits.shape[0]} rows to sample, room for {self.rows}")
            scratch = self.reserve()
            apply_penalties(logits, scratch, slots, positions, history, max_history, params)
        if stages.bias or stages.min_tokens:
            apply_bias_and_ends(logits, slots, positions, params, stages.bias, stages.min_tokens)
        if not stages.noise:
            return argmax(logits)
        return self.draw(logits, slots, positions, params, stages)

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        params: DrawTables,
        stages: Stages,
    ) -> torch.Tensor:
        """Temperature, filters, noise and argmax of logits that are ready for them."""
        rows, vocab = logits.shape
        maxima, indices = parts_of(rows, vocab, logits.device)
        parts, launch = maxima.shape[1], pdl(logits.device)
        partial_argmax_kernel[(rows, parts)](
            logits, logits.stride(0), vocab, maxima, indices, BLOCK, num_warps=4, **launch
        )
        limit = find_limits(
            logits, maxima, slots, params, stages.top_k > 0, stages.top_p, stages.min_p, BLOCK
        )
        values = torch.empty_like(maxima)
        draw_kernel[(rows, parts)](
            logits, maxima, vocab, parts, slots, positions, params.temperature, params.min_p,
            limit, params.seed, params.choice, values, indices,
            stages.min_p, limit is not None, BLOCK, next_power_of_2(parts), num_warps=4, **launch,
        )  # fmt: skip
        return reduce_parts(values, indices, vocab)
