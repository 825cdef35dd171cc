"""Compiled twins of the round's tensor operations, for slots that live on the CPU.

A round of eight requests is some sixty tensor operations of a few bytes each; on a CPU their
launches cost more than a tenth of a small model's forward. Each method here is one C call
(``kernels/cpu/round.c``, ``slots.c``) and does what the torch function named in it does.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.cpu.build import load_native

if TYPE_CHECKING:
    from surefoot.speculation.state import SlotState


class _State(ctypes.Structure):
    _fields_ = [
        ("history", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("length", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("limit", ctypes.c_void_p),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "row_slot", "first_row")),
        *((name, ctypes.c_void_p) for name in ("sample_index", "sample_slots")),
        *((name, ctypes.c_void_p) for name in ("sample_positions", "first_sample")),
    ]


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


class NativeRound:
    """The C functions over one ``SlotState``; tensors as in their torch twins, contiguous."""

    def __init__(self, library: ctypes.CDLL, state: SlotState) -> None:
        self.library = library
        # Addresses only, so that the slots and this do not keep each other alive.
        self._struct = _State(
            state.history.data_ptr(),
            state.history.shape[1],
            state.length.data_ptr(),
            state.computed.data_ptr(),
            state.limit.data_ptr(),
        )
        self.address = ctypes.addressof(self._struct)
        self.max_drafts = state.max_drafts

    @classmethod
    def of(cls, state: SlotState) -> NativeRound | None:
        """None where the slots are not on the CPU or there is no compiled library."""
        if state.device.type != "cpu":
            return None
        library = load_native()
        return None if library is None else cls(library, state)

    def write_drafts(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """``round.write_drafts``."""
        tokens = tokens.contiguous()
        self.library.sf_write_drafts(
            self.address, slots.data_ptr(), len(slots), tokens.data_ptr(), tokens.shape[1]
        )

    def lay_out(
        self,
        slots: torch.Tensor,
        known: torch.Tensor,
        drafts: torch.Tensor,
        first_sampling: int,
        rows: int,
        sampled_rows: int,
    ) -> tuple[torch.Tensor, ...]:
        """``layout.lay_out``: the tensors of ``_Layout``, in its order."""
        batch = len(slots)
        sizes = (rows, rows, rows, batch, sampled_rows, sampled_rows, sampled_rows, batch)
        out = tuple(_integers(size) for size in sizes)
        struct = _Layout(*(tensor.data_ptr() for tensor in out))
        self.library.sf_lay_out(
            self.address,
            slots.data_ptr(),
            known.data_ptr(),
            drafts.data_ptr(),
            batch,
            first_sampling,
            rows,
            sampled_rows,
            ctypes.addressof(struct),
        )
        return out

    def judge(
        self,
        slots: torch.Tensor,
        drafts: torch.Tensor,
        first_sampling: int,
        sampled: torch.Tensor,
        first_sample: torch.Tensor,
        stop_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """``SpeculativeRound.judge``."""
        batch, width = len(slots), self.max_drafts
        tokens = _integers(batch, width + 1)
        accepted, counts, ends = _integers(batch), _integers(batch), _integers(batch)
        self.library.sf_judge(
            self.address,
            slots.data_ptr(),
            drafts.data_ptr(),
            batch,
            first_sampling,
            sampled.data_ptr(),
            len(sampled),
            first_sample.data_ptr(),
            width,
            stop_ids.data_ptr(),
            stop_ids.shape[1],
            tokens.data_ptr(),
            accepted.data_ptr(),
            counts.data_ptr(),
            ends.data_ptr(),
        )
        return tokens, accepted, counts, ends

    def advance(
        self, slots: torch.Tensor, known: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``SpeculativeRound.advance``."""
        first, settled = _integers(len(slots)), _integers(len(slots))
        tokens, counts = tokens.contiguous(), counts.contiguous()
        self.library.sf_advance(
            self.address,
            slots.data_ptr(),
            known.data_ptr(),
            len(slots),
            tokens.data_ptr(),
            tokens.shape[1],
            counts.data_ptr(),
            first.data_ptr(),
            settled.data_ptr(),
        )
        return first, settled

    def sanitise(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        confidence: torch.Tensor,
        vocab_size: int,
        allowed: torch.Tensor,
        draft_limit: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``Controller.sanitise``: (tokens, lengths, confidence). ``allowed`` bool [slots]."""
        batch, width = len(slots), self.max_drafts
        tokens, lengths = tokens.contiguous(), lengths.contiguous()
        confidence = confidence.contiguous()
        out = _integers(batch, width), _integers(batch), torch.empty(batch, width)
        self.library.sf_sanitise(
            self.address,
            slots.data_ptr(),
            batch,
            tokens.data_ptr(),
            lengths.data_ptr(),
            confidence.data_ptr(),
            tokens.shape[1],
            width,
            vocab_size,
            allowed.data_ptr(),
            draft_limit.data_ptr(),
            *(tensor.data_ptr() for tensor in out),
        )
        return out


def split_rows_native(
    library: ctypes.CDLL,
    chances: torch.Tensor,
    table: torch.Tensor,
    min_gain: float,
    min_pace: float,
) -> torch.Tensor:
    """``controller.split_rows``."""
    chances, table = chances.contiguous(), table.contiguous()
    batch, width = chances.shape
    counts, gains, scratch = _integers(batch), torch.empty(batch), _integers(batch)
    library.sf_split(
        chances.data_ptr(),
        batch,
        width,
        table.data_ptr(),
        len(table),
        min_gain,
        min_pace,
        counts.data_ptr(),
        gains.data_ptr(),
        scratch.data_ptr(),
    )
    return counts
