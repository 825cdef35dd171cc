"""The token at a position as a pure function of (logits row, parameters, seed, position, tokens
before it).

Stages, each row as if it were the only one: grammar mask, penalties, bias, masked ends ->
temperature -> min-p, top-k, top-p -> argmax of score plus Gumbel noise, ties to the lowest id.
Greedy skips everything after the masks. Drafts before a row count as tokens before it, which is
all that is needed for exactness inside a span.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.kernels.backend import Backend
from surefoot.kernels.draws import Adjustments, Draws, Maxima, TokenMasks, mask_tokens
from surefoot.sampling.noise import gumbel
from surefoot.sampling.params import SamplingStages, SlotParams


@dataclass(frozen=True)
class SampleRows:
    """The rows to sample, M of them."""

    slots: torch.Tensor
    """int64 [M]: whose parameters apply."""
    positions: torch.Tensor
    """int64 [M]: position of the token to be sampled; those before it are its history."""
    history: torch.Tensor
    """int64 [slots, width]: token history by slot, tentative drafts in place. Only the first
    ``max_history`` columns are read."""
    max_history: int
    history_by_row: bool = False
    """``history`` is [M, width]: each row has its own (drafts in a tree)."""

    @property
    def texts(self) -> torch.Tensor:
        """int64 [M, max_history]."""
        first = slice(None) if self.history_by_row else self.slots
        return self.history[first, : self.max_history]


def sample_rows(
    logits: torch.Tensor,
    rows: SampleRows,
    params: SlotParams,
    stages: SamplingStages,
    backend: Backend | None = None,
    masks: TokenMasks | None = None,
    in_place: bool = False,
    maxima: Maxima | None = None,
) -> torch.Tensor:
    """float32 logits [M, vocab] -> token ids int64 [M]. ``backend`` may have kernels for it; its
    noise may differ from torch's in the last bits (see ``noise``). ``in_place``: nobody reads the
    logits afterwards, so that they may be changed. ``maxima``: what its ``head_where_used`` told
    beside them."""
    if masks is not None:
        # First of all, so that filters keep their share of what is allowed.
        logits = _to_change(logits, in_place)
        backend.mask_tokens(logits, masks) if backend else mask_tokens(logits, masks)
    if stages.adjusts:
        in_place = in_place or masks is not None
        logits = adjust(logits, rows, params, stages, backend, in_place)
    if not stages.noise and maxima is None:
        return backend.argmax(logits) if backend else logits.argmax(dim=-1)
    if backend:
        changed = masks is not None or stages.adjusts
        drawn = backend.draw(logits, draws_of(rows, params, stages.noise, maxima, changed))
        if drawn is not None:
            return drawn
    scores = filtered_scores(logits, rows.slots, params, stages)
    slots = rows.slots
    noise = gumbel(params.seed[slots], params.choice[slots], rows.positions, logits.shape[1])
    greedy = (params.temperature[slots] == 0).unsqueeze(1)
    return torch.where(greedy, logits, scores + noise).argmax(dim=-1)


def adjust(
    logits: torch.Tensor,
    rows: SampleRows,
    params: SlotParams,
    stages: SamplingStages,
    backend: Backend | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """float32 logits [M, vocab] with the penalties, biases and masked ends of the rows that have
    them. ``backend`` and ``in_place`` as of ``sample_rows``."""
    if backend:
        changed = _to_change(logits, in_place)
        if backend.adjust(changed, adjustments_of(rows, params, stages)):
            return changed
    if stages.penalties:
        logits = apply_penalties(logits, rows, params)
    if stages.bias:
        logits = apply_bias(logits, rows, params)
    if stages.min_tokens:
        logits = mask_ends(logits, rows, params)
    return logits


def _to_change(logits: torch.Tensor, in_place: bool) -> torch.Tensor:
    """``logits`` contiguous, or a copy."""
    return logits.contiguous() if in_place else logits.clone(memory_format=torch.contiguous_format)


def adjustments_of(
    rows: SampleRows,
    params: SlotParams,
    stages: SamplingStages,
    columns: torch.Tensor | None = None,
) -> Adjustments:
    """The rows' adjustments, as a backend wants them, with ``columns`` as it says there."""
    slots = rows.slots
    if rows.history_by_row:
        slots, params = torch.arange(len(slots), device=slots.device), params.spread(slots)
    return Adjustments(
        slots=slots,
        positions=rows.positions,
        penalties=stages.penalties,
        biased=stages.bias,
        min_tokens=stages.min_tokens,
        history=rows.history,
        max_history=rows.max_history,
        prompt_length=params.prompt_length,
        repetition=params.repetition,
        presence=params.presence,
        frequency=params.frequency,
        bias_ids=params.bias_ids,
        bias=params.bias,
        stop_ids=params.stop_ids,
        min_length=params.min_length,
        columns=columns,
    )


def draws_of(
    rows: SampleRows,
    params: SlotParams,
    noise: bool = True,
    maxima: Maxima | None = None,
    changed: bool = True,
) -> Draws:
    """The rows' draws, as a backend wants them."""
    return Draws(
        slots=rows.slots,
        positions=rows.positions,
        temperature=params.temperature,
        min_p=params.min_p,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        choice=params.choice,
        use=params.use,
        noise=noise,
        changed=changed,
        maxima=maxima,
    )


def apply_penalties(logits: torch.Tensor, rows: SampleRows, params: SlotParams) -> torch.Tensor:
    """Repetition penalty over prompt and output (CTRL, Keskar et al., 2019), then frequency and
    presence penalties over the output (OpenAI)."""
    slots = rows.slots
    tokens = rows.texts
    index = torch.arange(tokens.shape[1], device=tokens.device)
    before = index < rows.positions.unsqueeze(1)
    in_output = before & (index >= params.prompt_length[slots].unsqueeze(1))
    tokens = tokens.clamp(0, logits.shape[1] - 1)
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, before.float())
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, in_output.float())
    repetition = params.repetition[slots].unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, repeated, logits)
    logits = logits - params.frequency[slots].unsqueeze(1) * counts
    return logits - params.presence[slots].unsqueeze(1) * (counts > 0)


def apply_bias(logits: torch.Tensor, rows: SampleRows, params: SlotParams) -> torch.Tensor:
    """Add ``logit_bias``."""
    ids, bias = params.bias_ids[rows.slots], params.bias[rows.slots]
    return logits.scatter_add(1, ids.clamp(min=0), torch.where(ids >= 0, bias, 0.0))


def mask_ends(logits: torch.Tensor, rows: SampleRows, params: SlotParams) -> torch.Tensor:
    """Rule out end tokens and stop ids while fewer than ``min_tokens`` have been sampled."""
    ids = params.stop_ids[rows.slots]
    early = (rows.positions < params.min_length[rows.slots]).unsqueeze(1)
    masked = torch.zeros_like(logits).scatter_add_(
        1, ids.clamp(min=0), ((ids >= 0) & early).float()
    )
    return logits.masked_fill(masked > 0, float("-inf"))


def filtered_scores(
    logits: torch.Tensor, slots: torch.Tensor, params: SlotParams, stages: SamplingStages
) -> torch.Tensor:
    """Temperature and filters: log-probabilities up to a constant, -inf where filtered out.

    Rows with temperature 0 come out finite but meaningless.
    """
    temperature = params.temperature[slots].unsqueeze(1)
    temperature = torch.where(temperature == 0, 1.0, temperature)
    # The maximum goes first, so that tiny temperatures cannot overflow.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if stages.min_p:
        # The best score is 0, so min_p times its probability is a plain threshold.
        border = params.min_p[slots].double().log().float()
        scores = _drop_below(scores, border.unsqueeze(1))
    if stages.top_k:
        width = min(stages.top_k, scores.shape[1])
        best = scores.topk(width, dim=-1).values
        last = (params.top_k[slots].clamp(max=width) - 1).unsqueeze(1)
        kth = best.gather(1, last)
        unlimited = (params.top_k[slots] >= scores.shape[1]).unsqueeze(1)
        scores = _drop_below(scores, torch.where(unlimited, float("-inf"), kth))
    if stages.top_p:
        ordered = scores.sort(dim=-1, descending=True).values
        mass = torch.softmax(ordered, dim=-1)
        before = mass.cumsum(dim=-1) - mass
        kept = (before < params.top_p[slots].unsqueeze(1)).sum(dim=-1, keepdim=True)
        border = ordered.gather(1, kept.clamp(min=1) - 1)
        unlimited = (params.top_p[slots] >= 1).unsqueeze(1)
        scores = _drop_below(scores, torch.where(unlimited, float("-inf"), border))
    return scores


def _drop_below(scores: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores < threshold, float("-inf"))
