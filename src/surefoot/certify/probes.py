"""Probe proposers: they know the texts beforehand, so that drafts of known quality are offered
also where a real proposer would offer few. Their chances come from counter-based noise, so that a
recorded round draws new ones in each replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from surefoot.sampling.noise import philox
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class ProbeOptions:
    """``texts``: whole texts, prompt and output; an offer continues the first that fits.
    ``others``: of each of them, or none, what might be taken for its tokens."""

    texts: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    others: tuple[Others, ...] = ()


@dataclass(frozen=True)
class Others:
    """By position of a text: the token that came nearest to the one that stands there, -1 where
    nobody knows, and how far behind it was (infinite there)."""

    tokens: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a text says next, for B slots: ``tokens`` int64 [B, K], valid up to ``lengths`` int64
    [B], of text ``first`` int64 [B], at its ``columns`` int64 [B, K]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    first: torch.Tensor
    columns: torch.Tensor


def _table(rows: Sequence[Sequence[float]], width: int, padding: float) -> torch.Tensor:
    """[rows, width], cut or padded."""
    return torch.tensor([[*row[:width], *[padding] * (width - len(row))] for row in rows])


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
        self._texts = _table([*texts] or [()], width, -1).to(device)
        """int64 [texts, width], padded with -1."""
        self._lengths = torch.tensor([len(text) for text in texts] or [0], device=device)
        others = options.others or (Others(),) * max(1, len(texts))
        self._others = _table([other.tokens for other in others], width, -1).to(device)
        """int64 [texts, width]: ``Others.tokens``."""
        gaps = _table([other.gaps for other in others], width, float("inf"))
        self._gaps = gaps.float().to(device)

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts)

    def find(self, slots: torch.Tensor) -> Found:
        """What the texts say behind the committed tokens of ``slots`` [B]."""
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
        return Found(tokens, lengths, first, columns)

    def propose(self, slots: torch.Tensor) -> Drafts:
        found, vocab = self.find(slots), self.state.vocab_size
        tokens = found.tokens
        if self.accuracy < 1:
            chance, other = self._draw(*tokens.shape)
            wrong = (tokens + 1 + other % (vocab - 1)) % vocab
            tokens = torch.where(chance < self.accuracy, tokens, wrong)
        confidence = torch.full(tokens.shape, max(0.1, self.accuracy), device=slots.device)
        return Drafts(tokens, found.lengths, confidence)

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


class RunnerUpProbe(RightProbe):
    """Right drafts up to the nearest tie in reach, and there the token that came second: what a
    judge that accepts "nearly right" drafts would take. Behind each such tie comes the next one,
    so that the nearest ties of a text are all tried."""

    name = "probe-runner-up"

    def propose(self, slots: torch.Tensor) -> Drafts:
        found = self.find(slots)
        steps = torch.arange(found.tokens.shape[1], device=slots.device)
        where = found.first.unsqueeze(1), found.columns
        beyond = steps >= found.lengths.unsqueeze(1)
        gaps, others = self._gaps[where].masked_fill(beyond, float("inf")), self._others[where]
        nearest, at = gaps.min(dim=1, keepdim=True)
        tried = nearest.isfinite()
        tokens = torch.where(tried & (steps == at), others, found.tokens)
        lengths = torch.where(tried.squeeze(1), at.squeeze(1) + 1, found.lengths)
        return Drafts(tokens, lengths, torch.full(tokens.shape, 0.9, device=slots.device))


class TreeProbe(RightProbe):
    """Trees with the right path in them, hidden: at each depth the right token and a wrong one (the
    second best, where it is known) in either order, and below the wrong one the token that would
    be right one step later. Now and then the path breaks off."""

    name = "probe-tree"
    accuracy = 0.85

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts, trees=True)

    def propose(self, slots: torch.Tensor) -> Drafts:
        found, vocab = self.find(slots), self.state.vocab_size
        right, others = found.tokens, self._others[found.first.unsqueeze(1), found.columns]
        chance, words = self._draw(*right.shape)
        wrong = torch.where((others >= 0) & (others != right), others, (right + 1) % vocab)
        # Where the path breaks off, neither of the two is right, nor are they the same.
        spoilt = (right + 2 + words % (vocab - 4)) % vocab
        spoilt = torch.where(spoilt == wrong, (spoilt + 1) % vocab, spoilt)
        kept = torch.where(chance < self.accuracy, right, spoilt)
        later = right.roll(-1, dims=1)
        # Bits of a word that nothing else reads.
        second = (words >> 16) & 1
        first_token = torch.where(second == 1, wrong, kept)
        second_token = torch.where(second == 1, kept, wrong)
        tokens = torch.stack((first_token, second_token, later), dim=2).flatten(1)
        depth = torch.arange(right.shape[1], device=slots.device)
        above = (3 * depth + second).roll(1, dims=1)
        above[:, 0] = -1
        parents = torch.stack((above, above, 3 * depth + 1 - second), dim=2).flatten(1)
        confidence = torch.full(tokens.shape, 0.8, device=slots.device)
        return Drafts(tokens, 3 * found.lengths, confidence, parents)


PROBES: tuple[type[RightProbe], ...] = (RightProbe, MixedProbe, GarbageProbe, RunnerUpProbe)
"""Of every tested engine."""
