"""Sampling kernels: argmax, draws, what changes logits before them, and logprobs."""

from __future__ import annotations

import ctypes

import torch

from surefoot.kernels.cpu.structs import (
    BAD_INDEX,
    AdjustmentsStruct,
    DrawsStruct,
    MasksStruct,
    ScoredStruct,
)
from surefoot.kernels.draws import Adjustments, Draws, TokenMasks
from surefoot.kernels.logprobs import ScoredSpans

ARGMAX_PART = 16384


def argmax(library: ctypes.CDLL, logits: torch.Tensor, threads: int) -> torch.Tensor:
    """float32 [M, V] without NaN -> int64 [M]; the lowest index among equals."""
    logits = _matrix(logits)
    rows, columns = logits.shape
    parts = rows * -(-columns // ARGMAX_PART)
    out = torch.empty(rows, dtype=torch.int64)
    values, indices = torch.empty(parts), torch.empty(parts, dtype=torch.int64)
    library.sf_argmax(
        logits.data_ptr(),
        rows,
        columns,
        out.data_ptr(),
        values.data_ptr(),
        indices.data_ptr(),
        threads,
    )
    return out


def draw(
    library: ctypes.CDLL, context: int, logits: torch.Tensor, draws: Draws, threads: int
) -> torch.Tensor:
    """float32 [M, V] without NaN -> int64 [M]. ``context`` is the address of a ``ContextStruct``.
    IndexError for a slot that does not exist, MemoryError when there is no scratch memory."""
    logits = _matrix(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    struct = DrawsStruct(
        _address(draws.slots, torch.int64),
        _address(draws.positions, torch.int64),
        draws.temperature.shape[0],
        *(_address(t, torch.float32) for t in (draws.temperature, draws.min_p, draws.top_p)),
        *(_address(t, torch.int64) for t in (draws.top_k, draws.seed, draws.choice)),
    )
    code = library.sf_draw(
        context, logits.data_ptr(), *logits.shape, ctypes.addressof(struct), out.data_ptr(), threads
    )
    _check(code)
    return out


def adjust(
    library: ctypes.CDLL, context: int, logits: torch.Tensor, changes: Adjustments, threads: int
) -> None:
    """float32 [M, V], in place. ``context`` and errors are those of ``draw``; a token id outside
    the vocabulary is an IndexError too. Where there is an error nothing is changed."""
    address = _address(logits, torch.float32)
    struct = AdjustmentsStruct(
        _address(changes.slots, torch.int64),
        _address(changes.positions, torch.int64),
        changes.min_length.shape[0],
    )
    if changes.penalties:
        floats = (changes.repetition, changes.presence, changes.frequency)
        for name, tensor in zip(("repetition", "presence", "frequency"), floats, strict=True):
            setattr(struct, name, _address(tensor, torch.float32))
        struct.prompt_length = _address(changes.prompt_length, torch.int64)
        struct.history = _address(changes.history[:1], torch.int64)  # rows may be strided
        struct.history_stride = changes.history.stride(0)
        struct.max_history = min(changes.max_history, changes.history.shape[1])
    if changes.biased:
        struct.bias_ids = _address(changes.bias_ids, torch.int64)
        struct.bias = _address(changes.bias, torch.float32)
        struct.biases = changes.bias.shape[1]
    if changes.min_tokens:
        struct.stop_ids = _address(changes.stop_ids, torch.int64)
        struct.stops = changes.stop_ids.shape[1]
        struct.min_length = _address(changes.min_length, torch.int64)
    code = library.sf_adjust(context, address, *logits.shape, ctypes.addressof(struct), threads)
    _check(code)


def mask(library: ctypes.CDLL, logits: torch.Tensor, masks: TokenMasks, threads: int) -> None:
    """float32 [M, V], in place: -inf for forbidden tokens. IndexError for masks that are too narrow
    or too few."""
    slots, (count, words) = masks.masked.shape[0], masks.bits.shape
    if masks.slots.shape[0] != logits.shape[0] or count != slots * masks.entries:
        raise IndexError(
            f"masks of {masks.slots.shape[0]} rows for {logits.shape[0]}, "
            f"{count} rows of bits for {slots} slots"
        )
    struct = MasksStruct(
        _address(masks.bits, torch.int32),
        words,
        masks.entries,
        _address(masks.slots, torch.int64),
        _address(masks.first, torch.int64),
        masks.first.shape[0],
        _address(masks.masked, torch.int64),
        slots,
    )
    address = _address(logits, torch.float32)
    _check(library.sf_mask(address, *logits.shape, ctypes.addressof(struct), threads))


def row_logprobs(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    width: int,
    threads: int,
    spans: ScoredSpans | None = None,
) -> torch.Tensor:
    """As ``kernels.logprobs.row_logprobs``, of logits without NaN; of equals, the first ones.
    IndexError for a token id outside the vocabulary."""
    logits = _matrix(logits)
    rows, columns = logits.shape
    width, count, scored = min(width, columns), rows, None
    if spans is not None:
        steps, places = spans.steps, spans.places
        scored = ScoredStruct(
            _address(spans.first, torch.int64),
            _address(places, torch.int64),
            None if steps is None else _address(steps[:1], torch.int64),  # rows may be strided
            places.shape[0],
            0 if steps is None else steps.stride(0),
            spans.count,
        )
        count = places.shape[0] * spans.count
    out = torch.empty((count, 2 + 2 * width), dtype=torch.int32)
    chosen = _address(tokens, torch.int64)
    which = None if scored is None else ctypes.addressof(scored)
    code = library.sf_scores(
        logits.data_ptr(), rows, columns, chosen, which, width, out.data_ptr(), threads
    )
    _check(code)
    return out


def _matrix(logits: torch.Tensor) -> torch.Tensor:
    if logits.shape[1] == 0:
        raise ValueError("logits of no columns")
    return logits.float().contiguous()


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"a sampling parameter must be contiguous {dtype}, is {tensor.dtype}")
    return tensor.data_ptr()


def _check(code: int) -> None:
    if code == BAD_INDEX:
        raise IndexError("a slot, a token id or a mask is out of range")
    if code:
        raise MemoryError("no memory to sample tokens")
