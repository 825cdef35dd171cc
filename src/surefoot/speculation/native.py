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
from surefoot.kernels.rounds import RoundSpans, RoundVerdict

if TYPE_CHECKING:
    from surefoot.speculation.books import Offers
    from surefoot.speculation.state import SlotState


class _State(ctypes.Structure):
    _fields_ = [
        ("history", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("length", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("limit", ctypes.c_void_p),
        ("alive", ctypes.c_void_p),
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
            state.alive.data_ptr(),
        )
        self.address = ctypes.addressof(self._struct)
        self.max_drafts = state.max_drafts
        self.nobody = state.idle_slot

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

    def lay_out(self, spans: RoundSpans, rows: int, sampled_rows: int) -> tuple[torch.Tensor, ...]:
        """``kernels.rounds.lay_out_spans``: the tensors of ``_Layout``, in its order."""
        batch = len(spans.slots)
        sizes = (rows, rows, rows, batch, sampled_rows, sampled_rows, sampled_rows, batch)
        out = tuple(_integers(size) for size in sizes)
        struct = _Layout(*(tensor.data_ptr() for tensor in out))
        self.library.sf_lay_out(
            self.address,
            spans.slots.data_ptr(),
            spans.known.data_ptr(),
            spans.drafts.data_ptr(),
            spans.samples.data_ptr(),
            batch,
            rows,
            sampled_rows,
            ctypes.addressof(struct),
        )
        return out

    def judge(
        self,
        spans: RoundSpans,
        first_sample: torch.Tensor,
        sampled: torch.Tensor,
        stop_ids: torch.Tensor,
    ) -> RoundVerdict:
        """``kernels.rounds.judge_and_advance``."""
        batch, width = len(spans.slots), self.max_drafts
        tokens = _integers(batch, width + 1)
        out = [_integers(batch) for _ in range(6)]
        self.library.sf_judge(
            self.address,
            spans.slots.data_ptr(),
            spans.known.data_ptr(),
            spans.drafts.data_ptr(),
            spans.samples.data_ptr(),
            batch,
            sampled.data_ptr(),
            len(sampled),
            first_sample.data_ptr(),
            width,
            stop_ids.data_ptr(),
            stop_ids.shape[1],
            tokens.data_ptr(),
            *(tensor.data_ptr() for tensor in out),
            self.nobody,
        )
        return RoundVerdict(tokens, *out)

    def split(
        self,
        slots: torch.Tensor,
        quota: torch.Tensor,
        rows: int,
        sampled_rows: int,
        offers: Offers,
        verifies: bool,
    ) -> RoundSpans:
        """``OfferBooks.split``."""
        batch, width = len(slots), self.max_drafts
        known, drafts, samples, scratch = _integers(4, batch)
        mine = torch.empty(batch * width if verifies else 0)
        self.library.sf_split(
            self.address,
            slots.data_ptr(),
            quota.data_ptr(),
            batch,
            rows,
            sampled_rows,
            offers.chances.data_ptr(),
            offers.tokens.data_ptr(),
            width,
            verifies,
            known.data_ptr(),
            drafts.data_ptr(),
            samples.data_ptr(),
            scratch.data_ptr(),
            mine.data_ptr(),
        )
        return RoundSpans(slots, known, drafts, samples)

    def report(
        self,
        slots: torch.Tensor,
        drafts: torch.Tensor,
        whose: torch.Tensor,
        verdict: RoundVerdict,
        offers: Offers,
        report: torch.Tensor,
    ) -> None:
        """``OfferBooks._report``, and the marks of requests that ended."""
        self.library.sf_report(
            self.address,
            slots.data_ptr(),
            len(slots),
            self.nobody,
            verdict.counts.data_ptr(),
            verdict.accepted.data_ptr(),
            verdict.ends.data_ptr(),
            drafts.data_ptr(),
            whose.data_ptr(),
            verdict.going.data_ptr(),
            verdict.tokens.data_ptr(),
            self.max_drafts,
            offers.tokens.data_ptr(),
            offers.chances.data_ptr(),
            offers.lengths.data_ptr(),
            offers.proposer.data_ptr(),
            None if offers.parents is None else offers.parents.data_ptr(),
            report.data_ptr(),
            report.shape[1],
        )

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
