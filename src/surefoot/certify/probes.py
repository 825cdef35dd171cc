"""Probe proposers: they know the texts beforehand, so that drafts of known quality are offered
also where a real proposer would offer few. Their chances come from counter-based noise, so that a
recorded round draws new ones in each replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from surefoot.sampling.noise import philox
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class ProbeOptions:
    """``texts``: whole texts, prompt and output; an offer continues the first that fits."""

    texts: tuple[tuple[int, ...], ...] = ()
    seed: int = 0


class RightProbe(Proposer):
    """Offers what the request will say; each draft is spoilt with chance ``1 - accuracy``."""

    name = "probe-right"
    accuracy: ClassVar[float] = 1.0
    Options = ProbeOptions

    def __init__(self, options: ProbeOptions, state: SlotState) -> None:
        super().__init__(options, state)
        device, width = state.device, state.history.shape[1]
        self._calls = torch.zeros((), dtype=torch.int64, device=device)
        # Whatever does not fit in a slot cannot be said there.
        texts = [text[:width] for text in options.texts]
        rows = [[*text, *[-1] * (width - len(text))] for text in texts] or [[-1] * width]
        self._texts = torch.tensor(rows, dtype=torch.int64, device=device)
        """int64 [texts, width], padded with -1."""
        self._lengths = torch.tensor([len(text) for text in texts] or [0], device=device)

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts)

    def propose(self, slots: torch.Tensor) -> Drafts:
        state, width = self.state, self.state.max_drafts
        length = state.length[slots]
        places = torch.arange(self._texts.shape[1], device=slots.device)
        known = state.history[slots].unsqueeze(1) == self._texts
        known |= places >= length.view(-1, 1, 1)
        fits = known.all(dim=2) & (self._lengths > length.unsqueeze(1))
        found, first = fits.max(dim=1)
        steps = torch.arange(width, device=slots.device)
        columns = (length.unsqueeze(1) + steps).clamp(max=self._texts.shape[1] - 1)
        tokens = self._texts[first.unsqueeze(1), columns].clamp(min=0)
        lengths = torch.where(found, (self._lengths[first] - length).clamp(0, width), 0)
        if self.accuracy < 1:
            chance, other = self._draw(len(slots), width)
            wrong = (tokens + 1 + other % (state.vocab_size - 1)) % state.vocab_size
            tokens = torch.where(chance < self.accuracy, tokens, wrong)
        confidence = torch.full(tokens.shape, max(0.1, self.accuracy), device=slots.device)
        return Drafts(tokens, lengths, confidence)

    def _draw(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, columns] each: float32 in 0..1, and int64 words of 32 bits."""
        self._calls.add_(1)
        index = torch.arange(rows * columns, device=self._calls.device)
        zero = torch.zeros_like(index)
        counter = (index, self._calls.expand(len(index)), zero + self.options.seed, zero)
        first, second, _, _ = philox(counter, (zero, zero))
        shape = rows, columns
        return (first.float() * 2.0**-32).view(shape), second.view(shape)


class MixedProbe(RightProbe):
    """Drafts that are right three times out of four: spans end in the middle."""

    name = "probe-mixed"
    accuracy = 0.75


class GarbageProbe(RightProbe):
    """Random ids, some outside the vocabulary, and offers longer than can be verified."""

    name = "probe-garbage"
    accuracy = 0.0

    def propose(self, slots: torch.Tensor) -> Drafts:
        width, vocab = self.state.max_drafts + 3, self.state.vocab_size
        chance, words = self._draw(len(slots), width)
        _, more = self._draw(len(slots), 1)
        beyond = vocab // 16
        tokens = words % (vocab + 2 * beyond) - beyond
        tokens[:, 0] = words[:, 0] % vocab
        return Drafts(tokens, more[:, 0] % (width + 5), chance)


PROBES: tuple[type[RightProbe], ...] = (RightProbe, MixedProbe, GarbageProbe)
