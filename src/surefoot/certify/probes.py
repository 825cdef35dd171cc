"""Probe proposers: they know the texts beforehand, so that drafts of known quality are offered
also where a real proposer would offer few. They read tensors on the host, which is fine here."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch

from surefoot.speculation.proposer import Drafts, Needs, Proposer


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

    def __init__(self, options: ProbeOptions, state: object) -> None:
        super().__init__(options, state)  # type: ignore[arg-type]
        self._random = Random(options.seed)
        self._last: dict[int, tuple[int, ...]] = {}

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts)

    def propose(self, slots: torch.Tensor) -> Drafts:
        width = self.state.max_drafts
        tokens = torch.zeros((len(slots), width), dtype=torch.int64)
        lengths = torch.zeros(len(slots), dtype=torch.int64)
        for row, slot in enumerate(slots.tolist()):
            known = tuple(self.state.history[slot, : int(self.state.length[slot])].tolist())
            future = self._future(slot, known)[:width]
            tokens[row, : len(future)] = torch.tensor(future, dtype=torch.int64)
            lengths[row] = len(future)
        return Drafts(tokens, lengths, torch.full((len(slots), width), max(0.1, self.accuracy)))

    def _future(self, slot: int, known: tuple[int, ...]) -> list[int]:
        for text in (self._last.get(slot, ()), *self.options.texts):
            if len(text) > len(known) and text[: len(known)] == known:
                self._last[slot] = text
                return [self._spoil(token) for token in text[len(known) :][:64]]
        return []

    def _spoil(self, token: int) -> int:
        if self._random.random() < self.accuracy:
            return token
        vocab = self.state.vocab_size
        return (token + self._random.randrange(1, vocab)) % vocab


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
        shape = (len(slots), width)
        generator = torch.Generator().manual_seed(self._random.randrange(2**31))
        tokens = torch.randint(-(vocab // 16), vocab + vocab // 16, shape, generator=generator)
        tokens[:, 0] = torch.randint(0, vocab, (len(slots),), generator=generator)
        lengths = torch.randint(0, width + 5, (len(slots),), generator=generator)
        return Drafts(tokens, lengths, torch.rand(shape, generator=generator))


PROBES: tuple[type[RightProbe], ...] = (RightProbe, MixedProbe, GarbageProbe)
